"""The contract on a live server with the default model: a sample of the tables, and streams.

One process serves the whole file. The tables of the other files have the values; those that depend
on the vocabulary of the tiny model are left out.
"""

import json
import urllib.error

import pytest

from tests.api.test_api_shapes import check as check_error
from tests.api.test_api_shapes import dialect_of
from tests.contract import (
    test_anthropic,
    test_llamacpp,
    test_ollama,
    test_openai,
    test_responses,
    test_systemone,
)
from tests.contract.table import Case, accepted, refused
from tests.helpers.depth import deep_but
from tests.helpers.served import default_model, running_server

pytestmark = pytest.mark.network

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
OLLAMA_CHAT, OLLAMA_TEXT, LLAMACPP = "/api/chat", "/api/generate", "/completion"
SHORT = {
    CHAT: {"max_tokens": 4},
    TEXT: {"max_tokens": 4},
    RESPONSES: {"max_output_tokens": 2},
    MESSAGES: {"max_tokens": 2},
    OLLAMA_CHAT: {"options": {"num_predict": 2}},
    OLLAMA_TEXT: {"options": {"num_predict": 2}},
    LLAMACPP: {"n_predict": 2},
}
TABLES = [
    *((path, body, test_openai.GOOD, test_openai.BAD) for path, body in test_openai.BODIES.items()),
    (CHAT, test_openai.BODIES[CHAT], test_openai.GOOD_CHAT, test_openai.BAD_CHAT),
    (TEXT, test_openai.BODIES[TEXT], test_openai.GOOD_TEXT, test_openai.BAD_TEXT),
    (RESPONSES, test_responses.BODY, test_responses.GOOD, test_responses.BAD),
    (MESSAGES, test_anthropic.BODY, test_anthropic.GOOD, test_anthropic.BAD),
    *((path, body, test_ollama.GOOD, test_ollama.BAD) for path, body in test_ollama.BODIES.items()),
    (LLAMACPP, test_llamacpp.BODY, test_llamacpp.GOOD, test_llamacpp.BAD),
    (test_systemone.DECIDE, test_systemone.BODY, test_systemone.GOOD, test_systemone.BAD),
]
# An id that the tiny model has not, and this one has.
OF_TINY = "9999"
EVERY = 300


def sample() -> list[Case]:
    """Return the cases of the tables, with short responses."""
    found = []
    for path, body, good, bad in TABLES:
        short = {**body, **SHORT.get(path, {})}
        found += accepted(path, short, good) + refused(path, short, bad)
    return [case for case in found if OF_TINY not in case.id]


CASES = sample()


@pytest.fixture(scope="module")
def server():
    names = "--served-model-name", "tiny", "alias"
    with running_server(default_model(), *names, "--max-model-len", "128") as client:
        yield client


def send(server, path, body):
    """Return (status, body) of a response."""
    try:
        return 200, server.raw(path, **body)
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.mark.parametrize("case", deep_but(CASES[::EVERY], CASES), ids=[case.id for case in CASES])
def test_a_live_server_accepts_and_refuses_the_values_of_the_tables(server, case):
    status, body = send(server, case.path, case.body)
    if not case.named:
        assert status == 200, body
        json.loads(body)
        return
    assert status == 400, body
    assert case.named.encode() in body
    check_error(body, dialect_of(case.path), case.id)


