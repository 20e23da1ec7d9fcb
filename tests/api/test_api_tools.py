"""Tools in chat completions: calls in whole answers and streams, forced calls, bad input."""

import json

import pytest

from cpuserve.engine.ipc import Output
from cpuserve.serving.tools.learn import learn_format
from tests.api.fakes import ANSWER, error_of, events_of, tokenizer
from tests.api.tools import CALL, WEATHER, prompt_of, says, template, tool_api

HI = [{"role": "user", "content": "hi"}]
OTHER = {"type": "function", "function": {"name": "other"}}


def calls_of(deltas):
    """The calls that the chunks of a stream make together."""
    calls = []
    for part in [part for delta in deltas for part in delta.get("tool_calls", [])]:
        if "id" in part:
            assert part["index"] == len(calls)
            assert part["type"] == "function"
            calls.append({"id": part["id"], **part["function"]})
        else:
            calls[part["index"]]["arguments"] += part["function"]["arguments"]
    return calls


@pytest.mark.parametrize("per_output", [1, 3, 1000])
def test_a_call_is_told_whole_and_in_a_stream(per_output):
    api = tool_api(says(f"I look.\n{CALL}", per_output))
    choice = api.chat(tools=[WEATHER]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I look."
    (call,) = choice["message"]["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}

    chunks = events_of(api.chat(tools=[WEATHER], stream=True))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    (streamed,) = calls_of(deltas)
    assert streamed.pop("id") != call["id"]
    assert streamed == call["function"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert (len(deltas) > 10) == (per_output == 1), "the arguments come in parts"
    assert "weather" in prompt_of(api)


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_without_its_last_brace_ends_with_tool_calls(stream):
    api = tool_api(says(CALL.replace("}}", "}")))
    response = api.chat(tools=[WEATHER], stream=stream)
    if stream:
        events = events_of(response)
        (call,) = calls_of(event["choices"][0]["delta"] for event in events)
        told = call, events[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = response.json()["choices"]
        (called,) = choice["message"]["tool_calls"]
        told = called["function"], choice["finish_reason"]
    assert (told[0]["arguments"], told[1]) == ('{"city": "Paris"}', "tool_calls")


def test_a_message_of_calls_only_has_no_content():
    message = tool_api(says(CALL * 2)).chat(tools=[WEATHER]).json()["choices"][0]["message"]
    assert message["content"] is None
    assert len({call["id"] for call in message["tool_calls"]}) == 2


def test_an_answer_without_a_call_is_text_as_ever():
    choice = tool_api(says(ANSWER)).chat(tools=[WEATHER]).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": ANSWER, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_short_ends_with_length():
    text = CALL.partition("Par")[0]
    choice = tool_api(says(text, finish="length")).chat(tools=[WEATHER]).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


@pytest.mark.parametrize("per_output", [1, 1000])
@pytest.mark.parametrize(
    ("text", "fields", "reason"),
    [
        (CALL, {}, "tool_calls"),
        (CALL, {"parallel_tool_calls": False}, "tool_calls"),
        (CALL * 2, {}, "tool_calls"),
        (CALL + "\n", {}, "tool_calls"),
        (CALL.removesuffix("\n</tool_call>"), {}, "tool_calls"),
        (CALL.removesuffix("_call>"), {}, "tool_calls"),
        (CALL.removesuffix("}\n</tool_call>"), {}, "length"),
        (CALL + "I", {}, "length"),
        (CALL + "<", {}, "length"),
        (CALL + "<tool_call>", {}, "length"),
        (CALL + CALL.partition("Par")[0], {}, "length"),
    ],
    ids=str,
)
def test_a_call_that_is_complete_at_the_limit_is_to_be_run(per_output, text, fields, reason):
    api = tool_api(says(text, per_output, finish="length"))
    (choice,) = api.chat(tools=[WEATHER], **fields).json()["choices"]
    assert choice["finish_reason"] == reason
    chunks = events_of(api.chat(tools=[WEATHER], stream=True, **fields))
    assert chunks[-1]["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", ["", CALL], ids=["one", "second"])
@pytest.mark.parametrize(
    ("rest", "stop", "told"),
    [("Paris", "ari", ("stop", "ari")), ("Paris", None, ("stop", None))],
    ids=["stop string", "end of turn"],
)
def test_a_call_that_is_cut_short_ends_with_what_cut_it(stream, before, rest, stop, told):
    text = before.replace("Paris", "Rome") + CALL.partition("Paris")[0] + rest
    response = tool_api(says(text)).chat(tools=[WEATHER], stop=stop, stream=stream)
    last = events_of(response)[-1] if stream else response.json()
    choice = last["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == told


@pytest.mark.parametrize("end", ["</tool_call>", " Wait"], ids=["of the call", "behind it"])
def test_a_stop_string_behind_the_last_call_leaves_it_complete(end):
    api = tool_api(says(f"{CALL} Wait for it"))
    choice = api.chat(tools=[WEATHER], stop=end).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Paris"}'


@pytest.mark.parametrize("fields", [{}, {"tools": [WEATHER], "tool_choice": "none"}])
def test_without_tools_the_same_text_is_no_call(fields):
    api = tool_api(says(CALL))
    choice = api.chat(**fields).json()["choices"][0]
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"
    assert "Tools" not in prompt_of(api)


@pytest.mark.parametrize(
    ("choice", "prompt_end", "rest"),
    [
        ("required", '<tool_call>\n{"name": "', 'other", "arguments": {}}</tool_call>'),
        (OTHER, '<tool_call>\n{"name": "other", "arguments":', " {}}"),
    ],
    ids=["any", "named"],
)
def test_a_forced_call_begins_in_the_prompt(choice, prompt_end, rest):
    api = tool_api(says(rest))
    answer = api.chat(tools=[WEATHER, OTHER], tool_choice=choice).json()["choices"][0]
    assert prompt_of(api).endswith(prompt_end)
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "other", "arguments": "{}"}
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("word", ["none", "auto", "required"])
def test_a_word_may_be_the_type_of_the_choice(word):
    """Cursor sends it like this."""
    api = tool_api(says(ANSWER))
    for choice in (word, {"type": word}):
        assert api.chat(tools=[WEATHER], tool_choice=choice).status_code == 200
    assert api.engine.asked[0] == api.engine.asked[1]


def allowed(mode, *tools):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


@pytest.mark.parametrize(
    ("mode", "text"),
    [("auto", CALL), ("required", 'weather", "arguments": {"city": "Paris"}}</tool_call>')],
)
def test_only_allowed_tools_are_offered(mode, text):
    api = tool_api(says(text))
    choice = allowed(mode, {"type": "function", "function": {"name": "weather"}})
    answer = api.chat(tools=[WEATHER, OTHER], tool_choice=choice).json()["choices"][0]
    assert "other" not in prompt_of(api)
    assert prompt_of(api).endswith('{"name": "') == (mode == "required")
    (call,) = answer["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}


@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_before_its_name_has_no_forced_text(stream):
    api = tool_api(says("wea", finish="length"))
    answer = api.chat(tools=[WEATHER], tool_choice="required", stream=stream)
    choices = [e["choices"][0] for e in events_of(answer)] if stream else answer.json()["choices"]
    messages = [choice["delta" if stream else "message"] for choice in choices]
    assert "".join(message.get("content") or "" for message in messages) == ""
    assert choices[-1]["finish_reason"] == "length"


def endless_calls(engine, number, prompt, params):
    while True:
        yield Output(number, tokenizer().encode(CALL, add_special_tokens=False))


def test_one_call_ends_the_answer_if_calls_may_not_be_parallel():
    api = tool_api(endless_calls)
    choice = api.chat(tools=[WEATHER], parallel_tool_calls=False).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert (api.engine.running, api.engine.aborted) == (0, 1)


@pytest.mark.parametrize("per_output", [1, 7, 1000])
@pytest.mark.parametrize("fields", [{}, {"stop": "never written by this model"}], ids=["", "stop"])
def test_nothing_behind_the_one_call_is_told_or_counted(per_output, fields):
    def tokens(text):
        return len(tokenizer().encode(text, add_special_tokens=False))

    def answer(stream):
        api = tool_api(says(CALL + " and " + CALL.replace("Paris", "Rome"), per_output))
        return api.chat(tools=[WEATHER], parallel_tool_calls=False, stream=stream, **fields)

    whole = answer(stream=False).json()
    (choice,) = whole["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"city": "Paris"}'
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    if not fields:
        assert whole["usage"]["completion_tokens"] <= tokens(CALL)
    deltas = [event["choices"][0]["delta"] for event in events_of(answer(stream=True))]
    (streamed,) = calls_of(deltas)
    assert streamed["arguments"] == '{"city": "Paris"}'
    assert "".join(delta.get("content") or "" for delta in deltas) == ""


def test_the_choices_of_a_request_have_their_own_calls():
    api = tool_api(says(CALL))
    chunks = events_of(api.chat(tools=[WEATHER], n=2, stream=True))
    for index in (0, 1):
        own = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert [call["name"] for call in calls_of(own)] == ["weather"]


def test_a_conversation_with_a_call_and_its_result_is_rendered():
    api = tool_api(says("18 degrees."))
    call = {"id": "call_1", "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}  # fmt: skip
    messages = [
        {"role": "user", "content": "How warm is Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18"},
    ]
    assert api.chat(messages=messages, tools=[WEATHER]).status_code == 200
    prompt = prompt_of(api)
    assert '<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}' in prompt
    assert "<|im_start|>tool\n18<|im_end|>" in prompt


@pytest.mark.parametrize("content", [None, "I look."])
def test_a_message_of_calls_cannot_be_continued(content):
    """The prompt would end before the calls, and they would be lost."""
    api = tool_api(says(ANSWER))
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    last = {"role": "assistant", "content": content, "tool_calls": [call]}
    messages = [{"role": "user", "content": "hi"}, last]
    refused = api.chat(messages=messages, continue_final_message=True)
    assert refused.status_code == 400
    error = error_of(refused)
    assert (error["param"], "tool_calls" in error["message"]) == ("continue_final_message", True)
    assert api.chat(messages=messages).status_code == 200


def test_tokenize_counts_the_tools():
    api = tool_api(says(ANSWER))
    messages = [{"role": "user", "content": "hi"}]
    assert api.chat(messages=messages, tools=[WEATHER]).status_code == 200
    tokens = api.post("/tokenize", messages=messages, tools=[WEATHER]).json()["tokens"]
    assert tokens == api.engine.asked[-1][0]


def named(name):
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"name": "f"}]}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tools": [named("")]}, "tools"),
        ({"tools": [named("a b")]}, "tools"),
        ({"tools": [named("<|im_end|>")]}, "tools"),
        ({"tools": [named("f"), named("f")]}, "tools"),
        ({"tools": [{"function": {"name": "f", "parameters": [1]}}]}, "tools"),
        ({"tools": [{"function": {"name": "f", "strict": "true"}}]}, "tools"),
        ({"tools": [named(f"f{i}") for i in range(513)]}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": OTHER}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto")}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("none", WEATHER)}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto", OTHER)}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": allowed("auto", WEATHER, "x")}, "tool_choice"),
        ({"tool_choice": allowed("auto", WEATHER)}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "required", "continue_final_message": True},
         "tool_choice"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_tool_is_refused_and_named(fields, param):
    api = tool_api(says(ANSWER))
    response = api.chat(**fields)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"] == param
    assert api.engine.asked == []
    assert api.chat().status_code == 200


