"""Anthropic's messages: answers, streams, tools, counts and errors in that dialect."""

import json
import typing
from datetime import datetime

import pytest
from anthropic.types import beta

from cpuserve.api.anthropic.client_tools import client_tool
from cpuserve.engine.ipc import Output
from cpuserve.errors import EngineDead
from cpuserve.serving.limits import ClientLimits
from tests.api.fakes import ANSWER, Api, named_events_of, speak, tokenizer
from tests.api.tools import CALL, prompt_of, says, tool_api

HI = [{"role": "user", "content": "hi"}]
WEATHER = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
FORM = {"type": "json_schema", "schema": WEATHER["input_schema"]}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
IMAGE = {"role": "user", "content": [{"type": "image"}]}


def ask(api, messages=HI, max_tokens=64, path="/v1/messages", **fields):
    return api.post(path, model="tiny", messages=messages, max_tokens=max_tokens, **fields)


def events_of(response):
    """The (event, data) of a stream."""
    return [(body["type"], body) for body in named_events_of(response)]


def folded(events):
    """The message that the events of a stream make together, as Anthropic's clients build it."""
    message, parts = None, []
    for name, body in events:
        if name == "message_start":
            assert message is None
            message = body["message"]
            assert (message["content"], message["stop_reason"]) == ([], None)
        elif name == "content_block_start":
            assert body["index"] == len(message["content"]) == len(parts)
            message["content"].append(body["content_block"])
            parts.append("")
        elif name == "content_block_delta":
            assert body["index"] == len(parts) - 1
            delta = body["delta"]
            is_text = delta["type"] == "text_delta"
            parts[-1] += delta["text"] if is_text else delta["partial_json"]
        elif name == "content_block_stop":
            block = message["content"][body["index"]]
            key = "text" if block["type"] == "text" else "input"
            block[key] = parts[-1] if key == "text" else json.loads(parts[-1] or "{}")
        elif name == "message_delta":
            message |= body["delta"]
            message["usage"] |= body["usage"]
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    return message


