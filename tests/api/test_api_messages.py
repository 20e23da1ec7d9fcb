"""Anthropic's messages: replies, streams, prompts, counts and models in that dialect."""

from datetime import datetime

import pytest

from cpuserve.engine.ipc import Output
from tests.api.anthropic_messages import (
    DOCUMENT,
    FORM,
    FOUND,
    HI,
    PLAIN,
    WEATHER,
    ask,
    error_of,
    events_of,
    folded,
    use,
)
from tests.api.fakes import ANSWER, Api, tokenizer
from tests.api.tools import prompt_of, says, tool_api


def test_an_answer_is_a_message(monkeypatch):
    monkeypatch.setattr("cpuserve.base.ids._random", lambda: "a1")
    asked = {"messages": HI, "max_tokens": 64, "model": "alias"}
    headers = {"x-request-id": "r1", "anthropic-version": "2023-06-01"}
    response = Api().request("POST", "/v1/messages", json=asked, headers=headers)
    assert response.headers["request-id"] == response.headers["x-request-id"] == "r1"
    body = response.json()
    count = len(tokenizer().encode(ANSWER, add_special_tokens=False)) + 1
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert body["usage"].pop("input_tokens") > 5
    assert body == {
        "id": "msg_a1",
        "type": "message",
        "role": "assistant",
        "model": "alias",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {**cached, "output_tokens": count},
    }


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 3},
        {"stop_sequences": ["wör"]},
        {"system": "Be kind.", "temperature": 0, "top_p": 0.5, "top_k": 3},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_a_stream_makes_the_same_message(fields):
    api = Api()
    whole = ask(api, **fields).json()
    streamed = folded(events_of(ask(api, stream=True, **fields)))
    assert streamed.pop("id") != whole.pop("id")
    assert streamed == whole
    assert api.engine.asked[0] == api.engine.asked[1]


@pytest.mark.parametrize(
    ("fields", "reason", "sequence"),
    [
        ({"max_tokens": 2}, "max_tokens", None),
        ({"stop_sequences": ["zz", "wör"]}, "stop_sequence", "wör"),
    ],
    ids=["length", "sequence"],
)
def test_the_reason_of_the_end_is_told(fields, reason, sequence):
    body = ask(Api(), **fields).json()
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, sequence)


def test_sampling_fields_reach_the_engine():
    api = Api(default_sampling={"temperature": 0.7, "top_k": 9})
    assert ask(api, temperature=0.25, top_p=0.5, stop_sequences=["q"]).status_code == 200
    params = api.engine.asked[0][1]
    assert (params.temperature, params.top_p, params.top_k) == (0.25, 0.5, 9)
    assert (params.max_tokens, params.stop) == (64, ["q"])


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_not_input_tokens(stream):
    def cached(engine, number, prompt, params):
        yield Output(number, [40], "length", cached_tokens=3)

    response = ask(Api(cached), stream=stream)
    usage = (folded(events_of(response)) if stream else response.json())["usage"]
    counted = ask(Api(), path="/v1/messages/count_tokens").json()["input_tokens"]
    assert usage["cache_read_input_tokens"] == 3
    assert usage["input_tokens"] == counted - 3


@pytest.mark.parametrize("progress", [False, True])
def test_a_stream_begins_with_the_cached_tokens(progress):
    def cached(engine, number, prompt, params):
        if progress:
            yield Output(number, [], processed=8, cached_tokens=3)
        yield Output(number, [40], cached_tokens=3)
        yield Output(number, [41], "length")

    events = events_of(ask(Api(cached), stream=True))
    (name, start), (last, _) = events[0], events[-1]
    assert (name, last) == ("message_start", "message_stop")
    counted = ask(Api(), path="/v1/messages/count_tokens").json()["input_tokens"]
    end = events[-2][1]["usage"]
    assert end["input_tokens"] == counted - 3
    assert start["message"]["usage"] == {**end, "output_tokens": 0}


def test_the_system_prompt_and_blocks_make_the_prompt_of_chat():
    api = Api()
    first = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    text = [first, {"type": "text", "text": "b"}]
    ask(api, messages=[{"role": "user", "content": text}], system=text)
    chat = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    api.chat(messages=chat, max_tokens=64)
    assert api.engine.asked[0][0] == api.engine.asked[1][0]
    assert "<|im_start|>system\na\nb<|im_end|>" in prompt_of(api)


def test_documents_and_search_results_are_text_for_the_model():
    question = {"type": "text", "text": "Which colour?"}
    api = tool_api(says("Green."))
    bare = {"type": "document", "source": PLAIN, "title": None}
    ask(api, messages=[{"role": "user", "content": [DOCUMENT, FOUND, bare, question]}])
    lines = ["Grass", "A school book.", PLAIN["data"], "Sky", FOUND["source"], "It is", "blue.",
             PLAIN["data"], "Which colour?"]  # fmt: skip
    text = "\n".join(lines)
    assert f"<|im_start|>user\n{text}<|im_end|>" in prompt_of(api)


def test_a_last_message_of_the_assistant_is_continued():
    api = Api()
    ask(api, messages=[*HI, {"role": "assistant", "content": "I am"}])
    assert prompt_of(api).endswith("<|im_start|>assistant\nI am")