def test_a_model_whose_template_does_not_show_how_to_call_tools_is_told():
    source = "{{ tools }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    api = tool_api(says(CALL), source=source)
    for choice in ("auto", "required"):
        assert api.chat(tools=[WEATHER], tool_choice=choice).status_code == 200
        assert prompt_of(api).count("Tell the weather.") == 1
        assert '<tool_call>\n{"name": "name_of_function"' in prompt_of(api)
        assert api.engine.asked[-1][1].structured_outputs.role == "tools"
    assert api.chat(tools=[WEATHER]).json()["choices"][0]["finish_reason"] == "tool_calls"


def test_a_server_without_a_format_of_calls_refuses_tools_with_what_to_do():
    api = tool_api(says("x"))
    api.context.learned_format = learn_format(template(), calls="none")
    error = error_of(api.chat(tools=[WEATHER]))
    assert (error["code"], error["param"]) == ("unsupported_parameter", "tools")
    assert "--tool-call-parser" in error["message"]


def test_a_model_whose_template_has_no_tools_calls_them_under_a_grammar():
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    api = tool_api(says(f"I look.\n{CALL}"), source=source)
    told = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
    choice = api.chat(tools=[WEATHER]).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert "[system]You can call the functions" in prompt_of(api)
    assert '"description": "Tell the weather."' in prompt_of(api)
    form = api.engine.asked[-1][1].structured_outputs
    assert form.role == "tools"
    assert '"weather"' in form.calls
    api.chat(messages=[*HI, choice["message"], told], tools=[WEATHER])
    assert f"I look.\n{CALL}[tool]sunny" in prompt_of(api)
    assert api.chat(tools=[WEATHER], tool_choice="none").status_code == 200
    assert "Tell the weather" not in prompt_of(api)


