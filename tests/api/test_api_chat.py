"""Chat completions: response formats, prompts, usage, n, and the exact bytes of a stream."""

import json

import pytest

from cpuserve.base.errors import EngineDead, RequestError, TooManyRequests
from cpuserve.engine.ipc import Output
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import ANSWER, MAX_LEN, Api, error_of, events_of, tokenizer

PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
NUM_PROMPT = len(tokenizer().encode(PROMPT, add_special_tokens=False))
NUM_ANSWER = len(tokenizer().encode(ANSWER, add_special_tokens=False)) + 1


@pytest.fixture
def api():
    return Api()


def prompt_of(api):
    return tokenizer().decode(api.engine.asked[-1][0], skip_special_tokens=False)


def test_the_whole_answer_has_openais_shape(api):
    response = api.chat()
    body = response.json()
    assert response.headers["content-type"] == "application/json"
    assert body["id"].startswith("chatcmpl-")
    assert body["object"] == "chat.completion"
    assert isinstance(body["created"], int)
    assert body["model"] == "tiny"
    assert body["system_fingerprint"].startswith("fp_")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": ANSWER, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"] == {
        "prompt_tokens": NUM_PROMPT,
        "completion_tokens": NUM_ANSWER,
        "total_tokens": NUM_PROMPT + NUM_ANSWER,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_the_stream_is_exact_to_the_byte():
    def three_steps(engine, number, prompt, params):
        h, i = tokenizer().encode("h")[0], tokenizer().encode("i")[0]
        yield Output(number, [h])
        yield Output(number, [i])
        yield Output(number, [7], "stop", 7)

    response = Api(three_steps).request(
        "POST",
        "/v1/chat/completions",
        json={
            "messages": [{"role": "user", "content": "hi"}],
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        headers={"x-request-id": "r1"},
    )
    first = json.loads(response.text.split("\n\n")[0][6:])
    head = (
        f'data: {{"id":"chatcmpl-r1","object":"chat.completion.chunk","created":{first["created"]},'
        f'"model":"tiny","system_fingerprint":"{first["system_fingerprint"]}","choices":['
    )
    deltas = [
        '{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}',
        '{"index":0,"delta":{"content":"h"},"logprobs":null,"finish_reason":null}',
        '{"index":0,"delta":{"content":"i"},"logprobs":null,"finish_reason":null}',
        '{"index":0,"delta":{},"logprobs":null,"finish_reason":"stop","stop_reason":7}',
    ]
    usage = (
        f'],"usage":{{"prompt_tokens":{NUM_PROMPT},"total_tokens":{NUM_PROMPT + 3},'
        '"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":0},'
        '"completion_tokens_details":{"reasoning_tokens":0}}}\n\n'
    )
    chunks = [f'{head}{delta}],"usage":null}}\n\n' for delta in deltas]
    assert response.text == "".join(chunks) + head + usage + "data: [DONE]\n\n"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers


def test_streamed_text_is_the_whole_text_in_order(api):
    events = events_of(api.chat(stream=True))
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in e["choices"][0]["delta"] for e in events[1:])
    text = "".join(e["choices"][0]["delta"].get("content", "") for e in events)
    assert text == ANSWER
    reasons = [e["choices"][0]["finish_reason"] for e in events]
    assert reasons == [None] * (len(events) - 1) + ["stop"]
    assert len({e["id"] for e in events}) == 1
    assert len({e["created"] for e in events}) == 1
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    assert not any("usage" in e for e in events)


@pytest.mark.parametrize(
    ("options", "last", "each"),
    [
        (None, False, "absent"),
        ({}, False, "absent"),
        ({"include_usage": False}, False, "absent"),
        ({"include_usage": True}, True, "null"),
        ({"include_usage": True, "continuous_usage_stats": True}, True, "counts"),
        ({"include_usage": False, "continuous_usage_stats": True}, False, "counts"),
        ({"continuous_usage_stats": True}, False, "counts"),
        ({"include_usage": None}, False, "absent"),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_usage_in_streams(api, endpoint, options, last, each):
    events = events_of(getattr(api, endpoint)(stream=True, stream_options=options, max_tokens=6))
    final = events.pop() if last else None
    if last:
        assert final["choices"] == []
        assert final["usage"]["completion_tokens"] == 6
        prompt = final["usage"]["prompt_tokens"]
        assert prompt == len(api.engine.asked[-1][0])
        assert final["usage"]["total_tokens"] == prompt + 6
    assert all(e["choices"] for e in events)
    if each == "absent":
        assert not any("usage" in e for e in events)
    elif each == "null":
        assert all(e["usage"] is None for e in events)
    else:
        counts = [e["usage"]["completion_tokens"] for e in events]
        assert counts == sorted(counts)
        assert counts[-1] == 6


def test_n_choices_come_in_order_and_are_counted_together(api):
    body = api.chat(n=3, max_tokens=4).json()
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == NUM_PROMPT
    assert [c["finish_reason"] for c in body["choices"]] == ["length"] * 3


def test_n_streams_are_told_apart_by_index(api):
    events = events_of(api.chat(n=3, stream=True))
    texts = ["", "", ""]
    finished = []
    for event in events:
        (choice,) = event["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            finished.append(choice["index"])
    assert texts == [ANSWER] * 3
    assert sorted(finished) == [0, 1, 2]
    roles = [e["choices"][0]["index"] for e in events if "role" in e["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1, 2]


def test_seeded_choices_get_different_seeds(api):
    api.chat(n=3, seed=2**63 - 1)
    assert [params.seed for _, params in api.engine.asked] == [2**63 - 1, -(2**63), -(2**63) + 1]
    assert {params.n for _, params in api.engine.asked} == {1}
    api.chat(n=2)
    assert [params.seed for _, params in api.engine.asked[3:]] == [None, None]


@pytest.mark.parametrize("n", [1, 2])
def test_a_seed_of_minus_one_is_none(api, n):
    api.chat(n=n, seed=-1)
    api.complete(n=n, seed=-1)
    assert [params.seed for _, params in api.engine.asked] == [None] * 2 * n
    api.chat(n=3, seed=-3)  # the sum of a seed and a number is a seed
    assert [params.seed for _, params in api.engine.asked[2 * n :]] == [-3, -2, -1]


def test_the_prompt_is_the_rendered_template(api):
    api.chat()
    assert prompt_of(api) == PROMPT


def test_content_parts_are_one_text(api):
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]
    api.chat(parts)
    assert prompt_of(api) == PROMPT.replace("hi", "hello\nthere")


def test_a_conversation_keeps_its_order(api):
    roles = ["system", "user", "assistant", "user"]
    api.chat(messages=[{"role": role, "content": role[0]} for role in roles])
    said = [part.split("\n")[0] for part in prompt_of(api).split("<|im_start|>")[1:]]
    assert said == [*roles, "assistant"]


def test_without_generation_prompt_the_prompt_ends_with_the_message(api):
    api.chat(add_generation_prompt=False)
    assert prompt_of(api) == "<|im_start|>user\nhi<|im_end|>\n"


def test_the_final_message_can_be_continued(api):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    response = api.chat(messages=messages, continue_final_message=True)
    assert response.status_code == 200
    assert prompt_of(api) == PROMPT + "Well, "


HI, WELL = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"continue_final_message": True}])
def test_prefix_marks_the_message_to_continue_as_for_deepseek_and_mistral(api, fields):
    """vllm-project/vllm#31147, vercel/ai#19383: without it, a new turn followed silently."""
    assert api.chat(messages=[HI, {**WELL, "prefix": True}], **fields).status_code == 200
    assert prompt_of(api) == PROMPT + "Well, "


@pytest.mark.parametrize("prefix", [False, None])
def test_a_false_prefix_continues_nothing(api, prefix):
    api.chat(messages=[HI, {**WELL, "prefix": prefix}])
    assert prompt_of(api) == PROMPT + "Well, <|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("messages", "fields", "where"),
    [
        ([{**WELL, "prefix": True}, HI], {}, "messages[0].prefix"),
        ([{**HI, "prefix": True}], {}, "messages[0].prefix"),
        ([HI, {**WELL, "prefix": "yes"}], {}, "messages[1].prefix must be true or false"),
        ([HI, {**WELL, "prefix": 1}], {}, "messages[1].prefix must be true or false"),
        ([HI, {**WELL, "prefix": True}], {"continue_final_message": False}, "omit one of them"),
    ],
)
def test_a_prefix_that_cannot_be_continued_is_refused(api, messages, fields, where):
    error = error_of(api.chat(messages=messages, **fields))
    assert error["param"] == "messages"
    assert where in error["message"]


def test_tokenize_counts_the_prompt_of_a_prefix(api):
    asked = [HI, {**WELL, "prefix": True}]
    counted = api.post("/tokenize", messages=asked).json()["tokens"]
    api.chat(messages=asked)
    assert api.engine.asked[-1][0] == counted


@pytest.mark.parametrize(
    "content",
    ["I am I ", "|", "<", "im_end", " both ", "", [{"type": "text", "text": "a "}, "b "]],
    ids=str,
)
@pytest.mark.parametrize("trims", [False, True])
def test_the_final_message_is_continued_where_it_ends(api, content, trims):
    source = api.context.chat_template.source
    if trims:
        source = source.replace("message['content']", "message['content'].strip()")
        assert ".strip()" in source
        api.context.chat_template = ChatTemplate(source, tokenizer())
    messages = [
        {"role": "user", "content": "I | <"},
        {"role": "assistant", "content": content},
    ]
    response = api.chat(messages=messages, continue_final_message=True)
    assert response.status_code == 200, response.text
    text = "a \nb " if isinstance(content, list) else content
    start = PROMPT.replace("hi", "I | <")
    assert prompt_of(api) == start + (text.lstrip() if trims else text)


def test_a_template_that_shows_the_final_message_twice_shows_no_mark(api):
    source = api.context.chat_template.source + "{{ messages[-1]['content'] }}"
    api.context.chat_template = ChatTemplate(source, tokenizer())
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}]
    assert api.chat(messages=messages, continue_final_message=True).status_code == 200
    assert prompt_of(api) == PROMPT + "ok<|im_end|>\nok"


