"""OpenAI's responses: bodies, streams, tools, and what a request may contain."""

import json
import re

import pytest
from openai.types.responses import Response

from cpuserve.engine.ipc import Output
from tests.api.fakes import ANSWER, Api, error_of, tokenizer
from tests.api.openai_responses import (
    FORM,
    HI,
    LOGPROBS,
    NESTED,
    OTHER,
    PATH,
    SEARCH,
    WEATHER,
    ask,
    events_of,
)
from tests.api.tools import CALL, prompt_of, says, tool_api


def folded(events):
    """The output that the parts of a stream make together, after checking that each ends as told.

    Only deltas and what is added are read; what is done has to be the same.
    """
    output = []
    for event in events:
        kind, index = event["type"].removeprefix("response."), event.get("output_index")
        if kind == "output_item.added":
            assert index == len(output)
            assert event["item"]["status"] == "in_progress"
            assert all(item["status"] != "in_progress" for item in output), "one is open at a time"
            output.append(event["item"])
        elif index is not None:
            item = output[index]
            assert event.get("item_id", item["id"]) == item["id"]
            _fold(kind, event, item)
    return output


def _fold(kind, event, item):
    if kind == "content_part.added":
        assert event["content_index"] == len(item["content"]) == 0
        item["content"].append(event["part"])
    elif kind == "output_text.delta":
        item["content"][0]["text"] += event["delta"]
        item["content"][0]["logprobs"] += event["logprobs"]
    elif kind == "function_call_arguments.delta":
        item["arguments"] += event["delta"]
    elif kind == "custom_tool_call_input.delta":
        item["input"] += event["delta"]
    elif kind == "output_text.done":
        told = {"text": event["text"], "logprobs": event["logprobs"]}
        assert {**item["content"][0], **told} == item["content"][0]
    elif kind == "content_part.done":
        assert item["content"] == [event["part"]]
    elif kind == "function_call_arguments.done":
        assert item["arguments"] == event["arguments"]
    elif kind == "custom_tool_call_input.done":
        assert item["input"] == event["input"]
    else:
        assert kind == "output_item.done"
        if item["type"] == "tool_search_call":  # it has no events with parts
            item["arguments"] = event["item"]["arguments"]
        item["status"] = event["item"]["status"]
        assert item == event["item"]


def without_ids(body):
    """The same JSON without what differs between two answers."""
    text = re.sub(r'"(id|call_id)": "[a-z]+_[0-9a-f]{24,}(_\d+)?"', r'"\1": ""', json.dumps(body))
    return json.loads(re.sub(r'"(created|completed)_at": \d+', r'"\1_at": 0', text))


