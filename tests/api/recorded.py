"""Requests whose answers are recorded to the byte, and how an answer is recorded.

`python -m tests.api.recorded` writes tests/golden/api_answers.json: each request is sent to the app
in this process over a scripted engine, so an answer depends on the front end only. The file that is
checked in was written by the code before the answer pipeline (commit 05601d0), except for messages
and tools, which came later, and has changed since only where a commit says so.
"""

from __future__ import annotations

import itertools
import json
import logging
import re
from pathlib import Path
from typing import Any

from cpuserve.base.errors import DeadlineExceeded, EngineDead, RequestError
from cpuserve.base.version import version
from cpuserve.engine.ipc import Output
from tests.api.fakes import ANSWER, Api, ClientLimits, logprob_of, speak, tokenizer
from tests.api.tools import CALL, says, tool_api

GOLDEN = Path(__file__).parents[1] / "golden" / "api_answers.json"

# What differs between two runs: a version, clocks, random ids and a digest of the version.
_VARIES = (
    (re.compile(r'"created":\d+'), '"created":0'),
    (re.compile(r'"time_ms":\d+'), '"time_ms":0'),
    (re.compile(r'_at":"[^"]+"'), '_at":""'),
    (re.compile(r'_at":\d+'), '_at":0'),
    (re.compile(r'_duration":\d+'), '_duration":0'),
    (re.compile(r'"call_[0-9a-f]{24}"'), '"call_"'),
    (re.compile(r'"fp_[0-9a-f]{10}"'), '"fp_"'),
    (re.compile(r'"([a-z]+)_[0-9a-f]{32}(_\d+)?"'), r'"\1_recorded\2"'),
    (re.compile(f'"(version|cpuserve)":"{re.escape(version())}"'), r'"\1":""'),
)
_HEADERS = ("content-type", "cache-control", "retry-after", "x-should-retry", "connection", "allow")
CHAT, TEXT, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"
RESPONSES = "/v1/responses"
OLLAMA_CHAT, OLLAMA_TEXT = "/api/chat", "/api/generate"
HI = [{"role": "user", "content": "hi"}]


def bursts(engine, number, prompt, params):
    """Progress twice, then ANSWER in outputs of three tokens; a part of the prompt was cached."""
    yield Output(number, [], processed=2, cached_tokens=1)
    yield Output(number, [], processed=3, cached_tokens=1)
    tokens = tokenizer().encode(ANSWER, add_special_tokens=False)
    pieces = [tokens[start : start + 3] for start in range(0, len(tokens), 3)]
    for piece in pieces:
        first, last = piece is pieces[0], piece is pieces[-1]
        scores = params.prompt_logprobs
        yield Output(
            number,
            piece,
            "length" if last else None,
            logprobs=params.logprobs and [logprob_of(t, params.logprobs) for t in piece],
            prompt_logprobs=[None, *(logprob_of(t, scores) for t in prompt[1:])]
            if first and scores is not None
            else None,
            cached_tokens=4 if first else 0,
        )


def stop_id(engine, number, prompt, params):
    """Two tokens, of which the second is a stop token id of the request."""
    yield Output(number, [40], logprobs=[logprob_of(40, 1)])
    yield Output(number, [41], "stop", 41, logprobs=[logprob_of(41, 1)])


def half_character(engine, number, prompt, params):
    """Ends within a character."""
    tokens = tokenizer().encode("aé", add_special_tokens=False)
    for token in tokens[:-1]:
        finish = "length" if token == tokens[-2] else None
        yield Output(number, [token], finish, logprobs=[logprob_of(token, 1)])


def refused(engine, number, prompt, params):
    """The engine refuses the request."""
    yield Output(number, [], "error", error="this cannot run")


def fails(engine, number, prompt, params):
    """Some tokens, then the engine dies."""
    yield from itertools.islice(speak(engine, number, prompt, params), 3)
    yield EngineDead("the engine was killed by SIGKILL")


def late(engine, number, prompt, params):
    """The deadline passes before the first token."""
    yield DeadlineExceeded("the request was not finished", param="timeout")