ASK = "Name three colours, and say why you like the first one."
HI = [{"role": "user", "content": ASK}]
GREEDY = {"temperature": 0}
STORY = "Once upon a time, there was"
OLLAMA = {"model": "tiny", "options": {"temperature": 0, "num_predict": 24}}
STREAMS = {
    "chat": (CHAT, {"messages": HI, "max_tokens": 24, **GREEDY}),
    "chat n": (CHAT, {"messages": HI, "max_tokens": 9, "n": 2, "seed": 7}),
    "chat logprobs": (CHAT, {"messages": HI, "max_tokens": 9, "logprobs": True, **GREEDY}),
    "chat stop": (CHAT, {"messages": HI, "max_tokens": 24, "stop": [" and", "."], **GREEDY}),
    "chat bad words": (CHAT, {"messages": HI, "max_tokens": 24, "bad_words": ["red"], **GREEDY}),
    "chat choice": (
        CHAT,
        {"messages": HI, "structured_outputs": {"choice": ["red", "blue"]}, **GREEDY},
    ),
    "text": (TEXT, {"prompt": STORY, "max_tokens": 24, **GREEDY}),
    "text echo": (TEXT, {"prompt": ASK, "max_tokens": 9, "echo": True, **GREEDY}),
    "text prompts": (TEXT, {"prompt": ["a", "b"], "max_tokens": 9, **GREEDY}),
    "text seed": (TEXT, {"prompt": STORY, "max_tokens": 9, "seed": 3, "min_tokens": 9}),
    "responses": (RESPONSES, {"input": ASK, "max_output_tokens": 24, **GREEDY}),
    "messages": (MESSAGES, {"messages": HI, "max_tokens": 24, **GREEDY}),
    "messages stop": (
        MESSAGES,
        {"messages": HI, "max_tokens": 24, "stop_sequences": [" and", "."], **GREEDY},
    ),
    "ollama chat": (OLLAMA_CHAT, {"messages": HI, **OLLAMA}),
    "ollama text": (OLLAMA_TEXT, {"prompt": ASK, **OLLAMA}),
    "llama.cpp": (LLAMACPP, {"prompt": STORY, "n_predict": 24, **GREEDY}),
    "llama.cpp several": (LLAMACPP, {"prompt": STORY, "n_predict": 9, "n_cmpl": 2, "seed": 5}),
    "llama.cpp stop": (LLAMACPP, {"prompt": STORY, "n_predict": 24, "stop": ["."], **GREEDY}),
}


def whole_texts(path, body):
    """Return the text and the reason of the end of each choice of a whole response."""
    if path in (CHAT, TEXT):
        return [
            (c["message"]["content"] if path == CHAT else c["text"], c["finish_reason"])
            for c in body["choices"]
        ]
    if path == RESPONSES:
        parts = [part for item in body["output"] for part in item["content"]]
        return [("".join(part["text"] for part in parts), body["status"])]
    if path == MESSAGES:
        return [("".join(block["text"] for block in body["content"]), body["stop_reason"])]
    if path == LLAMACPP:
        found = body if isinstance(body, list) else [body]
        return [(one["content"], one["stop_type"]) for one in found]
    text = body["message"]["content"] if path == OLLAMA_CHAT else body["response"]
    return [(text, body["done_reason"])]


def parts_of(path, event):
    """Return (choice, text, reason of the end or None) for each part of an event."""
    if path in (CHAT, TEXT):
        return [
            (c["index"], (c["delta"] if path == CHAT else {"content": c["text"]}).get("content"), r)
            for c in event["choices"]
            for r in [c["finish_reason"]]
        ]
    if path == RESPONSES:
        end = event["response"]["status"] if event["type"].endswith(("ted", "plete")) else None
        text = event["delta"] if event["type"] == "response.output_text.delta" else ""
        return [(0, text, None if event["type"] == "response.created" else end)]
    if path == MESSAGES:
        delta = event.get("delta", {})
        return [(0, delta.get("text"), delta.get("stop_reason"))]
    if path == LLAMACPP:
        return [(event["index"], event["content"], event.get("stop_type"))]
    text = event["message"]["content"] if path == OLLAMA_CHAT else event["response"]
    return [(0, text, event.get("done_reason"))]


def streamed_texts(path, stream):
    """Return the text and the reason of the end of each choice of a stream."""
    lines = [line.removeprefix("data: ") for line in stream.decode().splitlines()]
    events = [json.loads(line) for line in lines if line.startswith("{")]
    texts, ends = {}, {}
    for event in events:
        for index, text, end in parts_of(path, event):
            texts[index] = texts.get(index, "") + (text or "")
            if end is not None:
                ends[index] = end
    return [(texts[index], ends[index]) for index in sorted(texts)]


@pytest.mark.parametrize("name", deep_but([*STREAMS][::6], STREAMS))
def test_a_stream_has_the_texts_of_the_whole_response(server, name):
    path, body = STREAMS[name]
    whole = whole_texts(path, server.post(path, **body, stream=False))
    assert all(text for text, _ in whole)
    assert streamed_texts(path, server.raw(path, **body, stream=True)) == whole


def test_the_same_request_has_the_same_text_in_every_dialect(server):
    """Greedy texts of one prompt do not depend on the dialect, and no response is cut short."""
    texts = {}
    for name in ("chat", "responses", "messages", "ollama chat"):
        path, body = STREAMS[name]
        ((texts[name], _),) = whole_texts(path, server.post(path, **body, stream=False))
    assert len({*texts.values()}) == 1, texts