def test_a_response_is_what_openais_type_says(monkeypatch):
    asked = {"input": "hi", "model": "alias"}
    monkeypatch.setattr("cpuserve.base.ids._random", lambda: "r1")
    response = Api().post(PATH, **asked)
    body = response.json()
    parsed = Response.model_validate(body, strict=True)
    assert parsed.output_text == ANSWER
    count = len(tokenizer().encode(ANSWER, add_special_tokens=False)) + 1
    assert (parsed.id, parsed.model, parsed.status) == ("resp_r1", "alias", "completed")
    assert parsed.usage.output_tokens == count
    assert parsed.usage.total_tokens == parsed.usage.input_tokens + count
    assert parsed.created_at <= parsed.completed_at < parsed.created_at + 60
    text = {"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}
    message = {"type": "message", "id": "msg_r1_0", "status": "completed", "role": "assistant"}
    assert body["output"] == [{**message, "content": [text]}]
    assert body["store"] is True
    assert (body["error"], body["incomplete_details"], body["instructions"]) == (None, None, None)


def test_a_response_repeats_what_was_asked():
    fields = {
        "instructions": "Be kind.",
        "max_output_tokens": 99,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "temperature": 0.25,
        "text": {"format": {"type": "text"}, "verbosity": "low"},
        "tool_choice": "none",
        "top_p": 0.5,
        "user": "u",
    }
    more = {"reasoning": {"effort": "low", "summary": "auto"}, "truncation": "auto", "store": False}
    api = tool_api(says(ANSWER), default_sampling={"temperature": 0.7, "top_p": 0.75})
    body = ask(api, tools=[WEATHER], **fields, **more).json()
    assert {name: body[name] for name in fields} == fields
    assert body["reasoning"] == {"effort": "low", "summary": "auto"}
    assert (body["truncation"], body["store"]) == ("disabled", False)
    assert body["tools"] == [{**WEATHER, "strict": False}]
    defaults = ask(api).json()
    assert (defaults["temperature"], defaults["top_p"]) == (0.7, 0.75)
    Response.model_validate(body, strict=True)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_output_tokens": 3},
        {"stop": ["wör"]},
        {"instructions": "Be kind.", "temperature": 0, "top_p": 0.5, "top_k": 3, "seed": 5},
        {"include": [LOGPROBS]},
        {"include": [LOGPROBS], "top_logprobs": 2, "max_output_tokens": 4},
    ],
    ids=lambda fields: "-".join(fields) or "plain",
)
def test_a_stream_makes_the_same_response(fields):
    api = Api()
    whole = ask(api, **fields).json()
    events = events_of(ask(api, stream=True, **fields))
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    done = ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds[-4:] == [*done, whole["status"]]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    last = events[-1]["response"]
    assert folded(events) == last["output"]
    assert without_ids(last) == without_ids(whole)
    for begun in (events[0]["response"], events[1]["response"]):
        assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
        ended = {"status", "output", "usage", "completed_at", "incomplete_details"}
        assert all(begun[name] == last[name] for name in begun.keys() - ended)
    assert api.engine.asked[0] == api.engine.asked[1]


@pytest.mark.parametrize("per_output", [1, 2, 1000])
@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"I look.\n{CALL}{CALL}", ["message", "function_call", "function_call"]),
        (f"{CALL}\nThen I{CALL}tell.", ["function_call", "message"] * 2),
        (ANSWER, ["message"]),
        ("", ["message"]),
    ],
    ids=["calls behind text", "text behind calls", "text", "nothing"],
)
def test_a_stream_makes_the_same_items(text, kinds, per_output):
    api = tool_api(says(text, per_output))
    whole = ask(api, tools=[WEATHER]).json()
    assert [item["type"] for item in whole["output"]] == kinds
    events = events_of(ask(api, tools=[WEATHER], stream=True))
    last = events[-1]["response"]
    assert folded(events) == last["output"]
    assert without_ids(last) == without_ids(whole)
    assert whole["status"] == "completed"
    calls = [item for item in last["output"] if item["type"] == "function_call"]
    assert len({call["call_id"] for call in calls}) == len(calls)
    for call in calls:
        assert (call["name"], call["status"]) == ("weather", "completed")
        assert call["arguments"] == '{"city": "Paris"}'
    ids = [item["id"] for item in last["output"]]
    assert len(set(ids)) == len(ids)