def bug(engine, number, prompt, params):
    """An exception that nobody expects, with a path in its text."""
    yield ZeroDivisionError("in /home/somebody/secret.py")


def internal(engine, number, prompt, params):
    """An error whose message has a path and an address."""
    yield RequestError("at 0xdeadbeef in /home/somebody/secret.py")


_ANSWERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two": {"n": 2, "seed": 7},
    "three with usage": {"n": 3, "stream_options": {"include_usage": True}},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "alias": {"model": "alias", "user": "me", "unknown": [1]},
    "length": {"max_tokens": 3},
    "stop": {"stop": ["wör"]},
    "stop kept": {"stop": "wör", "include_stop_str_in_output": True},
    "stop never": {"stop": ["zzz", "!!"]},
    "stop held": {"stop": ["!x"]},
    "min_tokens": {"stop": ["e"], "min_tokens": 4},
    "token ids": {"return_token_ids": True},
    "special tokens": {"skip_special_tokens": False},
    "sampling": {"temperature": 0.5, "top_k": 4, "logit_bias": {"5": 200}, "cache_salt": "a"},
}
_SCRIPTS = {
    "bursts": bursts, "stop_id": stop_id, "half_character": half_character, "refused": refused,
    "fails": fails, "late": late, "bug": bug, "internal": internal,
}  # fmt: skip
_OF_CHAT: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True},
    "top logprobs": {"logprobs": True, "top_logprobs": 2, "max_tokens": 4},
    "logprobs as ids": {
        "logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True, "n": 2,
    },
    "max_completion_tokens": {"max_completion_tokens": 2, "max_tokens": 9},
    "parts": {"messages": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ], "return_token_ids": True, "max_tokens": 1},
    "continued": {"messages": [*HI, {"role": "assistant", "content": "I am"}],
                  "continue_final_message": True, "return_token_ids": True, "max_tokens": 1},
    "no generation prompt": {"add_generation_prompt": False, "return_token_ids": True},
}  # fmt: skip
_OF_TEXT: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 0},
    "top logprobs": {"logprobs": 2, "max_tokens": 4},
    "echo": {"echo": True, "max_tokens": 3},
    "echo of ids": {"echo": True, "prompt": [40, 41, 42]},
    "echo and logprobs": {"echo": True, "logprobs": 1, "n": 2, "max_tokens": 2},
    "scoring": {"echo": True, "logprobs": 2, "max_tokens": 0},
    "several": {"prompt": ["a b", "c"], "n": 2, "return_token_ids": True},
    "several lists": {"prompt": [[5, 6], [7]], "logprobs": 1, "max_tokens": 2},
}
# Whole answers only: a stream may not have them.
_WHOLE: dict[str, dict[str, Any]] = {
    "prompt_logprobs": {"prompt_logprobs": 2, "max_tokens": 1},
    "prompt_logprobs of two": {"prompt_logprobs": 0, "n": 2, "max_tokens": 1},
}
_BAD: dict[str, dict[str, Any]] = {
    "model": {"model": "other"},
    "n": {"n": 0},
    "n is text": {"n": "2"},
    "many": {"n": 129},
    "temperature": {"temperature": -1},
    "top_p": {"top_p": 1.5},
    "max_tokens": {"max_tokens": 0},
    "stop": {"stop": ["x" * 5000]},
    "stops": {"stop": ["a"] * 65},
    "logit_bias": {"logit_bias": {"x": 1}},
    "logit_bias outside": {"logit_bias": {"9999": 1}},
    "allowed_token_ids": {"allowed_token_ids": [9999]},
    "response_format": {"response_format": {"type": "json_schema"}},
    "structured_outputs": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
    "response_format is text": {"response_format": "json"},
    "best_of": {"best_of": 3},
    "guided": {"guided_json": {"a": 1}, "guided_regex": "a"},
    "stream_options": {"stream_options": {"include_usage": True}},
    "prompt_logprobs": {"prompt_logprobs": 21},
    "bad_words": {"bad_words": [""]},
    "repetition_detection": {"repetition_detection": {"max_pattern_size": 2}},
    "stream_interval": {"stream_interval": 0},
    "truncation_side": {"truncation_side": "top"},
    "priority": {"priority": 2**40},
    "timeout": {"timeout": 0},
    "cache_salt": {"cache_salt": "a/b"},
    "min_tokens": {"min_tokens": 9, "max_tokens": 3},
}
_BAD_CHAT: dict[str, dict[str, Any]] = {
    "no messages": {"messages": []},
    "messages": {"messages": "hi"},
    "role": {"messages": [{"role": "a b", "content": "x"}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "content": {"messages": [{"role": "user", "content": 1}]},
    "top_logprobs alone": {"top_logprobs": 2},
    "top_logprobs": {"logprobs": True, "top_logprobs": 21},
    "functions": {"functions": [{"name": "f"}]},
    "function_call": {"function_call": {"name": "f"}},
    "echo": {"echo": "x"},
    "kwargs": {"chat_template_kwargs": {"messages": 1}},
    "both ends": {"add_generation_prompt": True, "continue_final_message": True},
    "too long": {"messages": [{"role": "user", "content": "x " * 400}]},
}
_BAD_TEXT: dict[str, dict[str, Any]] = {
    "empty": {"prompt": ""},
    "empty list": {"prompt": []},
    "mixed": {"prompt": ["a", 1]},
    "ids outside": {"prompt": [1, 9999]},
    "many prompts": {"prompt": ["a"] * 1025},
    "sequences": {"prompt": ["a"] * 9, "n": 128},
    "logprobs": {"logprobs": 21},
    "suffix": {"suffix": "x"},
    "long ids": {"prompt": [5] * 200},
}
_RAW = {
    "not JSON": (CHAT, b"{", "application/json"),
    "not UTF-8": (CHAT, b'{"messages": "\xff"}', "application/json"),
    "a list": (CHAT, b"[]", "application/json"),
    "no prompt": (TEXT, b"{}", "application/json"),
    "form": (CHAT, b"a=b", "application/x-www-form-urlencoded"),
    "deep": (CHAT, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", "application/json"),
}
_OTHERS: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "models": ("GET", "/v1/models", None),
    "model": ("GET", "/v1/models/alias", None),
    "another model": ("GET", "/v1/models/other", None),
    "version": ("GET", "/version", None),
    "health": ("GET", "/health", None),
    "live": ("GET", "/live", None),
    "unknown route": ("GET", "/v1/moderations", None),
    "near route": ("POST", "/v1/chat/completion", None),
    "method": ("GET", CHAT, None),
    "tokenize": ("POST", "/tokenize", {"prompt": "Hello wörld"}),
    "tokenize strings": ("POST", "/tokenize", {"prompt": "wö", "return_token_strs": True}),
    "tokenize messages": ("POST", "/tokenize", {"messages": HI}),
    "tokenize both": ("POST", "/tokenize", {"messages": HI, "prompt": "a"}),
    "tokenize tools": ("POST", "/tokenize", {"messages": HI, "chat_template": "a"}),
    "detokenize": ("POST", "/detokenize", {"tokens": [40, 41, 1, 42]}),
    "detokenize outside": ("POST", "/detokenize", {"tokens": [-1]}),
    "detokenize nothing": ("POST", "/detokenize", {}),
    "ollama tags": ("GET", "/api/tags", None),
    "ollama show": ("POST", "/api/show", {"model": "alias:latest"}),
    "ollama version": ("GET", "/api/version", None),
    "ollama unknown": ("POST", "/api/pull", {}),
}


_OF_MESSAGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "length": {"max_tokens": 3},
    "stop": {"stop_sequences": ["wör"]},
    "system": {"system": "Be kind.", "temperature": 0},
    "no messages": {"messages": []},
    "image": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    "model": {"model": "other"},
}
_OF_OLLAMA: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (OLLAMA_CHAT, {"messages": HI}),
    "length": (OLLAMA_CHAT, {"messages": HI, "options": {"num_predict": 3}}),
    "load": (OLLAMA_CHAT, {}),
    "image": (OLLAMA_CHAT, {"messages": [{**HI[0], "images": ["aGk="]}]}),
    "think": (OLLAMA_CHAT, {"messages": HI, "think": True}),
    "prompt": (OLLAMA_TEXT, {"prompt": "hi", "system": "Be kind."}),
    "raw": (OLLAMA_TEXT, {"prompt": "hi", "raw": True, "options": {"stop": ["wör"]}}),
    "model": (OLLAMA_TEXT, {"prompt": "hi", "model": "other"}),
}
_OF_RESPONSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "length": {"max_output_tokens": 3},
    "logprobs": {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "stop": "ll"},
    "items": {"input": HI, "instructions": "Be kind.", "metadata": {"a": "b"}, "temperature": 0},
    "bad item": {"input": [{"type": "item_reference", "id": "msg_1"}]},
    "bad state": {"previous_response_id": "resp_1"},
    "bad field": {"max_tokens": 3},
    "model": {"model": "other"},
}
_TOOL = {"type": "function", "function": {"name": "weather"}}
_FLAT = {"type": "function", "name": "weather"}
_OF_TOOLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"tools": [_TOOL]}),
    "chat of two": (CHAT, {"tools": [_TOOL], "n": 2}),
    "chat with logprobs": (CHAT, {"tools": [_TOOL], "return_token_ids": True}),
    "message": (MESSAGES, {"tools": [{"name": "weather", "input_schema": {}}], "max_tokens": 99}),
    "ollama": (OLLAMA_CHAT, {"tools": [_TOOL], "model": "tiny"}),
    "response": (RESPONSES, {"tools": [_FLAT, {"type": "web_search"}], "input": "hi"}),
}


