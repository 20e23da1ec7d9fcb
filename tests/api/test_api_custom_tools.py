"""Custom tools of OpenAI, in chat completions and responses: calls, histories, choices, errors."""

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.api.fakes import ANSWER, error_of, events_of
from tests.api.openai_responses import HI, NESTED, SEARCH, WEATHER, ask
from tests.api.openai_responses import events_of as named_events
from tests.api.test_api_responses import folded, without_ids
from tests.api.tools import CALL, prompt_of, says, tool_api
from tests.helpers.call_templates import GPT_OSS

TEXT = '*** Begin Patch\n+say("hi\\n")\n*** End Patch'
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: "a" /[^"]+/\n'}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edit files.", "format": GRAMMAR}
FREE = {"type": "custom", "name": "run"}
EVENT = TypeAdapter(ResponseStreamEvent)


def in_chat(tool):
    """The same tool for chat completions."""
    inner = {name: value for name, value in tool.items() if name != "type"}
    if "format" in inner:
        form = {name: value for name, value in inner["format"].items() if name != "type"}
        inner["format"] = {"type": "grammar", "grammar": form}
    return {"type": "custom", "custom": inner}


def called(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CUSTOM_CALL = called("apply_patch", input=TEXT)


@pytest.mark.parametrize("per_output", [1, 3, 1000])
def test_a_custom_call_is_an_item_of_a_response(per_output):
    api = tool_api(says(f"I edit.\n{CUSTOM_CALL}{CALL}", per_output))
    tools = [PATCH, WEATHER, SEARCH]
    whole = ask(api, tools=tools).json()
    Response.model_validate(whole, strict=True)
    text, custom, function = whole["output"]
    assert (text["type"], function["type"]) == ("message", "function_call")
    assert custom.pop("id").startswith("ctc_")
    number = custom.pop("call_id")
    assert custom == {"type": "custom_tool_call", "status": "completed", "name": "apply_patch",
                      "input": TEXT}  # fmt: skip
    assert number.startswith("call_")
    assert whole["tools"][0] == PATCH
    assert [tool["name"] for tool in whole["tools"]] == ["apply_patch", "weather"]

    events = named_events(ask(api, tools=tools, stream=True))
    for event in events:
        EVENT.validate_python(event)
    last = events[-1]["response"]
    assert folded(events) == last["output"]
    whole["output"][1] |= {"id": last["output"][1]["id"], "call_id": ""}
    last["output"][1]["call_id"] = ""
    assert without_ids(last) == without_ids(whole)
    deltas = [e["delta"] for e in events if e["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == TEXT
    assert (len(deltas) > 20) == (per_output == 1), "the text arrives in parts"


@pytest.mark.parametrize("per_output", [1, 3, 1000])
def test_a_custom_call_is_a_tool_call_of_a_chat_completion(per_output):
    api = tool_api(says(f"{CUSTOM_CALL}{CALL}", per_output))
    tools = [in_chat(PATCH), NESTED]
    whole = api.chat(tools=tools).json()
    ChatCompletion.model_validate(whole, strict=True)
    (choice,) = whole["choices"]
    custom, function = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert custom["custom"] == {"name": "apply_patch", "input": TEXT}
    assert (custom["type"], function["type"]) == ("custom", "function")
    assert set(custom) == {"id", "type", "custom"}

    calls = []
    for chunk in events_of(api.chat(tools=tools, stream=True)):
        ChatCompletionChunk.model_construct(**chunk)
        for part in chunk["choices"][0]["delta"].get("tool_calls", []):
            if "id" in part:
                assert part["index"] == len(calls)
                calls.append({"id": "", "type": part["type"], part["type"]: part[part["type"]]})
                continue
            kind, member = ("custom", "input") if "custom" in part else ("function", "arguments")
            calls[part["index"]][kind][member] += part[kind][member]
    assert calls == [{**custom, "id": ""}, {**function, "id": ""}]


def test_both_dialects_offer_the_same_functions():
    api = tool_api(says(ANSWER))
    assert ask(api, tools=[PATCH, FREE]).status_code == 200
    assert api.chat(tools=[in_chat(PATCH), in_chat(FREE)]).status_code == 200
    assert api.engine.asked[0] == api.engine.asked[1]
    prompt = prompt_of(api)
    for shown in (
        '"name": "apply_patch"',
        "Edit files.",
        "Lark grammar:",
        "[^",
        '"input"',
        '"run"',
    ):
        assert shown in prompt
    (_, params), _ = api.engine.asked
    assert '"definition": "start: \\"a\\" /[^\\"]+/\\n"' in params.structured_outputs.calls
    ask(api, tools=[FREE])
    assert api.engine.asked[-1][1].structured_outputs is None, "any text needs no grammar"
    counted = api.post("/tokenize", messages=[HI], tools=[in_chat(PATCH), in_chat(FREE)]).json()
    assert counted["count"] == len(api.engine.asked[1][0])


@pytest.mark.parametrize(
    ("choice", "in_chats"),
    [
        ({"type": "custom", "name": "run"}, {"type": "custom", "custom": {"name": "run"}}),
        ({"type": "allowed_tools", "mode": "required",
          "tools": [{"type": "custom", "name": "run"}]},
         {"type": "allowed_tools", "allowed_tools": {
             "mode": "required", "tools": [{"type": "custom", "custom": {"name": "run"}}]}}),
    ],
    ids=["named", "allowed"],
)  # fmt: skip
def test_a_custom_tool_may_be_forced(choice, in_chats):
    named = choice["type"] == "custom"
    api = tool_api(says(' {"input": "ls"}}' if named else 'run", "arguments": {"input": "ls"}}'))
    body = ask(api, tools=[PATCH, FREE], tool_choice=choice).json()
    assert [(item["type"], item["input"]) for item in body["output"]] == [
        ("custom_tool_call", "ls")
    ]
    assert body["tool_choice"] == choice
    end = '{"name": "run", "arguments":' if named else '{"name": "'
    assert prompt_of(api).endswith(end)
    whole = api.chat(tools=[in_chat(PATCH), in_chat(FREE)], tool_choice=in_chats).json()
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert call["custom"] == {"name": "run", "input": "ls"}
    assert api.engine.asked[0] == api.engine.asked[1]


def test_an_agent_edits_a_file_in_a_whole_loop():
    """Codex sends the items of a response back, with the output of the call."""
    space = {"type": "namespace", "name": "files", "description": "Files.", "tools": [FREE]}
    turns = iter([CUSTOM_CALL, called("files__run", input="ls"), "Done."])
    api = tool_api(lambda *of: says(next(turns))(*of))
    items = [{"type": "message", **HI}]
    for output in ("Success.", [{"type": "input_text", "text": "a.py"}], None):
        response = ask(api, items, tools=[PATCH, WEATHER, space, SEARCH], store=False)
        assert response.status_code == 200, response.text
        items += response.json()["output"]
        call = items[-1]
        if output is not None:
            items.append({"type": "custom_tool_call_output", "call_id": call["call_id"],
                          "output": output})  # fmt: skip
    assert items[-1]["content"][0]["text"] == "Done."
    assert (items[3]["name"], items[3]["namespace"]) == ("run", "files")
    prompt = prompt_of(api)
    assert json.dumps({"name": "apply_patch", "arguments": {"input": TEXT}}) in prompt
    assert '{"name": "files__run", "arguments": {"input": "ls"}}' in prompt
    assert prompt.index("Success.") < prompt.index("files__run", prompt.index("Success."))
    assert "a.py<|im_end|>" in prompt


@pytest.mark.parametrize("stream", [False, True])
def test_a_custom_call_that_is_cut_off_is_incomplete(stream):
    api = tool_api(says(CUSTOM_CALL.partition("say")[0], finish="length"))
    response = ask(api, tools=[PATCH], stream=stream)
    body = named_events(response)[-1]["response"] if stream else response.json()
    (item,) = body["output"]
    assert (item["input"], item["status"]) == ("*** Begin Patch\n+", "incomplete")
    assert body["status"] == "incomplete"


def test_a_call_of_a_custom_tool_in_a_history_of_chat_completions_is_rendered():
    api = tool_api(says(ANSWER))
    message = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "c1", "type": "custom", "custom": {"name": "run", "input": 'say "a"'}}]}  # fmt: skip
    result = {"role": "tool", "tool_call_id": "c1", "content": "a"}
    assert api.chat(messages=[HI, message, result], tools=[in_chat(FREE)]).status_code == 200
    assert json.dumps({"name": "run", "arguments": {"input": 'say "a"'}}) in prompt_of(api)