def test_an_answer_that_is_cut_off_is_incomplete():
    body = ask(Api(), max_output_tokens=2).json()
    assert (body["status"], body["completed_at"]) == ("incomplete", None)
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "fields", "status"),
    [
        ("length", {}, "incomplete"),
        ("stop", {}, "completed"),
        ("stop", {"stop": "Par"}, "completed"),
    ],
    ids=["length", "end", "stop string"],
)
def test_a_call_that_is_cut_off_is_incomplete(finish, fields, status, stream):
    api = tool_api(says(f"I look.{CALL.partition('is')[0]}", finish=finish))
    response = ask(api, tools=[WEATHER], stream=stream, **fields)
    body = events_of(response)[-1]["response"] if stream else response.json()
    assert body["status"] == status
    text, call = body["output"]
    assert (text["status"], call["status"]) == ("completed", "incomplete")
    assert call["arguments"].startswith('{"city": "')
    assert not call["arguments"].endswith("}")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_those_of_chat_completions(stream):
    api = Api()
    response = ask(api, include=[LOGPROBS], top_logprobs=2, stream=stream)
    body = events_of(response)[-1]["response"] if stream else response.json()
    chat = api.chat(logprobs=True, top_logprobs=2).json()["choices"][0]
    assert body["output"][0]["content"][0]["logprobs"] == chat["logprobs"]["content"]
    assert body["top_logprobs"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_told(stream):
    def cached(engine, number, prompt, params):
        yield Output(number, [40], "length", cached_tokens=3)

    response = ask(Api(cached), stream=stream)
    usage = (events_of(response)[-1]["response"] if stream else response.json())["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    assert usage["input_tokens"] > 3


@pytest.mark.parametrize(("seconds", "times"), [(0, 2), (3600, 1)], ids=["again", "once"])
def test_a_stream_begins_while_a_long_prompt_is_computed(seconds, times, monkeypatch):
    monkeypatch.setattr("cpuserve.api.openai.responses.writer._PERIOD_S", seconds)

    def slow(engine, number, prompt, params):
        yield Output(number, [], processed=8)
        yield Output(number, [], processed=9)
        yield Output(number, [40], "stop")

    api = Api(slow)
    kinds = [event["type"] for event in events_of(ask(api, stream=True))]
    assert kinds[: times + 2] == ["response.created", *["response.in_progress"] * times,
                                  "response.output_item.added"]  # fmt: skip
    assert api.engine.wishes[0][1], "progress is asked for"


def test_only_the_last_event_of_a_stream_repeats_the_tools(monkeypatch):
    """Agents offer 40 kB of tools, and in_progress comes again and again."""
    monkeypatch.setattr("cpuserve.api.openai.responses.writer._PERIOD_S", 0)

    def slow(engine, number, prompt, params):
        for done in range(8, 12):
            yield Output(number, [], processed=done)
        yield Output(number, [40], "stop")

    wide = {**WEATHER, "description": "w" * 1000}
    response = ask(tool_api(slow), tools=[wide], stream=True)
    events = events_of(response)
    begun = [event["response"] for event in events if event["type"] in
             ("response.created", "response.in_progress")]  # fmt: skip
    assert len(begun) == 5
    assert [told["tools"] for told in begun] == [[]] * 5
    assert events[-1]["response"]["tools"][0]["description"] == wide["description"]
    assert response.text.count("w" * 1000) == 1


def test_fields_reach_the_engine():
    api = Api(default_sampling={"temperature": 0.7, "top_k": 9})
    fields = {"temperature": 0.25, "top_p": 0.5, "max_output_tokens": 7, "seed": 3, "min_p": 0.1}
    ask(api, stop=["q"], repetition_penalty=1.5, **fields)
    params = api.engine.asked[0][1]
    shown = {name.replace("output_", ""): value for name, value in fields.items()}
    assert {name: getattr(params, name) for name in shown} == shown
    assert (params.stop, params.top_k, params.repetition_penalty) == (["q"], 9, 1.5)


def prompts_of(api):
    return [ids for ids, _ in api.engine.asked]


def test_items_make_the_prompt_of_chat_messages():
    api = tool_api(says("18 degrees."))
    parts = [{"type": "input_text", "text": "How"}, {"type": "input_text", "text": "warm?"}]
    said = [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather",
            "arguments": '{"city": "Paris"}', "status": "completed"}  # fmt: skip
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "hm"}
    output = {"type": "function_call_output", "output": "18"}
    listed = [{"type": "input_text", "text": "1"}, {"type": "input_text", "text": "9"}]
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": parts},
        thought,
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": said},
        call,
        {**call, "call_id": "c2"},
        {**output, "call_id": "c1"},
        {**output, "call_id": "c2", "output": listed},
        {"role": "assistant", "content": "Warm."},
        {"role": "user", "content": "Sure?"},
    ]  # fmt: skip
    assert ask(api, items, instructions="Be kind.", tools=[WEATHER]).status_code == 200
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    calls = [{"id": n, "type": "function", "function": function} for n in ("c1", "c2")]
    api.chat(
        tools=[NESTED],
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "How\nwarm?"},
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "18"},
            {"role": "tool", "tool_call_id": "c2", "content": "1\n9"},
            {"role": "assistant", "content": "Warm."},
            {"role": "user", "content": "Sure?"},
        ],
    )
    assert prompts_of(api)[0] == prompts_of(api)[1]
    assert "hm" not in prompt_of(api)