def requests() -> dict[str, dict[str, Any]]:
    """Return the recorded requests by name: path, body, and the script of the engine."""
    found: dict[str, dict[str, Any]] = {}
    for kind, path, required, own, bad in (
        ("chat", CHAT, {"messages": HI}, _OF_CHAT, _BAD_CHAT),
        ("text", TEXT, {"prompt": "hi there"}, _OF_TEXT, _BAD_TEXT),
    ):
        for name, fields in {**_ANSWERS, **own, **_WHOLE}.items():
            body = {**required, **fields}
            whole = {k: v for k, v in body.items() if k != "stream_options"}
            found[f"{kind}: {name}"] = {"path": path, "body": whole}
            if name not in _WHOLE:
                found[f"{kind} stream: {name}"] = {"path": path, "body": {**body, "stream": True}}
        for name in _SCRIPTS:
            more = {"stop_token_ids": [41]} if name == "stop_id" else {}
            body = {**required, **more, "logprobs": 1 if kind == "text" else True}
            found[f"{kind}: script {name}"] = {"path": path, "body": body, "script": name}
            body = {**body, "stream": True, "n": 2, "return_progress": True}
            found[f"{kind} stream: script {name}"] = {"path": path, "body": body, "script": name}
        for name, fields in {**_BAD, **bad}.items():
            found[f"{kind}: bad {name}"] = {"path": path, "body": {**required, **fields}}
    for name, (path, data, media) in _RAW.items():
        found[f"raw: {name}"] = {"path": path, "data": data, "media": media}
    for name, (method, path, body) in _OTHERS.items():
        found[f"other: {name}"] = {"method": method, "path": path, "body": body}
    for name, fields in _OF_MESSAGES.items():
        body = {"messages": HI, "max_tokens": 64, **fields}
        found[f"message: {name}"] = {"path": MESSAGES, "body": body}
        found[f"message stream: {name}"] = {"path": MESSAGES, "body": {**body, "stream": True}}
    for name in ("bursts", "stop_id", "fails", "late", "internal"):
        body = {"messages": HI, "max_tokens": 64, "stream": True}
        found[f"message stream: script {name}"] = {"path": MESSAGES, "body": body, "script": name}
    count = {"path": f"{MESSAGES}/count_tokens", "body": {"messages": HI}}
    found["message: count_tokens"] = count
    for name, fields in _OF_RESPONSES.items():
        body = {"input": "hi", **fields}
        found[f"response: {name}"] = {"path": RESPONSES, "body": body}
        found[f"response stream: {name}"] = {"path": RESPONSES, "body": {**body, "stream": True}}
    for name in ("bursts", "half_character", "fails", "late", "internal"):
        body = {"input": "hi", "stream": True}
        found[f"response stream: script {name}"] = {"path": RESPONSES, "body": body, "script": name}
    found["response: get"] = {"method": "GET", "path": f"{RESPONSES}/resp_1"}
    for name, (path, fields) in _OF_OLLAMA.items():
        body = {"model": "tiny", **fields}
        found[f"ollama stream: {name}"] = {"path": path, "body": body}
        found[f"ollama: {name}"] = {"path": path, "body": {**body, "stream": False}}
    fails = {"path": OLLAMA_CHAT, "body": {"model": "tiny", "messages": HI}, "script": "fails"}
    found["ollama stream: script fails"] = fails
    for name, (path, fields) in _OF_TOOLS.items():
        given = {} if path == RESPONSES else {"messages": HI}
        body = {**given, "stream": False, **fields}
        found[f"tools: {name}"] = {"path": path, "body": body, "state": "tools"}
        stream = {"path": path, "body": {**body, "stream": True}, "state": "tools"}
        found[f"tools stream: {name}"] = stream
    return {
        **found,
        "state: loading": {"path": CHAT, "body": {"messages": HI}, "state": "loading"},
        "state: large": {"path": TEXT, "body": {"prompt": "x" * 5000}, "state": "large"},
        "state: full": {"path": CHAT, "body": {"messages": HI}, "state": "full"},
        "state: busy": {"path": TEXT, "body": {"prompt": "a", "n": 3}, "state": "busy"},
        "state: no key": {"path": CHAT, "body": {"messages": HI}, "state": "no key"},
        "state: other defaults": {"path": TEXT, "body": {"prompt": "a"}, "state": "other defaults"},
    }


