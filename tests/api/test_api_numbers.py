"""NaN, Infinity and 1e400, in calls that models write and in histories that clients send."""

import json

import pytest

from tests.api.fakes import events_of, named_events_of
from tests.api.tools import WEATHER, prompt_of, says, tool_api

ARGUMENTS = '{"city": NaN, "at": [-Infinity, 1e400, 2.5]}'
CLEAN = {"city": None, "at": [None, None, 2.5]}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
ASK = {"messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}


def strict(text):
    """JSON as clients in other languages read it."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(name))


@pytest.mark.parametrize("per_output", [1, 3, 1000])
def test_messages_have_the_same_numbers_whole_and_streamed(per_output):
    api = tool_api(says(CALL, per_output))
    asked = {**ASK, "max_tokens": 500, "tools": [TOOL]}
    (block,) = strict(api.post("/v1/messages", **asked).text)["content"]
    assert block["input"] == CLEAN
    events = named_events_of(api.post("/v1/messages", **asked, stream=True))
    deltas = [event["delta"].get("partial_json", "") for event in events if "delta" in event]
    assert strict("".join(deltas)) == CLEAN


@pytest.mark.parametrize("per_output", [1, 1000])
def test_chats_and_responses_have_them_too(per_output):
    api = tool_api(says(CALL, per_output))
    (call,) = api.chat(tools=[WEATHER]).json()["choices"][0]["message"]["tool_calls"]
    assert strict(call["function"]["arguments"]) == CLEAN
    chunks = events_of(api.chat(tools=[WEATHER], stream=True))
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls") or []]
    assert strict("".join(c["function"].get("arguments", "") for c in calls)) == CLEAN
    tool = {"type": "function", **WEATHER["function"]}
    (item,) = api.post("/v1/responses", input="hi", tools=[tool]).json()["output"]
    assert strict(item["arguments"]) == CLEAN
    answer = api.post("/api/chat", model="tiny", **ASK, tools=[WEATHER], stream=False)
    (call,) = strict(answer.text)["message"]["tool_calls"]
    assert call["function"]["arguments"] == CLEAN


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.dumps(CLEAN)])
def test_a_history_reaches_the_template_as_json(arguments):
    api = tool_api(says("ok"))
    function = {"name": "weather", "arguments": arguments}
    messages = [
        *ASK["messages"],
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "sunny"},
    ]
    assert api.chat(messages=messages, tools=[WEATHER]).status_code == 200
    assert '"arguments": {"city": null, "at": [null, null, 2.5]}' in prompt_of(api)
    items = [
        *ASK["messages"],
        {"type": "function_call", "call_id": "c", **function},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
    ]
    assert api.post("/v1/responses", input=items).status_code == 200
    assert '"arguments": {"city": null, "at": [null, null, 2.5]}' in prompt_of(api)