def test_the_output_of_a_response_can_be_sent_back_as_it_is():
    api = tool_api(says(f"I look.{CALL}Then I tell.{CALL}"))
    output = ask(api, tools=[WEATHER]).json()["output"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"{n} degrees"}
        for n, item in enumerate(output)
        if item["type"] == "function_call"
    ]
    assert len(results) == 2
    assert ask(api, [HI, *output, *results], tools=[WEATHER]).status_code == 200
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>'
    turn = f"<|im_start|>assistant\nI look.\n\nThen I tell.\n{call}{call}<|im_end|>\n"
    first, second = (f"<|im_start|>tool\n{n} degrees<|im_end|>\n" for n in (1, 3))
    assert prompt_of(api).endswith(f"{turn}{first}{second}<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("choice", "same"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "weather"}, {"type": "function",
                                                   "function": {"name": "weather"}}),
        ({"type": "allowed_tools", "mode": "required", "tools": [WEATHER, SEARCH]},
         {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NESTED]}}),
    ],
    ids=["auto", "none", "required", "function", "allowed"],
)  # fmt: skip
def test_the_choice_of_a_tool_is_that_of_chat_completions(choice, same):
    api = tool_api(says('weather", "arguments": {}}'))
    strict = {**WEATHER, "strict": True}
    nested = {"type": "function", "function": {**NESTED["function"], "strict": True}}
    plain = {"type": "function", "function": {"name": "other"}}
    given = {"parallel_tool_calls": False}
    body = ask(api, tools=[SEARCH, strict, OTHER], tool_choice=choice, **given).json()
    assert api.chat(tools=[nested, plain], tool_choice=same, **given).status_code == 200
    assert api.engine.asked[0] == api.engine.asked[1]
    assert body["tool_choice"] == choice
    assert [tool["name"] for tool in body["tools"]] == ["weather", "other"], "what was offered"


@pytest.mark.parametrize("name", ["sky", "mcp__sky", "mcp__sky__"])
def test_functions_in_a_namespace_are_offered_and_told_as_such(name):
    """Codex offers the tools of an MCP server like this."""
    inner = {"type": "function", "name": "weather", "strict": True}
    space = {"type": "namespace", "name": name, "description": "What is above.",
             "tools": [inner, {"type": "custom", "name": "free"}]}  # fmt: skip
    flat = f"{name.removesuffix('__')}__weather"
    call = CALL.replace("weather", flat)
    api = tool_api(says(f"{CALL}{call}", 2))
    whole = ask(api, tools=[WEATHER, space]).json()
    events = events_of(ask(api, tools=[WEATHER, space], stream=True))
    assert folded(events) == events[-1]["response"]["output"]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    plain, spaced = whole["output"]
    assert (plain["name"], "namespace" in plain) == ("weather", False)
    assert (spaced["name"], spaced["namespace"]) == ("weather", name)
    told = {**inner, "description": None, "parameters": None}
    free = {"type": "custom", "name": "free", "description": None, "format": {"type": "text"}}
    assert whole["tools"][1] == {**space, "tools": [told, free]}
    assert prompt_of(api).count(flat) == 1
    results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "18"}
               for item in whole["output"]]  # fmt: skip
    ask(api, [HI, *whole["output"], *results], tools=[WEATHER, space])
    assert f'{{"name": "{flat}", "arguments": {{"city": "Paris"}}}}' in prompt_of(api)


@pytest.mark.parametrize(
    ("others", "space"),
    [
        ([], "sky"),  # the only tool of this name
        ([WEATHER], None),
        ([{"type": "namespace", "name": "sea", "description": "x", "tools": [WEATHER]}], None),
        ([{"type": "namespace", "name": "sea", "description": "x", "tools": [OTHER]}], "sky"),
    ],
)
def test_a_function_called_without_its_namespace_is_found_where_its_name_is_unique(others, space):
    inner = {"type": "namespace", "name": "sky", "description": "x", "tools": [WEATHER]}
    api = tool_api(says(CALL, 2))
    whole = ask(api, tools=[inner, *others]).json()
    events = events_of(ask(api, tools=[inner, *others], stream=True))
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    (item,) = whole["output"]
    assert (item["name"], item.get("namespace")) == ("weather", space)


