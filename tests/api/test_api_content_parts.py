"""Each kind of part, in each place of a conversation, in each dialect."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.api.tools import prompt_of, says, tool_api

ANSWER = "Fine."
HI = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "I see."}
NOTE = "the note says 7"


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


PNG, PDF, WAV = b64("\x89PNG picture"), b64("%PDF-1.7"), b64("RIFF sound")
# A model of texts reads the text of a document, and PDF has none.
DAMAGED = "is a damaged PDF document (Failed to load document (PDFium: Data format error).)"
LINES = {
    "image": "[An image was left out: you can read text only.]",
    "sound": "[A sound was left out: you can read text only.]",
    "video": "[A video was left out: you can read text only.]",
    "pdf": f"[A PDF document (plan.pdf) was left out: it {DAMAGED}: save it again.]",
    "file": "[A file was left out: you can read text only.]",
    "unknown": "[A part of the type hologram was left out: you can read text only.]",
}


def openai_image(url: str, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def chat_file(media: str, data: str, name: str) -> dict[str, Any]:
    return {"type": "file", "file": {"filename": name, "file_data": f"data:{media};base64,{data}"}}


def response_file(media: str, data: str, name: str) -> dict[str, Any]:
    return {**chat_file(media, data, name)["file"], "type": "input_file"}


def source(type_: str, **more: str) -> dict[str, Any]:
    return {"source": {"type": type_, **more}}


# The parts of each dialect: (a name for the test, the part, the key of its line or its text).
CHAT_PARTS = [
    ("image", openai_image(f"data:image/png;base64,{PNG}", detail="low"), "image"),
    ("image as text", {"type": "image_url", "image_url": "https://example.com/a.png"}, "image"),
    ("image without data", {"type": "image_url"}, "image"),
    ("image of responses", {"type": "input_image", "image_url": PNG}, "image"),
    ("sound", {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}}, "sound"),
    ("video", {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}, "video"),
    ("pdf", chat_file("application/pdf", PDF, "plan.pdf"), "pdf"),
    ("file id", {"type": "file", "file": {"file_id": "file-1"}}, "file"),
    ("unknown", {"type": "hologram", "hologram": {"a": [1]}}, "unknown"),
    ("text file", chat_file("text/plain", b64(NOTE), "a.txt"), f"a.txt\n{NOTE}"),
    ("text file with a charset", chat_file("text/csv;charset=utf-8", b64(NOTE), "a.csv"),
     f"a.csv\n{NOTE}"),
    ("json file", chat_file("application/json", b64('{"a": 7}'), "a.json"), 'a.json\n{"a": 7}'),
]  # fmt: skip
RESPONSE_PARTS = [
    ("image", {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}"}, "image"),
    # Codex sends the result of view_image like this.
    ("image with a detail",
     {"type": "input_image", "image_url": f"data:image/png;base64,{PNG}", "detail": "high"},
     "image"),
    ("image id", {"type": "input_image", "file_id": "file-1", "detail": "auto"}, "image"),
    ("image of chat", openai_image("https://example.com/a.png"), "image"),
    ("sound", {"type": "input_audio", "input_audio": {"data": WAV, "format": "wav"}}, "sound"),
    ("pdf", response_file("application/pdf", PDF, "plan.pdf"), "pdf"),
    ("file at a url", {"type": "input_file", "file_url": "https://example.com/a"}, "file"),
    ("unknown", {"type": "hologram"}, "unknown"),
    ("text file", response_file("text/markdown", b64(NOTE), "a.md"), f"a.md\n{NOTE}"),
]  # fmt: skip
MESSAGE_PARTS = [
    ("image", {"type": "image", **source("base64", media_type="image/png", data=PNG)}, "image"),
    ("image at a url", {"type": "image", **source("url", url="https://example.com/a")}, "image"),
    ("image of a file", {"type": "image", **source("file", file_id="file_1")}, "image"),
    ("pdf", {"type": "document", "title": "plan.pdf",
             **source("base64", media_type="application/pdf", data=PDF)}, "pdf"),
    ("container", {"type": "container_upload", "file_id": "file_1"}, "file"),
    ("unknown", {"type": "hologram"}, "unknown"),
    ("text document", {"type": "document", "title": "a.txt", "context": "old",
                       **source("text", media_type="text/plain", data=NOTE)},
     f"a.txt\nold\n{NOTE}"),
    ("text in base64", {"type": "document", "title": "a.txt",
                        **source("base64", media_type="text/plain", data=b64(NOTE))},
     f"a.txt\n{NOTE}"),
    ("tool reference", {"type": "tool_reference", "tool_name": "NotebookEdit"},
     "[The tool NotebookEdit is not available any more.]"),
    ("search result", {"type": "search_result", "title": "Notes", "source": "https://n.example",
                       "content": [{"type": "text", "text": NOTE}]},
     f"Notes\nhttps://n.example\n{NOTE}"),
]  # fmt: skip
OLLAMA_PARTS = [("image", PNG, "image"), ("no text", {"a": 1}, "image")]


def seen(dialect: Any, line: str) -> str:
    """The text of a turn with a part; Ollama's images come before the text."""
    return f"{line}\nsee:" if dialect is OLLAMA else f"see:\n{line}"


