"""Tools of Anthropic's messages: definitions, calls, results and choices."""

import typing

import pytest
from anthropic.types import beta

from cpuserve.api.anthropic.tools import client_tool
from tests.api.anthropic_messages import (
    DOCUMENT,
    FOUND,
    HI,
    SEARCH,
    WEATHER,
    ask,
    error_of,
    events_of,
    folded,
    use,
)
from tests.api.fakes import ANSWER
from tests.api.tools import CALL, prompt_of, says, tool_api


def test_results_of_tools_may_have_documents_and_search_results():
    api = tool_api(says("Blue."))
    call = {"role": "assistant", "content": [use("t1")]}
    given = {"type": "tool_result", "tool_use_id": "t1", "content": [FOUND, DOCUMENT]}
    messages = [*HI, call, {"role": "user", "content": [given]}]
    assert ask(api, messages=messages, tools=[WEATHER]).status_code == 200
    told = "Sky\nhttps://sky.example\nIt is\nblue.\nGrass\nA school book.\nGrass is\ngreen."
    assert f"<|im_start|>tool\n{told}<|im_end|>" in prompt_of(api)


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
    """Claude Code searches the web by such a request, and reads the text of the response."""
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
