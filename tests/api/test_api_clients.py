"""Requests as editors, chat pages and automations send them: Zed, minuet, llama.vim, Open WebUI,
LibreChat, Home Assistant and n8n in November 2026. Each is accepted, and what its client reads is
in the response; llama.vim, which needs more than this server has, is refused by name.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.api.fakes import events_of
from tests.api.test_api_llamacpp_completion import CODER
from tests.api.tools import CALL, TEMPLATE, WEATHER, prompt_of, says, tool_api
from tests.tokenizer.test_infill import tokenizer_with

CHAT, TEXT, OLLAMA = "/v1/chat/completions", "/v1/completions", "/api/chat"
WORDS = "It is warm."
THOUGHT = TEMPLATE + "{# <think> </think> #}"
SYSTEM = {"role": "system", "content": "You are a voice assistant. Now is 12:00."}
HI = {"role": "user", "content": "hi"}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}
CALLED = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "call_1", "type": "function",
         "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
    ],
}  # fmt: skip
TOLD = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "18 C"}]}
STRICT = {
    "type": "json_schema",
    "json_schema": {
        "name": "room",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


@dataclass
class Case:
    """A request, the words of the model, and a function that reads the response as its client."""

    path: str
    body: dict[str, Any]
    reads: Callable[[Any], Any]
    wants: Any = WORDS
    says: str = WORDS
    prompt: tuple[str, ...] = field(default=())
    source: str = TEMPLATE


def deltas(response, key="content"):
    """The texts of a chat stream; each event has the fields that clients in Rust require."""
    found = events_of(response)
    assert all({"model", "object", "choices", "id"} <= event.keys() for event in found)
    choices = [choice for event in found for choice in event["choices"]]
    assert all({"index", "delta", "finish_reason"} <= choice.keys() for choice in choices)
    assert choices[-1]["finish_reason"] in ("stop", "tool_calls")
    return "".join(choice["delta"].get(key) or "" for choice in choices)


def with_usage(response):
    last = events_of(response)[-1]
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] > 0
    assert {"cached_tokens"} == last["usage"]["prompt_tokens_details"].keys()
    return deltas(response)


def streamed_call(response):
    parts = [
        call
        for event in events_of(response)
        for choice in event["choices"]
        for call in choice["delta"].get("tool_calls") or ()
    ]
    assert parts[0]["id"]
    assert {part["index"] for part in parts} == {0}
    arguments = "".join(part["function"].get("arguments") or "" for part in parts)
    return parts[0]["function"]["name"], json.loads(arguments)


def message(response):
    (choice,) = response.json()["choices"]
    return choice["message"]["content"]


def completed(response):
    (choice,) = response.json()["choices"]
    return choice["text"]


def completed_stream(response):
    return "".join(event["choices"][0]["text"] for event in events_of(response))


def lines(response):
    found = [json.loads(line) for line in response.text.splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    assert found[-1]["eval_count"] > 0
    return found


def spoken(response):
    return "".join(line["message"]["content"] for line in lines(response))


def ollama_call(response):
    calls = [c for line in lines(response) for c in line["message"].get("tool_calls") or ()]
    return calls[0]["function"]["name"], calls[0]["function"]["arguments"]


def thought_apart(response):
    return deltas(response, "reasoning_content"), deltas(response)


CASES = {
    "zed agent": Case(
        CHAT,
        {"messages": [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                      CALLED, TOLD],
         "tools": [WEATHER], "tool_choice": "auto", "temperature": 1.0, "stop": [], **USAGE},
        with_usage,
        prompt=("voice assistant", "18 C"),
    ),
    "zed agent calls": Case(
        CHAT,
        {"messages": [HI], "tools": [WEATHER], "tool_choice": "auto", **USAGE},
        streamed_call, ("weather", {"city": "Paris"}), CALL,
    ),
    "zed thoughts": Case(
        CHAT, {"messages": [HI], **USAGE}, thought_apart, ("Hm.", WORDS),
        f"<think>Hm.</think>{WORDS}", source=THOUGHT,
    ),
    "zed edit prediction": Case(
        TEXT,
        {"prompt": "abc", "max_tokens": 64, "temperature": None, "stop": ["<|end|>", "\n\n\n"]},
        completed, prompt=("abc",),
    ),
    "minuet": Case(
        TEXT,
        {"prompt": "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>", "max_tokens": 56,
         "top_p": 0.9, "stream": True, "stop": ["\n\n"]},
        completed_stream, prompt=("<|fim_suffix|>return x<|fim_middle|>",),
    ),
    "open webui": Case(
        CHAT, {"messages": [HI], "max_tokens": 200, **USAGE}, with_usage,
    ),
    "open webui title": Case(
        CHAT,
        {"messages": [HI], "stream": False, "max_completion_tokens": 200,
         "metadata": {"task": "title_generation", "chat_id": None}},
        message,
    ),
    "open webui over ollama": Case(
        OLLAMA,
        {"model": "tiny:latest", "messages": [HI], "stream": True, "keep_alive": "5m",
         "options": {"num_ctx": 4096, "num_keep": 5, "num_batch": 512, "think": None}},
        spoken,
    ),
    "librechat": Case(
        CHAT,
        {"messages": [SYSTEM, HI], "user": "65f0", "temperature": 1, "top_p": 1,
         "presence_penalty": 0, "frequency_penalty": 0, **USAGE},
        with_usage,
    ),
    "librechat title": Case(
        CHAT,
        {"messages": [{"role": "user", "content": "Give this a title: hi"}], "n": 1,
         "temperature": 0.2, "presence_penalty": 0, "frequency_penalty": 0, "max_tokens": 16},
        message,
    ),
    "home assistant over ollama": Case(
        OLLAMA,
        {"messages": [SYSTEM, HI], "tools": [WEATHER], "stream": True, "keep_alive": -1,
         "options": {"num_ctx": 8192}, "think": False},
        spoken, prompt=("Now is 12:00", "weather"),
    ),
    "home assistant calls": Case(
        OLLAMA,
        {"messages": [HI], "tools": [WEATHER], "stream": True, "keep_alive": "300s",
         "options": {"num_ctx": 8192}},
        ollama_call, ("weather", {"city": "Paris"}), CALL,
    ),
    "home assistant after a call": Case(
        OLLAMA,
        {"messages": [
            HI,
            {"role": "assistant", "content": "", "tool_calls": [
                {"function": {"name": "weather", "arguments": {"city": "Paris"}}}]},
            {"role": "tool", "content": '{"data": {"temperature": 18}, "error": null}'}],
         "tools": [WEATHER], "stream": True, "options": {"num_ctx": 8192}},
        spoken, prompt=('"temperature": 18',),
    ),
    "home assistant data": Case(
        OLLAMA,
        {"messages": [HI], "stream": True, "options": {"num_ctx": 8192}, "think": False,
         "format": STRICT["json_schema"]["schema"]},
        spoken, '{"a": "b"}', '{"a": "b"}',
    ),
    "home assistant strict": Case(
        CHAT,
        {"messages": [SYSTEM, HI], "tools": [WEATHER], "response_format": STRICT, "user": "01ABC",
         "max_completion_tokens": 60, "top_p": 1, "temperature": 1, **USAGE},
        with_usage, '{"a": "b"}', '{"a": "b"}',
    ),
    "n8n": Case(
        CHAT,
        {"messages": [HI], "temperature": 0.7, "top_p": 1, "n": 1, "stream": False,
         "frequency_penalty": 0, "presence_penalty": 0, "response_format": {"type": "text"}},
        message,
    ),
    "n8n agent": Case(
        CHAT,
        {"messages": [SYSTEM, HI, CALLED, TOLD], "tools": [WEATHER], "tool_choice": "auto",
         "parallel_tool_calls": True, **USAGE},
        with_usage, prompt=("18 C",),
    ),
    "n8n over ollama": Case(
        OLLAMA,
        {"messages": [HI], "stream": True, "keep_alive": "5m", "think": False,
         "options": {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "num_ctx": 2048,
                     "num_gpu": -1, "num_thread": 0, "penalize_newline": True, "f16_kv": True,
                     "low_vram": False, "use_mlock": False, "use_mmap": True}},
        spoken,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_request_is_accepted_and_the_response_has_what_the_client_reads(case):
    api = tool_api(says(case.says), source=case.source)
    response = api.post(case.path, **{"model": "tiny", **case.body})
    assert response.status_code == 200, response.text
    assert case.reads(response) == case.wants
    prompt = prompt_of(api)
    assert [text for text in case.prompt if text not in prompt] == []


def test_zed_finds_the_context_and_the_tools():
    """Zed takes a list with `status` for a router, and asks /props of each loaded model."""
    api = tool_api(says(WORDS))
    for model in api.get("/v1/models").json()["data"]:
        assert model["status"]["value"] == "loaded"
        assert model["meta"]["n_ctx"] == 4096
        assert "image" not in model["architecture"]["input_modalities"]
        props = api.get("/props", params={"model": model["id"]}).json()
        assert props["default_generation_settings"]["n_ctx"] == 4096
        assert props["modalities"]["vision"] is False
        caps = props["chat_template_caps"]
        assert caps["supports_tool_calls"] or caps["supports_tools"]


@pytest.mark.parametrize("path", ["/v1/models", "/api/tags"])
def test_a_credential_can_be_checked_with_a_list_of_models(path):
    """As n8n, Open WebUI, LibreChat and Home Assistant do."""
    api = tool_api(says(WORDS), api_keys=("key",), key="key")
    body = api.get(path).json()
    names = [model.get("id") or model["model"] for model in body.get("data") or body["models"]]
    assert names == ["tiny", "alias"]
    api = tool_api(says(WORDS), api_keys=("key",), key="wrong")
    assert api.get(path).status_code == 401


def test_home_assistant_is_told_that_models_cannot_be_pulled():
    response = tool_api(says(WORDS)).post("/api/pull", model="qwen3:4b", stream=False)
    assert response.status_code == 404
    assert "models are served from the start" in response.json()["error"]


LLAMA_VIM = {
    "suggestion": (
        "/infill",
        {"input_prefix": "def f():\n", "input_suffix": "\n", "input_extra": [], "prompt": "    ret",
         "n_predict": 16, "samplers": ["top_k", "top_p", "infill"], "t_max_predict_ms": 1000},
        ("top_k", "top_p", "infill"),
    ),
    "instruction": (
        CHAT,
        {"id_slot": 0, "messages": [HI], "min_p": 0.1, "temperature": 0.1, "stream": True,
         "samplers": ["min_p", "temperature"], "cache_prompt": True},
        ("min_p", "temperature"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("path", "body", "order"), LLAMA_VIM.values(), ids=LLAMA_VIM)
def test_llama_vim_chooses_the_samplers(tmp_path, path, body, order):
    api = tool_api(says(WORDS))
    api.context.tokenizer = tokenizer_with(tmp_path, *CODER)
    response = api.post(path, **body)
    assert response.status_code == 200, response.text
    params = api.engine.asked[0][1]
    assert params.chain.stages == order
    assert len(params.chain.infill_prefixes) == ("infill" in order) * api.context.bounds.vocab


@pytest.mark.parametrize("path", ["/api/v0/models", "/api/v1/models", "/sleep"])
def test_routes_of_other_servers_say_what_to_use(path):
    response = tool_api(says(WORDS)).get(path)
    assert response.status_code == 404
    assert "On this server" in response.text