ON_CHANNEL = "<|channel|>commentary to=functions.apply_patch <|constrain|>json<|message|>"


@pytest.mark.parametrize(("finish", "told"), [("stop", "completed"), ("length", "incomplete")])
@pytest.mark.parametrize("stream", [False, True])
def test_gpt_oss_may_write_the_text_itself(finish, told, stream):
    api = tool_api(says(ON_CHANNEL + TEXT, finish=finish), source=GPT_OSS)
    response = ask(api, tools=[PATCH], stream=stream)
    body = named_events(response)[-1]["response"] if stream else response.json()
    (item,) = body["output"]
    assert (item["type"], item["input"], item["status"]) == ("custom_tool_call", TEXT, told)
    assert "raw_0: %text" in api.engine.asked[-1][1].structured_outputs.calls
    written = json.dumps({"input": TEXT})
    (item,) = ask(tool_api(says(ON_CHANNEL + written), source=GPT_OSS), tools=[PATCH]).json()[
        "output"
    ]
    assert item["input"] == TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_ends_the_response_if_calls_may_not_be_parallel(stream):
    api = tool_api(says(CUSTOM_CALL + CALL))
    response = ask(api, tools=[PATCH, WEATHER], parallel_tool_calls=False, stream=stream)
    body = named_events(response)[-1]["response"] if stream else response.json()
    assert [item["type"] for item in body["output"]] == ["custom_tool_call"]
    assert body["output"][0]["input"] == TEXT