def chat_call() -> list[dict[str, Any]]:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    return [{"role": "assistant", "content": None, "tool_calls": [call]}]


def use_block() -> list[dict[str, Any]]:
    use = {"type": "tool_use", "id": "c1", "name": "read", "input": {}}
    return [{"role": "assistant", "content": [use]}]


@dataclass(frozen=True)
class Dialect:
    """How a dialect writes the turns that have a part, and its errors.

    text: an empty text of its response, whole or in a stream. shape: whether a body is its error.
    """

    path: str
    field: str
    parts: list[tuple[str, Any, str]]
    user: Callable[[Any], dict[str, Any]]
    call: Callable[[], list[dict[str, Any]]]
    result: Callable[[Any], dict[str, Any]]
    shape: Callable[[dict[str, Any]], str]
    more: tuple[tuple[str, Any], ...] = ()

    def ask(self, api: Any, messages: list[Any], *, stream: bool) -> Any:
        fields = {self.field: messages, "model": "tiny", "stream": stream, **dict(self.more)}
        return api.post(self.path, **fields)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def openai_shape(body: dict[str, Any]) -> str:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["type"] == "BadRequestError"
    return body["error"]["param"]


def anthropic_shape(body: dict[str, Any]) -> str:
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    return "messages"


def ollama_shape(body: dict[str, Any]) -> str:
    assert list(body) == ["error"]
    assert isinstance(body["error"], str)
    return "messages"


CHAT = Dialect(
    "/v1/chat/completions", "messages", CHAT_PARTS,
    lambda part: {"role": "user", "content": [text("see:"), part]},
    chat_call,
    lambda part: {"role": "tool", "tool_call_id": "c1", "content": [text("see:"), part]},
    openai_shape,
)  # fmt: skip
RESPONSES = Dialect(
    "/v1/responses", "input", RESPONSE_PARTS,
    lambda part: {"role": "user", "content": [{"type": "input_text", "text": "see:"}, part]},
    lambda: [{"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}",
              "id": "fc_1", "status": "completed"}],
    lambda part: {"type": "function_call_output", "id": "fco_1", "call_id": "c1",
                  "output": [{"type": "input_text", "text": "see:"}, part]},
    openai_shape,
)  # fmt: skip
MESSAGES = Dialect(
    "/v1/messages", "messages", MESSAGE_PARTS,
    lambda part: {"role": "user", "content": [
        text("see:"), {**part, "cache_control": {"type": "ephemeral"}}]},
    use_block,
    lambda part: {"role": "user", "content": [
        {"tool_use_id": "c1", "type": "tool_result", "content": [text("see:"), part],
         "cache_control": {"type": "ephemeral"}}]},
    anthropic_shape, (("max_tokens", 64),),
)  # fmt: skip
OLLAMA = Dialect(
    "/api/chat", "messages", OLLAMA_PARTS,
    lambda data: {"role": "user", "content": "see:", "images": [data]},
    chat_call,
    lambda data: {"role": "tool", "tool_name": "read", "content": "see:", "images": [data]},
    ollama_shape,
)  # fmt: skip
DIALECTS = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES, "ollama": OLLAMA}