def test_an_answer_is_a_message():
    asked = {"messages": HI, "max_tokens": 64, "model": "alias"}
    headers = {"x-request-id": "r1", "anthropic-version": "2023-06-01"}
    response = Api().request("POST", "/v1/messages", json=asked, headers=headers)
    assert response.headers["request-id"] == response.headers["x-request-id"] == "r1"
    body = response.json()
    count = len(tokenizer().encode(ANSWER, add_special_tokens=False)) + 1
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert body["usage"].pop("input_tokens") > 5
    assert body == {
        "id": "msg_r1",
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


PLAIN = {"type": "text", "media_type": "text/plain", "data": "Grass is\ngreen."}
DOCUMENT = {"type": "document", "source": PLAIN, "title": "Grass", "context": "A school book.",
            "citations": {"enabled": True}, "cache_control": {"type": "ephemeral"}}  # fmt: skip
FOUND = {"type": "search_result", "source": "https://sky.example", "title": "Sky",
         "content": [{"type": "text", "text": "It is"},
                     {"type": "text", "text": "blue."}]}  # fmt: skip


def test_documents_and_search_results_are_text_for_the_model():
    question = {"type": "text", "text": "Which colour?"}
    api = tool_api(says("Green."))
    bare = {"type": "document", "source": PLAIN, "title": None}
    ask(api, messages=[{"role": "user", "content": [DOCUMENT, FOUND, bare, question]}])
    lines = ["Grass", "A school book.", PLAIN["data"], "Sky", FOUND["source"], "It is", "blue.",
             PLAIN["data"], "Which colour?"]  # fmt: skip
    text = "\n".join(lines)
    assert f"<|im_start|>user\n{text}<|im_end|>" in prompt_of(api)


def test_results_of_tools_may_have_documents_and_search_results():
    api = tool_api(says("Blue."))
    call = {"role": "assistant", "content": [use("t1")]}
    given = {"type": "tool_result", "tool_use_id": "t1", "content": [FOUND, DOCUMENT]}
    messages = [*HI, call, {"role": "user", "content": [given]}]
    assert ask(api, messages=messages, tools=[WEATHER]).status_code == 200
    told = "Sky\nhttps://sky.example\nIt is\nblue.\nGrass\nA school book.\nGrass is\ngreen."
    assert f"<|im_start|>tool\n{told}<|im_end|>" in prompt_of(api)


def test_a_last_message_of_the_assistant_is_continued():
    api = Api()
    ask(api, messages=[*HI, {"role": "assistant", "content": "I am"}])
    assert prompt_of(api).endswith("<|im_start|>assistant\nI am")


def test_a_call_is_a_block_of_its_own():
    api = tool_api(says(f"I look.\n{CALL}{CALL}", per_output=2))
    whole = ask(api, tools=[WEATHER]).json()
    text, *calls = whole["content"]
    assert text == {"type": "text", "text": "I look."}
    assert len({call["id"] for call in calls}) == 2
    for call in calls:
        assert (call["type"], call["name"]) == ("tool_use", "weather")
        assert call["input"] == {"city": "Paris"}
    assert whole["stop_reason"] == "tool_use"
    streamed = folded(events_of(ask(api, tools=[WEATHER], stream=True)))
    for message in (streamed, whole):
        for thing in (message, *message["content"][1:]):
            del thing["id"]
    assert streamed == whole


def test_text_after_a_call_is_a_block_after_it():
    api = tool_api(says(f"I look.\n{CALL}\nThen I{CALL}tell."))
    whole = ask(api, tools=[WEATHER]).json()["content"]
    assert [block.get("text") for block in whole] == ["I look.", None, "\nThen I", None, "\ntell."]
    streamed = folded(events_of(ask(api, tools=[WEATHER], stream=True)))["content"]
    for block in (*whole, *streamed):
        block.pop("id", None)
    assert streamed == whole


def test_a_call_that_is_cut_short_has_no_input():
    api = tool_api(says(CALL.partition("Par")[0], finish="length"))
    body = ask(api, tools=[WEATHER]).json()
    assert body["content"][0]["input"] == {}
    assert body["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "told"),
    [({"stop_sequences": ["ari"]}, ("stop_sequence", "ari")), ({}, ("end_turn", None))],
    ids=["sequence", "end of turn"],
)
def test_a_call_that_is_cut_short_is_no_reason_to_use_a_tool(stream, fields, told):
    api = tool_api(says(CALL.partition('s"}')[0]))
    response = ask(api, tools=[WEATHER], stream=stream, **fields)
    if stream:
        body = events_of(response)[-2][1]["delta"]
    else:
        body = response.json()
        assert body["content"][0]["input"] == {}
    assert (body["stop_reason"], body["stop_sequence"]) == told


def test_tools_make_the_prompt_that_chat_completions_make():
    api = tool_api(says(ANSWER))
    ask(api, tools=[WEATHER])
    shown = {"name": "weather", "description": WEATHER["description"]}
    function = {**shown, "parameters": WEATHER["input_schema"]}
    api.chat(tools=[{"type": "function", "function": function}])
    assert api.engine.asked[0][0] == api.engine.asked[1][0]


def test_results_of_tools_become_messages_of_tools():
    api = tool_api(says("18 degrees."))
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    answer = [{"type": "text", "text": "18"}]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": answer}
    messages = [
        {"role": "user", "content": "How warm?"},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    assert ask(api, messages=messages, tools=[WEATHER]).status_code == 200
    prompt = prompt_of(api)
    assert "hm" not in prompt
    assert 'I look.\n<tool_call>{"name": "weather", "arguments": {"city": "Paris"}}' in prompt
    end = "<|im_start|>tool\n18<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>\n"
    assert prompt.endswith(f"{end}<|im_start|>assistant\n")


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
    assert api.engine.asked[-1][1].structured_outputs.field == "tools"


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


def use(number):
    return {"type": "tool_use", "id": number, "name": "weather", "input": {"city": "Paris"}}


def by(role, *blocks):
    return {"role": role, "content": [*blocks, {"type": "text", "text": "so"}]}


def result(number):
    return {"type": "tool_result", "tool_use_id": number, "content": "18"}


@pytest.mark.parametrize(
    ("messages", "where", "number"),
    [
        ([by("assistant", use("t1"))], "messages.1.content.0", "t1"),
        ([by("assistant", use("t1")), by("user")], "messages.1.content.0", "t1"),
        ([by("assistant", use("t1")), by("user"), by("assistant"), by("user", result("t1"))],
         "messages.1.content.0", "t1"),
        ([by("assistant", use("t1"), use("t2")), by("user", result("t1"))],
         "messages.1.content.1", "t2"),
        ([by("user", result("t1"))], "messages.1.content.0", "t1"),
        ([by("assistant", use("t1")), by("user", result("t2"))], "messages.2.content.0", "t2"),
        ([by("user", result("t1")), by("assistant", use("t1")), by("user", result("t1"))],
         "messages.1.content.0", "t1"),
    ],
    ids=["last", "no result", "late result", "one of two", "no use", "another id", "early result"],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_use_of_a_tool_without_its_result_is_refused(messages, where, number, path):
    response = ask(tool_api(says(ANSWER)), messages=HI + messages, tools=[WEATHER], path=path)
    assert response.status_code == 400, response.text
    message = error_of(response)["message"]
    assert message.startswith(where)
    assert number in message
    assert "tool_use" in message


def test_results_of_several_tools_may_be_in_messages_in_a_row():
    turn = [by("assistant", use("t1"), use("t2")), by("user", result("t2")),
            by("user", result("t1"))]  # fmt: skip
    api = tool_api(says(ANSWER))
    assert ask(api, messages=HI + turn + turn, tools=[WEATHER]).status_code == 200


def words_of(annotation):
    """The words of a Literal in the annotation of a field."""
    return {word for part in (annotation, *typing.get_args(annotation))
            for word in typing.get_args(part) if isinstance(word, str)}  # fmt: skip


DEFINED = [kind for kind in typing.get_args(beta.BetaToolUnionParam)
           if "input_schema" not in typing.get_type_hints(kind)]  # fmt: skip
RUN_BY_CLIENTS = ("bash_", "text_editor_", "memory_")


@pytest.mark.parametrize("kind", DEFINED, ids=lambda kind: kind.__name__)
def test_tools_that_anthropic_defines_are_functions_if_clients_run_them(kind):
    hints = typing.get_type_hints(kind)
    name = "".join(words_of(hints["name"])) if "name" in hints else "none"
    for word in words_of(hints["type"]):
        api = tool_api(says("Hi"))
        assert ask(api, tools=[{"type": word, "name": name}, WEATHER]).status_code == 200, word
        is_function = word.startswith(RUN_BY_CLIENTS)
        assert (f'"name": "{name}", "description"' in prompt_of(api)) == is_function
        assert '"name": "weather"' in prompt_of(api)


def test_the_memory_tool_has_the_parameters_of_anthropics_client():
    union = typing.get_args(typing.get_args(beta.BetaMemoryTool20250818Command)[0])
    wanted = {
        word: set(part.model_fields)
        for part in union
        for word in typing.get_args(part.model_fields["command"].annotation)
    }
    parameters = client_tool("memory_20250818")["parameters"]
    properties = parameters["properties"]
    assert set(properties["command"]["enum"]) == set(wanted)
    assert len(wanted) > 3
    assert set(properties) == set().union(*wanted.values())


@pytest.mark.parametrize(
    ("kind", "name", "names", "inserted"),
    [
        ("text_editor_20241022", "str_replace_editor", 5, "new_str"),
        ("text_editor_20250124", "str_replace_editor", 5, "new_str"),
        ("text_editor_20250429", "str_replace_based_edit_tool", 4, "insert_text"),
        ("text_editor_20250728", "str_replace_based_edit_tool", 4, "insert_text"),
    ],
)
def test_the_text_editor_is_that_of_its_date(kind, name, names, inserted):
    tool = client_tool(kind)
    properties = tool["parameters"]["properties"]
    assert tool["name"] == name
    assert len(properties["command"]["enum"]) == names
    assert ("undo_edit" in properties["command"]["enum"]) == (names == 5)
    assert ("insert_text" in properties) == (inserted == "insert_text")


@pytest.mark.parametrize("strict", [False, True])
def test_a_defined_tool_may_be_forced_and_strict(strict):
    given = {"strict": True} if strict else {}
    api = tool_api(says(' {"command": "ls"}}'))
    choice = {"type": "tool", "name": "bash"}
    tool = {"type": "bash_20250124", "name": "bash", **given}
    body = ask(api, tools=[tool], tool_choice=choice).json()
    assert body["content"][0]["input"] == {"command": "ls"}
    assert body["stop_reason"] == "tool_use"


def test_a_request_with_only_tools_of_anthropic_is_told_so():
    """Claude Code searches the web by such a request, and reads the text of the answer."""
    api = tool_api(says("There is no search here."))
    auto = {"type": "auto"}
    assert ask(api, tools=[SEARCH], tool_choice=auto, system="Search.").status_code == 200
    told = "These tools are not available here: web_search. Say so instead of guessing."
    assert prompt_of(api).startswith(f"<|im_start|>system\nSearch.\n{told}<|im_end|>")
    assert ask(api, tools=[SEARCH], tool_choice={"type": "none"}).status_code == 200
    assert "web_search" not in prompt_of(api)


@pytest.mark.parametrize(
    ("choice", "end"),
    [
        ({"type": "any"}, '<tool_call>\n{"name": "'),
        ({"type": "tool", "name": "weather"}, '<tool_call>\n{"name": "weather", "arguments":'),
        ({"type": "auto", "disable_parallel_tool_use": True}, "<|im_start|>assistant\n"),
    ],
    ids=lambda value: value["type"] if isinstance(value, dict) else "",
)
def test_the_choice_of_a_tool_is_that_of_chat_completions(choice, end):
    first = {"any": 'weather", "arguments": {"a": 1}}', "tool": ' {"a": 1}}'}
    api = tool_api(says(first.get(choice["type"], CALL) + CALL))
    body = ask(api, tools=[WEATHER], tool_choice=choice).json()
    assert prompt_of(api).endswith(end)
    assert body["content"][0]["name"] == "weather"
    assert body["stop_reason"] == "tool_use"
    assert len(body["content"]) == (2 if choice["type"] == "any" else 1)


def test_count_tokens_counts_the_prompt_of_the_message():
    api = tool_api(says(ANSWER))
    counted = ask(api, tools=[WEATHER], system="Be kind.", path="/v1/messages/count_tokens")
    message = ask(api, tools=[WEATHER], system="Be kind.").json()
    assert counted.json() == {"input_tokens": message["usage"]["input_tokens"]}


def error_of(response):
    body = response.json()
    assert list(body) == ["type", "error", "request_id"], body
    assert body["request_id"] == response.headers["request-id"]
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return body["error"]


def sent(block):
    """The fields of a request with this block."""
    return {"messages": [{"role": "user", "content": [block]}]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages.0.content.0"),
        ({"messages": [IMAGE]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use"}]}]}, "an id"),
        (sent({**DOCUMENT, "source": {"type": "base64", "media_type": "application/pdf"}}),
         "messages.0.content.0.source has type 'base64', which is not supported: send its text as"),
        (sent({**DOCUMENT, "source": {"type": "url", "url": "http://x"}}), "has type 'url'"),
        (sent({**DOCUMENT, "source": {**PLAIN, "media_type": "text/html"}}), "must be text/plain"),
        (sent({**DOCUMENT, "source": {**PLAIN, "data": 1}}), "content.0.source must have its data"),
        (sent({**DOCUMENT, "source": "a"}), "messages.0.content.0.source"),
        (sent({**DOCUMENT, "title": 1}), "must have its title as a string"),
        (sent({"type": "document"}), "messages.0.content.0.source"),
        (sent({**FOUND, "title": None}), "must have its title as a string"),
        (sent({**FOUND, "content": [{"type": "image"}]}), "0.content.0.content.0 has type"),
        (sent({**FOUND, "content": None}), "messages.0.content.0.content"),
        ({"system": [DOCUMENT]}, "system.0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0: prompts cannot be cached"),
        ({"max_tokens": -1}, "max_tokens must be at least 1, got -1"),
        ({"max_tokens": None}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"system": [{"type": "image"}]}, "system.0"),
        ({"thinking": {"type": "always"}}, "thinking.type must be enabled, disabled, adaptive or"),
        ({"tools": [{"type": "costum", "name": "bash"}]}, "tools.0.type must be custom"),
        ({"tools": [SEARCH], "tool_choice": {"type": "any"}}, "this server cannot run web_search"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name must have"),
        ({"tools": [{"name": "a", "input_schema": [1]}]}, "tools.0.input_schema must be"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": []}}, "tool_choice must be"),
        ({"tool_choice": {"type": "auto", "name": 1}}, "tool_choice must be"),
        ({"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}, "mcp_servers"),
        ({"container": "c1"}, "container"),
        ({"output_config": "json"}, "output_config"),
        ({"output_config": {"effort": "extreme"}}, "output_config.effort"),
        ({"output_config": {"effort": 1}}, "output_config.effort"),
        ({"output_config": {"format": "json"}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "regex"}}}, "output_config.format has type 'regex'"),
        ({"output_config": {"format": {"schema": {}}}}, "output_config.format"),
        ({"output_format": {"type": "json_object"}}, "output_format has type 'json_object'"),
        ({"output_format": FORM, "output_config": {"format": FORM}}, "output_config.format"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_request_is_refused_in_this_dialect(fields, named):
    api = Api()
    response = ask(api, **fields)
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]
    assert ask(api).status_code == 200


@pytest.mark.parametrize(
    ("status", "kind", "change"),
    [
        (401, "authentication_error", {"key": None}),
        (401, "authentication_error", {"key": "other"}),
        (404, "not_found_error", {"path": "/v1/messages/batches"}),
        (404, "not_found_error", {"model": "other"}),
        (405, "invalid_request_error", {"method": "GET"}),
        (413, "request_too_large", {"content": "x" * 6000}),
        (429, "rate_limit_error", {"queued": 2}),
        (503, "overloaded_error", {"ready": False}),
        (500, "api_error", {"script": ZeroDivisionError("secret")}),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_other_errors_have_this_dialects_format_too(status, kind, change):
    def raising(engine, number, prompt, params):
        yield change["script"]

    limits = ClientLimits(max_body_bytes=4096, max_queued_requests=2)
    api = Api(raising if "script" in change else speak, http=limits, api_keys=("k",))
    api.context.ready = change.get("ready", True)
    for _ in range(change.get("queued", 0)):
        api.context.backlog.enter(1)
    key = change.get("key", "k")
    headers = {"x-api-key": key} if key else {}
    messages = [{"role": "user", "content": change.get("content", "hi")}]
    body = {"messages": messages, "max_tokens": 5, "model": change.get("model", "tiny")}
    path, method = change.get("path", "/v1/messages"), change.get("method", "POST")
    response = api.request(method, path, json=body, headers=headers)
    assert response.status_code == status, response.text
    error = error_of(response)
    assert error["type"] == kind
    assert "secret" not in error["message"]


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


def test_the_other_routes_keep_openais_errors():
    for path in ("/v1/chat/completions", "/v1/messagesx"):
        response = Api().post(path)
        assert set(response.json()) == {"error"}
        assert "request-id" not in response.headers


def test_a_failure_in_the_middle_ends_the_stream_with_an_error():
    def fails(engine, number, prompt, params):
        yield Output(number, [40])
        yield EngineDead("the engine was killed by SIGKILL")

    response = ask(Api(fails), stream=True)
    events = events_of(response)
    told = {"type": "overloaded_error", "message": "the engine was killed by SIGKILL"}
    number = response.headers["request-id"]
    assert events[-1] == ("error", {"type": "error", "error": told, "request_id": number})
    assert "message_stop" not in [name for name, _ in events]
