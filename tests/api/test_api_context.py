"""A context that is full: max_tokens is cut to what fits, and a long prompt is refused in each
dialect's words."""

import re

import pytest

from cpuserve.engine.ipc import Output
from tests.api.fakes import MAX_LEN, Api, tokenizer

HI = [{"role": "user", "content": "hi"}]
LONG = "x " * MAX_LEN  # some more tokens than the context has
FAR_TOO_LONG = "x " * 40 * MAX_LEN  # not worth tokenizing


def until_length(engine, number, prompt, params):
    """One token after the other until max_tokens."""
    token = tokenizer().encode("a", add_special_tokens=False)[0]
    for left in reversed(range(params.max_tokens)):
        yield Output(number, [token], None if left else "length")


# How each dialect asks for an answer: (path, fields of a text, the name of the limit).
ASKS = {
    "chat": ("/v1/chat/completions", lambda text: {"messages": user(text)}, "max_tokens"),
    "chat-newer": (
        "/v1/chat/completions",
        lambda text: {"messages": user(text)},
        "max_completion_tokens",
    ),
    "chat-llama.cpp": ("/v1/chat/completions", lambda text: {"messages": user(text)}, "n_predict"),
    "completions": ("/v1/completions", lambda text: {"prompt": text}, "max_tokens"),
    "completions-llama.cpp": ("/v1/completions", lambda text: {"prompt": text}, "n_predict"),
    "responses": ("/v1/responses", lambda text: {"input": text}, "max_output_tokens"),
    "messages": ("/v1/messages", lambda text: {"messages": user(text)}, "max_tokens"),
    "api-chat": ("/api/chat", lambda text: {"messages": user(text)}, "num_predict"),
    "api-generate": ("/api/generate", lambda text: {"prompt": text}, "num_predict"),
}


def user(text):
    return [{"role": "user", "content": text}]


def ask(api, dialect, text, most, **more):
    path, fields, limit = ASKS[dialect]
    limits = {"options": {limit: most}} if path.startswith("/api/") else {limit: most}
    stream = {"stream": False} if path.startswith("/api/") else {}
    return api.post(path, **{"model": "tiny", **stream, **fields(text), **limits, **more})


def reason_of(body):
    """Why an answer ended, in the dialect's words."""
    if "choices" in body:
        return body["choices"][0]["finish_reason"]
    if "incomplete_details" in body:
        return body["status"], body["incomplete_details"]["reason"]
    return body.get("stop_reason") or body["done_reason"]


CUT = {
    "responses": ("incomplete", "max_output_tokens"),
    "messages": "model_context_window_exceeded",
}


@pytest.mark.matrix
@pytest.mark.parametrize("most", [MAX_LEN, 32_000, 2**31 - 1, 2**31, 2**64, 10**30])
@pytest.mark.parametrize("dialect", ASKS)
def test_a_limit_that_does_not_fit_is_cut(dialect, most):
    """Claude Code asks for 32,000 tokens whatever the context holds."""
    api = Api(until_length, default_sampling={"max_tokens": 7})
    response = ask(api, dialect, "hi", most)
    assert response.status_code == 200, response.text
    ((prompt, params),) = api.engine.asked
    assert params.max_tokens == MAX_LEN - len(prompt)
    assert reason_of(response.json()) == CUT.get(dialect, "length")


@pytest.mark.parametrize("dialect", ASKS)
def test_a_limit_that_fits_is_kept(dialect):
    api = Api(until_length, default_sampling={"max_tokens": 2})
    body = ask(api, dialect, "hi", 3).json()
    assert api.engine.asked[0][1].max_tokens == 3
    kept = {"responses": CUT["responses"], "messages": "max_tokens"}
    assert reason_of(body) == kept.get(dialect, "length")


def test_a_stream_of_messages_tells_that_the_context_is_full():
    text = ask(Api(until_length), "messages", "hi", 32_000, stream=True).text
    assert '"stop_reason":"model_context_window_exceeded"' in text
    assert '"stop_reason":"max_tokens"' not in text


def test_an_answer_that_ends_by_itself_is_no_full_context():
    assert ask(Api(), "messages", "hi", 32_000).json()["stop_reason"] == "end_turn"


def test_the_limit_is_cut_to_what_the_kv_cache_holds():
    api = Api(until_length)
    api.engine.info["kv_tokens"] = 16
    api.context.set_ready(api.context.tokenizer, api.context.chat_template)
    body = api.complete([5] * 10, max_tokens=50).json()
    assert api.engine.asked[0][1].max_tokens == 7  # the last one needs no place
    assert reason_of(body) == "length"
    api.complete([5] * 10, max_tokens=4)
    assert api.engine.asked[1][1].max_tokens == 4


def test_each_prompt_of_a_list_has_what_fits_beside_it():
    api = Api(until_length)
    assert api.complete([[5] * 100, [5] * 3], max_tokens=10**6).status_code == 200
    assert [params.max_tokens for _, params in api.engine.asked] == [MAX_LEN - 100, MAX_LEN - 3]


def test_min_tokens_is_no_bound():
    response = Api().complete([5] * 100, max_tokens=100, min_tokens=50)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("min_tokens", "context_length_exceeded")
    assert error["message"] == "min_tokens is 50, but the prompt leaves 28 tokens: lower it"


@pytest.mark.parametrize("text", [LONG, FAR_TOO_LONG], ids=["counted", "estimated"])
@pytest.mark.parametrize("dialect", ASKS)
def test_a_prompt_that_does_not_fit_is_refused_in_the_words_of_the_dialect(dialect, text):
    api = Api()
    response = ask(api, dialect, text, 5)
    assert response.status_code == 400
    assert api.engine.asked == []
    body = response.json()
    if dialect == "messages":
        # Claude Code's own expression.
        found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", response.text)
        assert body["error"]["type"] == "invalid_request_error"
        assert int(found[1]) > int(found[2]) >= MAX_LEN - 1
        assert int(found[1]) >= len(text) // 4
    elif dialect.startswith("api-"):
        assert body["error"].startswith("the input length exceeds the context length: ")
        assert f"This model's maximum context length is {MAX_LEN} tokens" in body["error"]
    else:
        assert body["error"]["code"] == "context_length_exceeded"
        assert f"maximum context length is {MAX_LEN} tokens" in body["error"]["message"]


@pytest.mark.parametrize("dialect", ASKS)
def test_the_last_token_of_the_context_can_be_an_answer(dialect):
    """A prompt of one token less than the context is answered, and one of the context is not."""
    api = Api(until_length)
    ask(api, dialect, "a", 1)
    around = len(api.engine.asked[0][0]) - 1
    text = "a" * (MAX_LEN - 1 - around)
    assert len(tokenizer().encode(text, add_special_tokens=False)) == len(text)
    assert ask(api, dialect, text, 500).status_code == 200
    assert api.engine.asked[-1][1].max_tokens == 1
    assert ask(api, dialect, text + "a", 500).status_code == 400


def test_a_prompt_without_an_answer_may_fill_the_context():
    api = Api()
    for fields in ({"echo": True, "logprobs": 0}, {"prompt_logprobs": 0}):
        assert api.complete([5] * MAX_LEN, max_tokens=0, **fields).status_code == 200
        assert api.complete([5] * (MAX_LEN + 1), max_tokens=0, **fields).status_code == 400
        assert api.complete([5] * MAX_LEN, max_tokens=9, **fields).status_code == 400
    assert api.complete([5] * 3, max_tokens=0).status_code == 400