def cases() -> Iterator[Any]:
    for name, dialect in DIALECTS.items():
        for title, part, shown in dialect.parts:
            for stream in (False, True):
                how = "stream" if stream else "whole"
                yield pytest.param(dialect, part, shown, stream, id=f"{name}-{title}-{how}")


@pytest.fixture(scope="module")
def api() -> Any:
    return tool_api(says(ANSWER))


each_part = pytest.mark.parametrize(("dialect", "part", "shown", "stream"), list(cases()))


@pytest.mark.matrix
@each_part
def test_a_part_in_the_own_turn_is_read_or_refused(api, dialect, part, shown, stream):
    asked = len(api.engine.asked)
    response = dialect.ask(api, [HI, SAID, dialect.user(part)], stream=stream)
    if shown in LINES:
        assert response.status_code == 400, response.text
        assert dialect.shape(response.json()) == dialect.field
        assert f"{dialect.field}[2]" in response.text.replace("messages.2", "messages[2]")
        # A document may be text, so its file is looked for.
        why = "--files-dir" if "file-1" in str(part) and shown == "file" else "reads text only"
        why = DAMAGED if shown == "pdf" else why
        assert why in response.text
        assert len(api.engine.asked) == asked
    else:
        assert response.status_code == 200, response.text
        assert f"see:\n{shown}<|im_end|>" in prompt_of(api)


@pytest.mark.matrix
@each_part
def test_a_part_in_the_history_is_text(api, dialect, part, shown, stream):
    response = dialect.ask(api, [dialect.user(part), SAID, HI], stream=stream)
    assert response.status_code == 200, response.text
    assert f"user\n{seen(dialect, LINES.get(shown, shown))}<|im_end|>" in prompt_of(api)


@pytest.mark.matrix
@each_part
def test_a_part_in_the_result_of_a_tool_is_text(api, dialect, part, shown, stream):
    turns = [HI, *dialect.call(), dialect.result(part)]
    prompts = []
    # The same result comes back in each later turn.
    for later in ([], [SAID, HI]):
        response = dialect.ask(api, [*turns, *later], stream=stream)
        assert response.status_code == 200, response.text
        prompts.append(prompt_of(api))
    line = seen(dialect, LINES.get(shown, shown))
    assert all(f"tool\n{line}<|im_end|>" in p for p in prompts)


@pytest.mark.parametrize("path", ["/v1/messages/count_tokens", "/v1/responses/input_tokens",
                                  "/tokenize"])  # fmt: skip
def test_counting_reads_parts_like_generating(api, path):
    dialect = {"/v1/messages/count_tokens": MESSAGES, "/v1/responses/input_tokens": RESPONSES}.get(
        path, CHAT
    )
    part = dialect.parts[0][1]
    fields = {"model": "tiny", dialect.field: [dialect.user(part), SAID, HI]}
    counted = api.post(path, **fields)
    assert counted.status_code == 200, counted.text
    number = counted.json().get("input_tokens", counted.json().get("count"))
    dialect.ask(api, fields[dialect.field], stream=False)
    assert number == len(api.engine.asked[-1][0])
    refused = api.post(path, **{**fields, dialect.field: [dialect.user(part)]})
    assert refused.status_code == 400
    assert dialect.shape(refused.json()) == dialect.field


def test_parts_of_a_text_model_are_not_decoded(api, monkeypatch):
    def fail(*args: Any, **more: Any) -> bytes:
        raise AssertionError

    monkeypatch.setattr(base64, "b64decode", fail)
    for dialect in DIALECTS.values():
        part = dialect.parts[0][1]
        turns = [HI, *dialect.call(), dialect.result(part)]
        assert dialect.ask(api, turns, stream=False).status_code == 200
        assert dialect.ask(api, [dialect.user(part)], stream=False).status_code == 400