def test_what_the_template_does_not_show_cannot_be_continued(api):
    api.context.chat_template = ChatTemplate("{{ messages[0].content }}", tokenizer())
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}]
    error = error_of(api.chat(messages=messages, continue_final_message=True))
    assert error["param"] == "continue_final_message"


def test_max_tokens_default_to_the_rest_of_the_context(api):
    api.chat()
    assert api.engine.asked[-1][1].max_tokens == MAX_LEN - NUM_PROMPT


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
def test_max_completion_tokens_wins(api, endpoint):
    getattr(api, endpoint)(max_tokens=9, max_completion_tokens=3)
    assert api.engine.asked[-1][1].max_tokens == 3
    refused = error_of(getattr(api, endpoint)(max_completion_tokens=0))
    assert refused["param"] == "max_completion_tokens"


def test_fields_reach_the_engine_unchanged(api):
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 42,
        "presence_penalty": 1.0, "frequency_penalty": -1.0, "repetition_penalty": 1.5,
        "min_tokens": 2, "ignore_eos": True, "stop_token_ids": [5, 6],
        "skip_special_tokens": False, "include_stop_str_in_output": True,
        "allowed_token_ids": [8, 9], "max_tokens": 11,
    }  # fmt: skip
    api.chat(**fields, logit_bias={"3": 500, "4": -500, "5": 1.5}, stop=["a", "b"])
    params = api.engine.asked[-1][1]
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logit_bias == {3: 100.0, 4: -100.0, 5: 1.5}
    assert params.stop == ["a", "b"]
    assert params.logprobs is None
    assert params.prompt_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_text_and_is_named(api, stream):
    response = api.chat(stop=["never", "w\N{LATIN SMALL LETTER O WITH DIAERESIS}"], stream=stream)
    if stream:
        choices = [e["choices"][0] for e in events_of(response)]
        text = "".join(c["delta"].get("content", "") for c in choices)
        last = choices[-1]
    else:
        last = response.json()["choices"][0]
        text = last["message"]["content"]
    assert text == "Hello "
    assert last["finish_reason"] == "stop"
    assert last["stop_reason"] == "w\N{LATIN SMALL LETTER O WITH DIAERESIS}"
    assert api.alive()