@pytest.mark.parametrize("none", ["none", {"type": "none"}], ids=["word", "type"])
def test_tools_that_nobody_here_can_run_count_as_none_if_none_may_be_called(none):
    body = ask(Api(), tools=[SEARCH], tool_choice=none).json()
    assert body["tool_choice"] == "none"


@pytest.mark.parametrize(
    ("form", "same"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        (FORM, {"type": "json_schema", "json_schema": {k: FORM[k] for k in FORM if k != "type"}}),
    ],
    ids=lambda form: form["type"],
)
def test_the_form_of_an_answer_is_that_of_chat_completions(form, same):
    api = Api()
    body = ask(api, text={"format": form}).json()
    api.chat(response_format=same)
    ours, theirs = (params.structured_outputs for _, params in api.engine.asked)
    assert (ours and ours.key) == (theirs and theirs.key)
    assert body["text"] == {"format": form}


def test_vllms_forms_of_answers_are_kept_too():
    api = Api()
    assert ask(api, structured_outputs={"choice": ["a", "b"]}).status_code == 200
    assert api.engine.asked[0][1].structured_outputs.choice == ["a", "b"]


def test_the_effort_reaches_the_template():
    source = "{{ reasoning_effort | default('unset') }} {{ enable_thinking | default('unset') }}"
    api = tool_api(says("Hi"), source=source)
    for fields in ({}, {"reasoning": {"effort": "high"}}, {"reasoning": {"effort": "none"}}):
        ask(api, **fields)
    assert [prompt_of(api, i) for i in range(3)] == ["unset unset", "high unset", "none False"]


@pytest.mark.parametrize(
    "fields",
    [
        {"store": True},
        {"background": False, "previous_response_id": None, "conversation": None, "prompt": None},
        {"include": ["reasoning.encrypted_content", "web_search_call.action.sources"]},
        {"truncation": "disabled", "service_tier": "auto", "max_tool_calls": 3},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"prompt_cache_retention": "24h", "client_metadata": {"a": "b"}, "tools": []},
        {"reasoning": {"summary": "auto"}, "text": {"verbosity": "high"}, "top_logprobs": 0},
        {"n": 1, "logprobs": False},
    ],
    ids=lambda fields: "-".join(fields),
)
def test_fields_without_an_effect_are_accepted(fields):
    api = Api()
    assert ask(api, **fields).status_code == 200
    ask(api)
    assert api.engine.asked[0] == api.engine.asked[1]


@pytest.mark.parametrize("value", [False, "", [], {}], ids=str)
def test_fields_of_other_endpoints_that_are_not_set_change_nothing(value):
    """The call, in which fields of chat completions have these names, must not get the values."""
    names = ("add_generation_prompt", "continue_final_message", "echo", "suffix")
    api = Api()
    for fields in ({}, *({name: value} for name in names)):
        assert ask(api, **fields).status_code == 200, fields
    first, *others = api.engine.asked
    assert others == [first] * len(names)


def test_metadata_within_the_limits_is_repeated():
    metadata = {f"{i:064d}": "v" * 512 for i in range(16)}
    assert ask(Api(), metadata=metadata).json()["metadata"] == metadata


def test_input_tokens_are_those_of_the_response():
    api = tool_api(says(ANSWER))
    fields = {"model": "tiny", "input": [HI], "instructions": "Be kind.", "tools": [WEATHER]}
    counted = api.post(f"{PATH}/input_tokens", **fields).json()
    used = api.post(PATH, **fields).json()["usage"]["input_tokens"]
    assert counted == {"object": "response.input_tokens", "input_tokens": used}


def test_input_beyond_the_context_can_be_counted():
    text = "x " * 400
    counted = Api().post(f"{PATH}/input_tokens", input=text).json()["input_tokens"]
    assert counted > 400
    assert str(counted) in error_of(ask(Api(), text))["message"]