def _api(state: str, script: Any) -> Api:
    if state == "no key":
        return Api(script, api_keys=("secret",))
    if state == "tools":
        return tool_api(says(f"I look.\n{CALL} {CALL}", 2))
    if state == "other defaults":
        return Api(script, default_sampling={"max_tokens": 2, "temperature": 0.0})
    changed = {"busy": {"max_sequences": 2}, "large": {"max_body_bytes": 4096},
               "full": {"max_queued_requests": 2}}  # fmt: skip
    api = Api(script, http=ClientLimits(**changed.get(state, {})))
    if state == "loading":
        api.context.ready = False
    if state == "full":
        for _ in range(api.context.limits.max_queued_requests):
            api.context.backlog.enter(1)
    return api


def recorded(asked: dict[str, Any]) -> dict[str, Any]:
    """Send a request and return its status, headers and the lines of its body."""
    state = asked.get("state", "")
    api = _api(state, _SCRIPTS.get(asked.get("script", ""), speak))
    headers = {"x-request-id": "recorded"}
    if "data" in asked:
        headers["content-type"] = asked["media"]
        answer = api.request("POST", asked["path"], content=asked["data"], headers=headers)
    else:
        method, body = asked.get("method", "POST"), asked.get("body")
        sent = {"json": body} if body is not None else {}
        answer = api.request(method, asked["path"], headers=headers, **sent)
    text = answer.content.decode()
    for pattern, same in _VARIES:
        text = pattern.sub(same, text)
    shown = {name: answer.headers[name] for name in _HEADERS if name in answer.headers}
    return {"status": answer.status_code, "headers": shown, "body": text.splitlines(keepends=True)}


def main() -> None:
    """Write the answers of all requests, without the tracebacks of deliberate failures."""
    logging.disable()
    answers = {name: recorded(asked) for name, asked in requests().items()}
    GOLDEN.write_text(json.dumps(answers, indent=1, ensure_ascii=False) + "\n", "utf-8")
    print(f"{len(answers)} responses written to {GOLDEN}")


if __name__ == "__main__":
    main()