def test_a_stop_string_can_be_kept(api):
    choice = api.chat(stop="w", include_stop_str_in_output=True).json()["choices"][0]
    assert choice["message"]["content"] == "Hello w"


def test_half_characters_are_never_streamed(api):
    for event in events_of(api.chat(stream=True)):
        assert "\N{REPLACEMENT CHARACTER}" not in event["choices"][0]["delta"].get("content", "")


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_are_returned_when_asked_for(api, stream):
    response = api.chat(return_token_ids=True, stream=stream, max_tokens=5)
    expected = tokenizer().encode(ANSWER, add_special_tokens=False)[:5]
    if stream:
        events = events_of(response)
        assert events[0]["prompt_token_ids"] == api.engine.asked[-1][0]
        assert not any("prompt_token_ids" in e for e in events[1:])
        ids = [i for e in events for i in e["choices"][0].get("token_ids", [])]
    else:
        body = response.json()
        assert body["prompt_token_ids"] == api.engine.asked[-1][0]
        ids = body["choices"][0]["token_ids"]
    assert ids == expected
    assert "token_ids" not in api.chat().json()["choices"][0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (TooManyRequests("full", retry_after_s=2.5), 429),
        (EngineDead("gone"), 503),
        (RequestError("the step failed"), 500),
    ],
)
def test_an_error_before_the_first_token_has_its_status(stream, error, status):
    response = Api(lambda *_: [error]).chat(stream=stream)
    assert response.status_code == status
    assert error_of(response)["message"] == error.message
    assert response.headers.get("retry-after") == ("3" if status == 429 else None)


