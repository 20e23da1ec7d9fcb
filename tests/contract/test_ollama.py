"""The contract of Ollama's /api/chat, /api/generate and embeddings: fields, limits, streams."""

import json

import pytest

from tests.api.fakes import ANSWER
from tests.contract.table import (
    NO_COUNT,
    NO_FLAG,
    NO_NUMBER,
    NO_TEXT,
    accepted,
    cases,
    refused,
    run,
    server,
    without,
)

CHAT, TEXT, EMBED = "/api/chat", "/api/generate", "/api/embed"
HI = [{"role": "user", "content": "hi"}]
BODIES = {
    CHAT: {"model": "tiny", "messages": HI, "stream": False},
    TEXT: {"model": "tiny", "prompt": "hi", "stream": False},
}
EMBEDDED = {"model": "tiny", "input": "hi"}
GOOD = {
    "model": ("tiny", "tiny:latest", "alias"),
    "options": ({}, None),
    "options.seed": (0, 1, -1),
    "options.temperature": (0, 0.8, 2),
    "options.top_p": (0, 0.9, 1),
    "options.top_k": (0, 1, 40),
    "options.min_p": (0, 0.1, 1),
    "options.num_predict": (-1, 1, 5),
    "options.repeat_penalty": (1, 1.1),
    "options.presence_penalty": (0, 1),
    "options.frequency_penalty": (0, 1),
    "options.stop": (["x"], [], "x"),
    "options.num_ctx": (64, 100_000),
    "options.unknown": (1, "x"),
    "keep_alive": ("5m", 0, -1, 60, "100\N{MICRO SIGN}s", "1s2\N{GREEK SMALL LETTER MU}s"),
    "think": (False,),
}
BAD = {
    "options": ("x", 1, [], True),
    "options.seed": NO_COUNT,
    "options.temperature": (-1, *NO_NUMBER),
    "options.top_p": (-0.1, 1.1, *NO_NUMBER),
    "options.top_k": NO_COUNT,
    "options.min_p": (-0.1, 1.1, *NO_NUMBER),
    "options.num_predict": NO_COUNT,
    "options.repeat_penalty": (-1, *NO_NUMBER),
    "options.presence_penalty": (3, *NO_NUMBER),
    "options.frequency_penalty": (3, *NO_NUMBER),
    "options.stop": (1, [1], {}),
    "stream": NO_FLAG,
    "model": NO_TEXT,
}
GOOD_CHAT = {
    "messages": (
        [{"role": "system", "content": "a"}, *HI],
        [*HI, {"role": "assistant", "content": "b"}, *HI],
    ),
    "tools": ([], None),
}
BAD_CHAT = {
    "messages": ("hi", 1, {}, [1], ["hi"], [{"content": "x"}], [{"role": "user", "content": 1}]),
    "tools": ("x", 1, {}, [1]),
    "format": ("xml", 1, []),
}
GOOD_TEXT = {
    "system": ("Be kind.",),
    "raw": (True, False),
    "prompt": ("a",),
    "context": ([], None, [5], [5, 70]),
    "suffix": ("", None),
    "images": ([], None),
}
BAD_TEXT = {
    "prompt": NO_TEXT,
    "system": NO_TEXT,
    "raw": NO_FLAG,
    "format": ("xml", 1, []),
    "context": ("x", 1, {}, ["x"], [1.5], [-1], [512], [5] * 500),
    "suffix": ("x", *NO_TEXT),
    # The model of these tests reads text only.
    "images": ("x", 1, {}, [1], ["aGk="]),
}


@cases(
    *(accepted(path, body, GOOD) for path, body in BODIES.items()),
    *(refused(path, body, BAD) for path, body in BODIES.items()),
    *(without(path, body, "model") for path, body in BODIES.items()),
    accepted(CHAT, BODIES[CHAT], GOOD_CHAT),
    refused(CHAT, BODIES[CHAT], BAD_CHAT),
    accepted(TEXT, BODIES[TEXT], GOOD_TEXT),
    refused(TEXT, BODIES[TEXT], BAD_TEXT),
)
def test_a_value_is_accepted_or_refused_with_its_field(case):
    run(case)


@cases(
    accepted(EMBED, EMBEDDED, {"input": ("a", ["a", "b"]), "truncate": (True, False)}),
    refused(EMBED, EMBEDDED, {"input": (1, {}, [1], True), "truncate": NO_FLAG}),
    without(EMBED, EMBEDDED, "model"),
)
def test_inputs_of_embeddings_are_accepted_or_refused_with_its_field(case):
    run(case, "last")


@pytest.mark.parametrize("path", [*BODIES, EMBED, "/api/show"])
def test_a_model_that_does_not_exist_is_404(path):
    response = server().post(path, **{**BODIES.get(path, EMBEDDED), "model": "nobody"})
    assert response.status_code == 404
    assert list(response.json()) == ["error"]


MORE = {
    "plain": {},
    "length": {"options": {"num_predict": 3}},
    "stop": {"options": {"stop": ["wör"]}},
    "no stop": {"options": {"stop": ["zzz"]}},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", MORE)
def test_a_stream_has_the_text_reason_and_counts_of_the_whole_response(path, name):
    body = {**BODIES[path], **MORE[name]}
    whole = server().post(path, **body).json()
    stream = server().post(path, **{**body, "stream": True})
    assert stream.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in stream.text.splitlines()]
    assert [line["done"] for line in lines] == [*[False] * (len(lines) - 1), True]

    def text(line):
        return line["message"]["content"] if path == CHAT else line["response"]

    assert "".join(map(text, lines)) == text(whole)
    for field in ("done_reason", "prompt_eval_count", "eval_count", "model"):
        assert lines[-1][field] == whole[field]


@pytest.mark.parametrize("path", BODIES)
def test_ollama_streams_unless_it_is_told_not_to(path):
    body = {name: value for name, value in BODIES[path].items() if name != "stream"}
    lines = [json.loads(line) for line in server().post(path, **body).text.splitlines()]
    assert len(lines) > 2
    texts = [line.get("response") or line.get("message", {}).get("content", "") for line in lines]
    assert "".join(texts) == ANSWER