def test_a_marker_that_is_a_special_token_is_seen(monkeypatch):
    """Some tokenizers call the markers special, and answers leave out the text of such tokens."""
    api = tool_api(says("x"))
    tokens = api.context.tokenizer
    opening, closing = 510, 511
    texts = {opening: "<tool_call>", closing: "</tool_call>"}
    real = type(tokens).token_bytes

    def token_bytes(self, token):
        return texts[token].encode() if token in texts else real(self, token)

    monkeypatch.setattr(type(tokens), "token_bytes", token_bytes)
    monkeypatch.setattr(type(tokens), "token_text", lambda self, i: texts.get(i, ""))
    monkeypatch.setattr(tokens, "special_ids", tokens.special_ids | {opening, closing})
    api.context.set_ready(tokens, api.context.chat_template)

    def script(engine, number, prompt, params):
        body = tokens.encode('{"name": "weather", "arguments": {}}', add_special_tokens=False)
        yield Output(number, [opening, *body, closing], "length")

    api.engine.script = script
    message = api.chat(tools=[WEATHER]).json()["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {}
    assert api.chat().json()["choices"][0]["message"]["content"].startswith("{")


LLAMA3 = """{% if tools %}Respond in the format {"name": function name, \
"parameters": dictionary of argument name and its value}.
{{ tools | tojson }}{% endif %}{{ messages[-1].content }}"""


@pytest.mark.parametrize("stream", [False, True])
def test_llama_3_calls_with_an_object_alone(stream):
    call = '{"name": "weather", "parameters": {"city": "Paris"}}'
    api = tool_api(says(call), source=LLAMA3)
    answer = api.chat(tools=[WEATHER], stream=stream)
    if stream:
        chunks = [chunk["choices"][0] for chunk in events_of(answer)]
        calls = calls_of([chunk["delta"] for chunk in chunks])
        assert chunks[-1]["finish_reason"] == "tool_calls"
    else:
        choice = answer.json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
        calls = [c["function"] for c in choice["message"]["tool_calls"]]
    assert [(c["name"], c["arguments"]) for c in calls] == [("weather", '{"city": "Paris"}')]


CODER = """{% if tools %}<tool_call> <function=x> <parameter=y> {{ tools | tojson }}{% endif %}
{{ messages[-1].content }}"""


@pytest.mark.parametrize("per_output", [1, 1000])
def test_types_of_arguments_come_from_the_tools_of_the_request(per_output):
    number = {"city": {"type": "string"}, "days": {"type": "integer"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": number}}}
    values = "<parameter=city>\n7\n</parameter>\n<parameter=days>\n7\n</parameter>"
    call = f"<tool_call>\n<function=f>\n{values}\n</function>\n</tool_call>"
    api = tool_api(says(f"So:\n{call}", per_output), source=CODER)
    message = api.chat(tools=[tool]).json()["choices"][0]["message"]
    assert message["content"] == "So:"  # the line break is written before calls of earlier turns
    assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "7", "days": 7}'