@pytest.mark.parametrize("endpoint", ["chat", "complete"])
@pytest.mark.parametrize("n", [1, 2])
def test_an_error_in_the_stream_is_an_event_then_done(endpoint, n):
    def fail(engine, number, prompt, params):
        yield Output(number, [tokenizer().encode("h")[0]])
        yield EngineDead("the engine was killed by SIGKILL")

    api = Api(fail)
    events = events_of(getattr(api, endpoint)(stream=True, n=n))
    assert events[-1] == {
        "error": {
            "message": "the engine was killed by SIGKILL",
            "type": "ServiceUnavailableError",
            "param": None,
            "code": "service_unavailable",
        }
    }
    assert "choices" in events[-2]
    assert api.engine.running == 0
    assert api.context.active_sequences == 0


def test_an_unexpected_failure_in_the_stream_is_an_event_too(caplog):
    def fail(engine, number, prompt, params):
        yield Output(number, [tokenizer().encode("h")[0]])
        msg = "boom"
        yield ZeroDivisionError(msg)

    events = events_of(Api(fail).chat(stream=True))
    assert events[-1]["error"]["code"] == "server_error"
    assert "boom" not in events[-1]["error"]["message"]
    assert "boom" in caplog.text


def test_one_failing_choice_ends_the_others():
    def fail(engine, number, prompt, params):
        if number == 1:
            yield RequestError("no")
        yield 60.0

    api = Api(fail)
    assert api.chat(n=3).status_code == 500
    assert api.engine.running == 0
    assert api.engine.aborted == 2


def test_a_silent_stream_sends_comments_until_the_first_token():
    from cpuserve.serving.models.limits import ClientLimits

    def slow(engine, number, prompt, params):
        yield 1.0  # 20 times the silence: on a busy machine a comment may come late
        yield Output(number, [5], "length")

    response = Api(slow, http=ClientLimits(silent_s=0.05)).chat(stream=True)
    assert response.text.startswith(": keep-alive\n\n: keep-alive\n\n")
    assert events_of(response)[-1]["choices"][0]["finish_reason"] == "length"


def test_an_error_after_comments_is_an_event():
    from cpuserve.serving.models.limits import ClientLimits

    def slow(engine, number, prompt, params):
        yield 0.1
        yield RequestError("late")

    events = events_of(Api(slow, http=ClientLimits(silent_s=0.02)).chat(stream=True))
    assert [e["error"]["message"] for e in events] == ["late"]


def test_more_sequences_than_the_server_holds_are_429():
    from cpuserve.serving.models.limits import ClientLimits

    api = Api(http=ClientLimits(max_sequences=4))
    response = api.chat(n=5)
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert error_of(response)["type"] == "TooManyRequests"
    assert api.chat(n=4).status_code == 200


def test_a_model_without_chat_template_says_what_to_do(api):
    from cpuserve.tokenizer.chat import ChatTemplate

    api.context.chat_template = ChatTemplate(None, tokenizer())
    message = error_of(api.chat())["message"]
    assert "no chat template" in message
    assert "/v1/completions" in message


def test_prompt_logprobs_stand_beside_the_choices(api):
    body = api.chat(prompt_logprobs=1, max_tokens=2).json()
    assert len(body["prompt_logprobs"]) == NUM_PROMPT
    assert body["prompt_logprobs"][0] is None
    assert api.chat(max_tokens=2).json()["prompt_logprobs"] is None


EFFORTS = "".join(
    f"{{{{ {name} | default('unset') }}}} "
    for name in ("reasoning_effort", "enable_thinking", "thinking")
)


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "unset unset unset "),
        ({"reasoning_effort": None}, "unset unset unset "),
        ({"reasoning_effort": "minimal"}, "minimal unset unset "),
        ({"reasoning_effort": "max"}, "max unset unset "),
        ({"reasoning_effort": "none"}, "none False False "),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
         "high unset unset "),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
         "none True False "),
    ],
    ids=str,
)  # fmt: skip
def test_reasoning_effort_reaches_the_template(api, fields, prompt):
    api.context.chat_template = ChatTemplate(EFFORTS, tokenizer())
    assert api.chat(**fields).status_code == 200
    assert prompt_of(api) == prompt
    asked = {"messages": [{"role": "user", "content": "hi"}], **fields}
    assert api.post("/tokenize", **asked).json()["tokens"] == api.engine.asked[-1][0]


def test_an_unknown_reasoning_effort_is_refused_by_tokenize_too(api):
    messages = [{"role": "user", "content": "hi"}]
    error = error_of(api.post("/tokenize", messages=messages, reasoning_effort="extreme"))
    assert error["param"] == "reasoning_effort"
    assert "none, minimal, low, medium, high, xhigh, max" in error["message"]