@pytest.mark.parametrize(
    ("data", "why"),
    [("%%%", "is not valid base64"), ("AA", "is not valid base64"),
     (base64.b64encode(b"\xff\xfe\xfa").decode(), "is no text in UTF-8"), ("", "has no data")],
)  # fmt: skip
def test_a_text_file_that_cannot_be_decoded_does_not_end_the_session(api, data, why):
    document = {"type": "document", **source("base64", media_type="text/plain", data=data)}
    for dialect, part in (
        (CHAT, chat_file("text/plain", data, "a.txt")),
        (RESPONSES, response_file("text/plain", data, "a.txt")),
        (MESSAGES, document),
    ):
        own = dialect.ask(api, [dialect.user(part)], stream=False)
        assert own.status_code == 400
        assert why in own.text
        assert dialect.ask(api, [dialect.user(part), SAID, HI], stream=False).status_code == 200
        turns = [HI, *dialect.call(), dialect.result(part)]
        assert dialect.ask(api, turns, stream=False).status_code == 200
        assert "was left out" in prompt_of(api)


def test_an_image_inside_a_document_of_the_own_turn_is_refused(api):
    picture = MESSAGE_PARTS[0][1]
    document = {"type": "document", "title": "a", "source": {
        "type": "content", "content": [text("part"), picture]}}  # fmt: skip
    refused = MESSAGES.ask(api, [MESSAGES.user(document)], stream=False)
    assert refused.status_code == 400
    assert "messages.0.content.1.source.content.1 has type 'image'" in refused.text
    assert MESSAGES.ask(api, [MESSAGES.user(document), SAID, HI], stream=False).status_code == 200
    assert f"see:\na\npart\n{LINES['image']}<|im_end|>" in prompt_of(api)


def test_claude_code_reads_an_image_a_pdf_and_a_tool_reference(api):
    """The shapes of Claude Code 2.1: each turn repeats all earlier ones."""
    cached = {"cache_control": {"type": "ephemeral"}}
    results: list[list[dict[str, Any]]] = [
        [{"tool_use_id": "c1", "type": "tool_result", "content": [MESSAGE_PARTS[0][1]], **cached}],
        [{"tool_use_id": "c1", "type": "tool_result", "content": "PDF file read: a.pdf (9 bytes)"},
         {**MESSAGE_PARTS[3][1], **cached}],
        [{"type": "tool_result", "tool_use_id": "c1", "content": [
            {"type": "tool_reference", "tool_name": "NotebookEdit"}]},
         {"type": "text", "text": "Tool loaded.", **cached}],
    ]  # fmt: skip
    history: list[dict[str, Any]] = [{"role": "user", "content": [text("go"), text("on")]}]
    for blocks in results:
        history += [*use_block(), {"role": "user", "content": blocks}]
        response = MESSAGES.ask(api, history, stream=True)
        assert response.status_code == 200, response.text
    prompt = prompt_of(api)
    assert f"tool\n{LINES['image']}<|im_end|>" in prompt
    read = "tool\nPDF file read: a.pdf (9 bytes)<|im_end|>\n<|im_start|>user\n"
    assert read + LINES["pdf"] in prompt
    assert "tool\n[The tool NotebookEdit is not available any more.]<|im_end|>" in prompt
    assert not any(data in prompt for data in (PNG, PDF))


def test_codex_looks_at_an_image(api):
    """The shape of view_image in Codex 0.169: the output is a list with one image."""
    call = {"type": "function_call", "status": "completed", "id": "fc_1", "name": "view_image",
            "arguments": '{"path": "/project/a.png"}', "call_id": "call_1"}  # fmt: skip
    output = {"type": "function_call_output", "id": "fco_1", "call_id": "call_1",
              "output": [RESPONSE_PARTS[1][1]]}  # fmt: skip
    turns = [
        {"type": "message", "id": "msg_1", "role": "developer",
         "content": [{"type": "input_text", "text": "rules"}]},
        {"type": "message", "id": "msg_2", "role": "user",
         "content": [{"type": "input_text", "text": "look"}]},
        call, output,
    ]  # fmt: skip
    for later in ([], [{"role": "assistant", "content": "A cat."}, HI]):
        response = RESPONSES.ask(api, [*turns, *later], stream=True)
        assert response.status_code == 200, response.text
        assert f"tool\n{LINES['image']}<|im_end|>" in prompt_of(api)