BAD = [
    ({**FREE, "name": None}, "must be"),
    ({**FREE, "name": "a b"}, "name must have"),
    ({**FREE, "description": 1}, "description must be a string"),
    ({**FREE, "format": "text"}, "format must be"),
    ({**FREE, "format": {"type": "json"}}, "format must be"),
    ({**FREE, "format": {**GRAMMAR, "syntax": "gbnf"}}, "format must be"),
    ({**FREE, "format": {**GRAMMAR, "definition": ""}}, "format must be"),
    ({**FREE, "format": {**GRAMMAR, "definition": [1]}}, "format must be"),
    ({**FREE, "format": {**GRAMMAR, "definition": "a" * (1 << 18)}}, "characters: at most"),
]


@pytest.mark.parametrize(("tool", "why"), BAD)
def test_a_bad_custom_tool_is_refused(tool, why):
    api = tool_api(says(ANSWER))
    for response in (ask(api, tools=[WEATHER, tool]), api.chat(tools=[NESTED, in_chat_raw(tool)])):
        assert response.status_code == 400, response.text
        error = error_of(response)
        assert error["param"] == "tools"
        assert why in error["message"]
        assert "tools[1]" in error["message"] or "characters" in why
    assert not api.engine.asked


def in_chat_raw(tool):
    return {"type": "custom", "custom": {k: v for k, v in tool.items() if k != "type"}}


@pytest.mark.parametrize(
    ("tools", "choice", "why"),
    [
        ([FREE, FREE], "auto", "run twice"),
        ([FREE], {"type": "custom", "name": "other"}, "'other'"),
        ([FREE], {"type": "custom"}, "tool_choice must be"),
        ([FREE, SEARCH], {"type": "web_search"}, "cannot run tools of the type web_search"),
        ([SEARCH], "required", "cannot run tools of the type web_search"),
        ([FREE], {"type": "allowed_tools", "mode": "auto",
                  "tools": [{"type": "custom", "name": "other"}]}, "'other'"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_choice_of_a_custom_tool_is_refused(tools, choice, why):
    response = ask(tool_api(says(ANSWER)), tools=tools, tool_choice=choice)
    assert response.status_code == 400
    assert why in error_of(response)["message"]


def test_the_model_is_informed_of_tools_that_openai_runs_if_there_are_no_others():
    api = tool_api(says(ANSWER))
    assert ask(api, tools=[SEARCH], instructions="Be kind.").status_code == 200
    note = "These tools are not available here: web_search. Say so instead of guessing."
    assert prompt_of(api).startswith(f"<|im_start|>system\nBe kind.\n\n{note}<|im_end|>")
    body = ask(api, tools=[SEARCH, FREE]).json()
    assert note not in prompt_of(api)
    assert body["instructions"] is None
