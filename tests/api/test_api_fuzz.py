"""Randomly changed responses through every dialect: no fault, and a stream says the same."""

import json

import pytest

from tests.api.fakes import events_of
from tests.api.tools import TEMPLATE, WEATHER, says, tool_api
from tests.helpers.call_templates import GPT_OSS
from tests.helpers.depth import deep_but
from tests.helpers.family_templates import template
from tests.helpers.fuzzed_answers import changed
from tests.helpers.turn_templates import TURNS

HI = [{"role": "user", "content": "hi"}]
CITY = '{"city": "Paris"}'
# Templates, and a response as their models write it.
MODELS = {
    "hermes": (
        TEMPLATE + "{# <think> #}",
        f'<think>\nHm.\n</think>\n\nI look\n<tool_call>\n{{"name": "weather", "arguments": {CITY}}}'
        "\n</tool_call>",
    ),
    "harmony": (
        GPT_OSS,
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.weather json<|message|>{CITY}<|call|>",
    ),
    "tags": (
        template("GLM 4.5"),
        "I look<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "</tool_call>",
    ),
    "python": (
        template("LFM2"),
        "<|tool_call_start|>[weather(city='Paris')]<|tool_call_end|>So",
    ),
    "headers": (TURNS["Functionary 3.2"][0], f"all\nI look>>>weather\n{CITY}"),
    "nested tags": (
        template("plain tags"),
        '<calls><invoke name="weather"><city>Paris</city></invoke>\n</calls>',
    ),
}


def chat(api, stream):
    """(thought, text, calls) of a chat completion."""
    response = api.chat(messages=HI, tools=[WEATHER], stream=stream)
    assert response.status_code == 200
    if not stream:
        message = response.json()["choices"][0]["message"]
        calls = [c["function"] for c in message.get("tool_calls") or []]
        named = [(call["name"], call["arguments"]) for call in calls]
        return message.get("reasoning_content") or "", message["content"] or "", named
    thought, text, calls = "", "", []
    for event in events_of(response):
        for choice in event["choices"]:
            delta = choice["delta"]
            thought += delta.get("reasoning_content") or ""
            text += delta.get("content") or ""
            for part in delta.get("tool_calls") or []:
                if part["index"] == len(calls):
                    calls.append((part["function"]["name"], ""))
                name, arguments = calls[part["index"]]
                calls[part["index"]] = name, arguments + part["function"].get("arguments", "")
    return thought, text, calls


def responses(api, stream):
    """(thoughts, texts, calls) of a response; the last event of a stream has the whole response."""
    fields = {"input": "hi", "tools": [{"type": "function", **WEATHER["function"]}]}
    response = api.post("/v1/responses", stream=stream, **fields)
    assert response.status_code == 200
    body, said = None, {"reasoning_text": "", "output_text": "", "function_call_arguments": ""}
    if stream:
        lines = [json.loads(line[6:]) for line in response.text.split("\n") if line[:5] == "data:"]
        for line in lines:
            kind = line["type"].removeprefix("response.").removesuffix(".delta")
            if line["type"].endswith(".delta") and kind in said:
                said[kind] += line["delta"]
        assert lines[-1]["type"] in ("response.completed", "response.incomplete")
        body = lines[-1]["response"]
    else:
        body = response.json()
    items = body["output"]
    parts = [(i["type"], p["text"]) for i in items for p in i.get("content") or []]
    thought = "".join(text for kind, text in parts if kind == "reasoning")
    text = "".join(text for kind, text in parts if kind == "message")
    calls = [(i["name"], i["arguments"]) for i in items if i["type"] == "function_call"]
    if stream:
        assert said["reasoning_text"] == thought
        assert said["output_text"] == text
        assert said["function_call_arguments"] == "".join(arguments for _, arguments in calls)
    return thought, text, calls


def read(arguments):
    """The arguments of a call; {} if the call was cut."""
    try:
        found = json.loads(arguments)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def messages(api, stream):
    """(thoughts, texts, calls) of a message."""
    function = WEATHER["function"]
    tool = {"name": function["name"], "input_schema": function["parameters"]}
    fields = {"messages": HI, "max_tokens": 1000, "model": "tiny", "tools": [tool]}
    response = api.post("/v1/messages", stream=stream, **fields)
    assert response.status_code == 200
    if not stream:
        blocks = response.json()["content"]
    else:
        lines = [json.loads(line[6:]) for line in response.text.split("\n") if line[:5] == "data:"]
        assert lines[-1]["type"] == "message_stop"
        blocks, written = [], {}
        for line in lines:
            if line["type"] == "content_block_start":
                blocks.append(line["content_block"])
                assert line["index"] == len(blocks) - 1
            elif line["type"] == "content_block_delta":
                block, delta = blocks[line["index"]], line["delta"]
                for key in ("text", "thinking"):
                    if key in delta:
                        block[key] += delta[key]
                if "partial_json" in delta:
                    written.setdefault(line["index"], []).append(delta["partial_json"])
        for index, parts in written.items():
            blocks[index]["input"] = read("".join(parts))
    thought = "".join(block.get("thinking", "") for block in blocks)
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    used = [block for block in blocks if block["type"] == "tool_use"]
    return thought, text, [(block["name"], block["input"]) for block in used]


def ollama(api, stream):
    """(thought, text, calls) of a response in the dialect of Ollama."""
    response = api.post("/api/chat", messages=HI, model="tiny", tools=[WEATHER], stream=stream)
    assert response.status_code == 200
    told = [json.loads(line)["message"] for line in response.text.split("\n") if line]
    thought = "".join(message.get("thinking", "") for message in told)
    calls = [call["function"] for message in told for call in message.get("tool_calls") or []]
    named = [(call["name"], call["arguments"]) for call in calls]
    return thought, "".join(message["content"] for message in told), named


DIALECTS = {"chat": chat, "responses": responses, "messages": messages, "ollama": ollama}


@pytest.mark.matrix
@pytest.mark.parametrize("model", deep_but([*MODELS][:3], MODELS))
@pytest.mark.parametrize(
    "ask", deep_but([DIALECTS["chat"], DIALECTS["messages"]], DIALECTS.values()), ids=DIALECTS
)
def test_a_changed_response_is_no_fault_and_a_stream_says_the_same(model, ask):
    source, written = MODELS[model]
    thought, text, calls = ask(tool_api(says(written), source=source), stream=False)
    assert [name for name, _ in calls] == ["weather"], (thought, text)
    for number in range(4):
        wild = changed(written, f"{model} {number}")[:1500]
        if not wild:
            continue
        whole = ask(tool_api(says(wild, 1000), source=source), stream=False)
        for per_output in (1, 4):
            api = tool_api(says(wild, per_output), source=source)
            assert ask(api, stream=True) == whole, wild