@pytest.mark.parametrize(
    "fields",
    [{"output_config": {"format": FORM, "effort": "low"}}, {"output_format": FORM}],
    ids=lambda fields: next(iter(fields)),
)
def test_the_form_of_an_answer_is_that_of_chat_completions(fields):
    api = tool_api(says("{}"))
    assert ask(api, tools=[WEATHER], **fields).status_code == 200
    asked = {"type": "json_schema", "json_schema": {"name": "weather", "schema": FORM["schema"]}}
    api.chat(tools=[{"type": "function", "function": {"name": "weather"}}], response_format=asked)
    form, same = (params.structured_outputs for _, params in api.engine.asked)
    assert form.key == same.key
    assert form.calls
    forced = ask(api, tools=[WEATHER], tool_choice={"type": "any"}, **fields)
    assert forced.status_code == 200
    assert api.engine.asked[-1][1].structured_outputs.role == "tools"


def test_an_effort_or_no_format_leaves_the_form_free():
    api = Api()
    assert ask(api, output_config={"effort": "high", "format": None}).status_code == 200
    assert api.engine.asked[0][1].structured_outputs is None


WISHES = "{{ reasoning_effort | default('unset') }} {{ enable_thinking | default('unset') }}"


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({}, "unset unset"),
        ({"thinking": {"type": "adaptive"}}, "unset unset"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "unset unset"),
        ({"thinking": {"type": "between_tools"}}, "unset unset"),
        ({"thinking": {"type": "enabled", "budget_tokens": 31999}}, "unset True"),
        ({"thinking": {"type": "disabled"}}, "unset False"),
        ({"output_config": {"effort": "high"}}, "high unset"),
        ({"output_config": {"effort": "max"}, "thinking": {"type": "adaptive"}}, "max unset"),
    ],
    ids=str,
)
def test_effort_and_thinking_reach_the_template(fields, prompt):
    api = tool_api(says("Hi"), source=WISHES)
    counted = ask(api, path="/v1/messages/count_tokens", **fields).json()
    assert ask(api, **fields).status_code == 200
    assert prompt_of(api) == prompt
    assert counted == {"input_tokens": len(api.engine.asked[0][0])}


def test_instructions_may_stand_between_turns():
    """Claude Code sends such messages."""
    api = tool_api(says("18 degrees."))
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "18"}
    told = [{"type": "text", "text": "Be brief."}]
    messages = [
        *HI,
        {"role": "system", "content": told},
        {"role": "assistant", "content": [use("t1")]},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": [result]},
    ]
    assert ask(api, messages=messages, tools=[WEATHER]).status_code == 200
    prompt = prompt_of(api)
    assert "hi<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant" in prompt
    assert "system\nBe kind.<|im_end|>\n<|im_start|>tool\n18<|im_end|>" in prompt


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue"}], ids=str)
def test_a_thread_is_refused_with_what_makes_clients_go_on_without(thread):
    """Anthropic's tool runner asks for a thread, and reads these details."""
    error = ask(Api(), thread=thread).json()["error"]
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (error["type"], error["details"]) == ("invalid_request_error", details)
    assert "thread is not supported" in error["message"]


def test_count_tokens_counts_the_prompt_of_the_message():
    api = tool_api(says(ANSWER))
    counted = ask(api, tools=[WEATHER], system="Be kind.", path="/v1/messages/count_tokens")
    message = ask(api, tools=[WEATHER], system="Be kind.").json()
    assert counted.json() == {"input_tokens": message["usage"]["input_tokens"]}


def models_of(api, query=""):
    headers = {"anthropic-version": "2023-06-01"}
    return api.request("GET", f"/v1/models{query}", headers=headers)


def test_models_have_this_dialects_form_for_its_clients():
    api = Api()
    page = models_of(api).json()
    assert list(page) == ["data", "has_more", "first_id", "last_id"]
    assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "tiny", "alias")
    assert [info["id"] for info in page["data"]] == ["tiny", "alias"]
    card = api.get("/v1/models").json()["data"][1]
    info = page["data"][1]
    assert (info["type"], info["display_name"], info["max_tokens"]) == ("model", "alias", 128)
    assert (
        datetime.fromisoformat(info["created_at"].replace("Z", "+00:00")).timestamp()
        == (card["created"])
    )
    assert models_of(api, "/alias").json() == info
    assert set(card) > {"object", "owned_by"}, "OpenAI's clients get their form"


@pytest.mark.parametrize(
    ("query", "ids", "more"),
    [
        ("?limit=1", ["tiny"], True),
        ("?limit=2", ["tiny", "alias"], False),
        ("?limit=1&after_id=tiny", ["alias"], False),
        ("?after_id=alias", [], False),
        ("?limit=1&before_id=alias", ["tiny"], False),
    ],
)
def test_models_come_in_pages(query, ids, more):
    page = models_of(Api(), query).json()
    assert ([info["id"] for info in page["data"]], page["has_more"]) == (ids, more)
    ends = (page["first_id"], page["last_id"])
    assert ends == ((ids[0], ids[-1]) if ids else (None, None))


@pytest.mark.parametrize(
    ("query", "status", "named"),
    [
        ("/other", 404, "'other'"),
        ("?limit=0", 400, "limit"),
        ("?limit=1001", 400, "limit"),
        ("?limit=x", 400, "limit"),
        ("?after_id=other", 400, "after_id"),
        ("?before_id=other", 400, "before_id"),
    ],
)
def test_errors_of_models_have_this_dialects_format(query, status, named):
    response = models_of(Api(), query)
    assert response.status_code == status
    assert named in error_of(response)["message"]
    assert error_of(models_of(Api(api_keys=("k",))))["type"] == "authentication_error"
