"""Searches for tools that this server runs, in messages and responses, whole and in a stream."""

import json

import pytest
from anthropic.types.beta import BetaMessage, BetaRawMessageStreamEvent
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from cpuserve.serving.tools.search_round import MOST_ROUNDS
from tests.api.anthropic_messages import HI as HI_MESSAGES
from tests.api.anthropic_messages import ask as ask_for
from tests.api.anthropic_messages import events_of as message_events
from tests.api.fakes import ANSWER
from tests.api.openai_responses import HI, ask
from tests.api.openai_responses import events_of as response_events
from tests.api.test_api_deferred_tools import claude, late, space
from tests.api.tools import prompt_of, says, tool_api

REGEX, BM25 = "tool_search_tool_regex", "tool_search_tool_bm25"
MESSAGE_EVENT = TypeAdapter(BetaRawMessageStreamEvent)
RESPONSE_EVENT = TypeAdapter(ResponseStreamEvent)


def ask_messages(api, messages=HI_MESSAGES, max_tokens=1000, **fields):
    return ask_for(api, messages, max_tokens, **fields)


def call(name, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def turns_api(*turns, per_output=3, finish="stop"):
    """An Api with one response of the engine after the other, again and again."""
    number = iter(range(1000))

    def script(*of):
        return says(turns[next(number) % len(turns)], per_output, finish)(*of)

    return tool_api(script)


def hosted(name):
    return {"type": f"{name}_20251119", "name": name}


def folded(events):
    """The content that the events of a stream make together."""
    content = []
    for name, body in events:
        MESSAGE_EVENT.validate_python(body)
        if name == "content_block_start":
            assert body["index"] == len(content)
            content.append({**body["content_block"], "_": ""})
        elif name == "content_block_delta":
            delta = body["delta"]
            content[-1]["_"] += delta.get("text", delta.get("partial_json", ""))
    for block in content:
        written = block.pop("_")
        if block["type"] == "text":
            block["text"] = written
        elif "input" in block:
            block["input"] = json.loads(written)
    return content


def without_ids(content):
    return [{k: v for k, v in block.items() if k not in ("id", "tool_use_id")} for block in content]


@pytest.mark.parametrize("per_output", [1, 1000])
@pytest.mark.parametrize(("search", "query"), [(REGEX, "Note.*"), (BM25, "about NotebookEdit")])
def test_a_message_searches_and_then_calls_the_tool(search, query, per_output):
    turns = ["I search." + call(search, query=query), "Found." + call("NotebookEdit", path="a")]
    tools = [hosted(search), late("NotebookEdit"), late("Other"), claude("Read")]
    api = turns_api(*turns, per_output=per_output)
    response = ask_messages(api, tools=tools)
    body = response.json()
    BetaMessage.model_validate(body, strict=True)
    said, use, result, found, tool = body["content"]
    assert (said["text"], found["text"]) == ("I search.", "Found.")
    assert use["id"].startswith("srvtoolu_")
    assert use == {"type": "server_tool_use", "id": use["id"], "name": search,
                   "input": {"query": query}}  # fmt: skip
    reference = {"type": "tool_reference", "tool_name": "NotebookEdit"}
    assert result["tool_use_id"] == use["id"]
    assert result["content"]["tool_references"][0] == reference
    assert (tool["type"], tool["input"], body["stop_reason"]) == ("tool_use", {"path": "a"},
                                                                  "tool_use")  # fmt: skip
    first, second = prompt_of(api, 0), prompt_of(api, 1)
    assert '"name": "NotebookEdit"' not in first
    assert f'"name": "{search}"' in first
    assert second.startswith(first), "the first prompt is in the prefix cache"
    assert '"name": "NotebookEdit"' in second.removeprefix(first)
    used = [len(prompt) for prompt, _ in api.engine.asked]
    assert body["usage"]["input_tokens"] == sum(used)

    streamed = folded(message_events(ask_messages(api, tools=tools, stream=True)))
    assert without_ids(streamed) == without_ids(body["content"])
    results = [{"type": "tool_result", "tool_use_id": tool["id"], "content": "ok"}]
    asked = [*HI_MESSAGES, {"role": "assistant", "content": body["content"]},
             {"role": "user", "content": results}]  # fmt: skip
    assert ask_messages(api, asked, tools=tools).status_code == 200
    third = prompt_of(api, 4)
    assert third.startswith(second), "the history of a search is written as it was"
    assert third.count('"name": "NotebookEdit", "description"') == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_pattern_is_an_error_that_the_model_sees(stream):
    api = turns_api(call(REGEX, query="("), "I give up.")
    response = ask_messages(api, tools=[hosted(REGEX), late("a"), claude("b")], stream=stream)
    content = folded(message_events(response)) if stream else response.json()["content"]
    _, result, text = content
    assert result["content"]["type"] == "tool_search_tool_result_error"
    assert result["content"]["error_code"] == "invalid_tool_input"
    assert text["text"] == "I give up."
    assert "The search failed: the pattern is not valid" in prompt_of(api)
    asked = [*HI_MESSAGES, {"role": "assistant", "content": content}, *HI_MESSAGES]
    assert (
        ask_messages(api, asked, tools=[hosted(REGEX), late("a"), claude("b")]).status_code == 200
    )
    assert prompt_of(api, 2).startswith(prompt_of(api, 1))


def test_a_search_with_arguments_that_are_no_json_is_the_same_in_a_stream():
    broken = f'<tool_call>\n{{"name": "{BM25}", "arguments": {{"query": }}}}\n</tool_call>'
    api = turns_api(broken, "I give up.")
    tools = [hosted(BM25), late("a"), claude("b")]
    whole = ask_messages(api, tools=tools).json()["content"]
    assert [block.get("input") for block in whole] == [{}, None, None]
    streamed = folded(message_events(ask_messages(api, tools=tools, stream=True)))
    assert without_ids(streamed) == without_ids(whole)


@pytest.mark.parametrize("number", ["srvtoolu_1", "srvtoolu_other"])
def test_results_that_do_not_follow_their_searches_are_texts(number):
    """Two searches at once on another server, or a conversation that a client has shortened."""

    def use(number):
        return {"type": "server_tool_use", "id": number, "name": BM25, "input": {"query": "a"}}

    def result(number, name):
        references = [{"type": "tool_reference", "tool_name": name}]
        content = {"type": "tool_search_tool_search_result", "tool_references": references}
        return {"type": "tool_search_tool_result", "tool_use_id": number, "content": content}

    blocks = [use("srvtoolu_1"), use("srvtoolu_2"), result(number, "a"), result("srvtoolu_2", "c")]
    api = turns_api(ANSWER)
    asked = [*HI_MESSAGES, {"role": "assistant", "content": blocks}, *HI_MESSAGES]
    response = ask_messages(api, asked, tools=[hosted(BM25), late("a"), claude("b")])
    assert response.status_code == 200, response.text
    assert prompt_of(api).count('"name": "a", "description"') == 1
    assert "[The tool c is not available any more.]" in prompt_of(api)


def test_a_search_beside_a_call_of_the_client_ends_the_response():
    api = turns_api(call("b", path="x") + call(BM25, query="about a"))
    tools = [hosted(BM25), late("a"), claude("b")]
    body = ask_messages(api, tools=tools).json()
    kinds = [block["type"] for block in body["content"]]
    assert kinds == ["tool_use", "server_tool_use", "tool_search_tool_result"]
    assert body["stop_reason"] == "tool_use"
    assert len(api.engine.asked) == 1
    use = body["content"][0]
    result = {"type": "tool_result", "tool_use_id": use["id"]}
    asked = [*HI_MESSAGES, {"role": "assistant", "content": body["content"]},
             {"role": "user", "content": [result]}]  # fmt: skip
    answer = ask_messages(api, asked, tools=tools)
    assert answer.status_code == 200, answer.text
    assert '"name": "a", "description"' in prompt_of(api, 1)


def test_a_model_that_searches_on_and_on_pauses_and_the_next_request_continues():
    api = turns_api(*[call(BM25, query="about a")] * MOST_ROUNDS, ANSWER)
    tools = [hosted(BM25), late("a"), claude("b")]
    body = ask_messages(api, tools=tools).json()
    assert len(api.engine.asked) == MOST_ROUNDS
    assert body["stop_reason"] == "pause_turn"
    assert api.engine.running == api.context.active_sequences == 0
    asked = [*HI_MESSAGES, {"role": "assistant", "content": body["content"]}]
    later = ask_messages(api, asked, tools=tools).json()
    assert later["content"] == [{"type": "text", "text": ANSWER}]
    assert prompt_of(api, -1).count('"name": "a", "description"') == MOST_ROUNDS


def test_a_response_of_openai_that_searches_on_and_on_is_completed():
    api = turns_api(call("tool_search", query="orders"))
    response = ask(api, [HI], tools=[{"type": "tool_search"}, space("orders")]).json()
    assert len(api.engine.asked) == MOST_ROUNDS
    assert response["status"] == "completed"


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_count_all_rounds(stream):
    api = turns_api(call(BM25, query="about a"), ANSWER)
    tools = [hosted(BM25), late("a"), claude("b")]
    free = ask_messages(api, tools=tools, max_tokens=1000).json()["usage"]["output_tokens"]
    first, second = (params.max_tokens for _, params in api.engine.asked)
    assert 0 < second < first == 1000
    assert free > first - second
    cut = turns_api(call(BM25, query="about a"), ANSWER)
    response = ask_messages(cut, tools=tools, max_tokens=first - second, stream=stream)
    assert '"stop_reason":"max_tokens"' in response.text.replace(" ", "")
    assert len(cut.engine.asked) == 1


def test_the_timeout_counts_all_rounds():
    api = turns_api(call("tool_search", query="orders"), ANSWER)
    tools = [{"type": "tool_search"}, space("orders")]
    assert ask(api, [HI], tools=tools, timeout=50).status_code == 200
    (first, _), (second, _) = api.engine.wishes
    assert second < first == 50


def test_max_tool_calls_limits_the_searches_of_a_response():
    search = call("tool_search", query="orders")
    api = turns_api(search, search, ANSWER)
    tools = [{"type": "tool_search"}, space("orders")]
    body = ask(api, [HI], tools=tools, max_tool_calls=1).json()
    found = [bool(i["tools"]) for i in body["output"] if i["type"] == "tool_search_output"]
    assert (found, body["output"][-1]["content"][0]["text"]) == ([True, False], ANSWER)
    assert "1 searches at most" in prompt_of(api, 2)
    error = ask(api, [HI], tools=tools, max_tool_calls=0)
    assert (error.status_code, error.json()["error"]["param"]) == (400, "max_tool_calls")


def test_a_forced_choice_forces_the_first_round_only():
    api = turns_api(f'{BM25}", "arguments": {{"query": "about a"}}}}\n</tool_call>', "Done.")
    tools = [hosted(BM25), late("a"), claude("b")]
    body = ask_messages(api, tools=tools, tool_choice={"type": "any"}).json()
    assert [block["type"] for block in body["content"]] == [
        "server_tool_use", "tool_search_tool_result", "text"]  # fmt: skip
    assert prompt_of(api, 1).endswith("<|im_start|>assistant\n")


def test_a_begun_message_of_the_assistant_goes_on_after_a_search():
    api = turns_api(call(BM25, query="about a"), "Done.")
    asked = [*HI_MESSAGES, {"role": "assistant", "content": "Well, "}]
    body = ask_messages(api, asked, tools=[hosted(BM25), late("a"), claude("b")]).json()
    assert body["content"][-1]["text"] == "Done."
    assert "assistant\nWell, " in prompt_of(api, 1)


def test_a_prompt_that_gets_too_long_ends_the_response_with_an_error():
    wide = claude("a", defer_loading=True)
    wide["description"] = "word " * 4000
    tools = [hosted(BM25), wide, claude("b")]
    api = turns_api(call(BM25, query="word"))
    assert ask_messages(api, tools=tools).status_code == 400
    events = message_events(ask_messages(api, tools=tools, stream=True))
    assert events[-1][0] == "error"
    assert "prompt is too long" in events[-1][1]["error"]["message"]
    assert api.engine.running == api.context.active_sequences == 0


@pytest.mark.parametrize("per_output", [1, 1000])
def test_a_response_searches_and_then_calls_the_tool(per_output):
    turns = [call("tool_search", query="orders"), "Found." + call("crm__orders", path="a")]
    api = turns_api(*turns, per_output=per_output)
    tools = [{"type": "tool_search"}, space("orders", "other")]
    whole = ask(api, [HI], tools=tools).json()
    Response.model_validate(whole, strict=True)
    search, output, _, function = whole["output"]
    assert search == {"type": "tool_search_call", "id": search["id"], "status": "completed",
                      "call_id": None, "execution": "server",
                      "arguments": {"query": "orders"}}  # fmt: skip
    assert output == {"type": "tool_search_output", "id": output["id"], "status": "completed",
                      "call_id": None, "execution": "server",
                      "tools": [space("orders")]}  # fmt: skip
    assert (function["name"], function["namespace"]) == ("orders", "crm")
    first, second = prompt_of(api, 0), prompt_of(api, 1)
    assert "crm: Customers." in first
    assert "crm__orders" not in first
    assert second.startswith(first)
    assert '"name": "crm__orders"' in second
    assert whole["tools"][0] == {"type": "tool_search", "execution": "server", "description": None,
                                 "parameters": None}  # fmt: skip

    events = response_events(ask(api, [HI], tools=tools, stream=True))
    for event in events:
        RESPONSE_EVENT.validate_python(event)
    last = events[-1]["response"]
    kinds = [event["item"]["type"] for event in events if event["type"].endswith("item.done")]
    assert kinds == [item["type"] for item in whole["output"]]
    assert [item["id"].rpartition("_")[2] for item in last["output"]] == ["0", "1", "2", "3"]
    done = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert done == last["output"]
    assert last["output"][1]["tools"] == output["tools"]

    result = {"type": "function_call_output", "call_id": function["call_id"], "output": "ok"}
    assert ask(api, [HI, *whole["output"], result], tools=tools).status_code == 200
    assert prompt_of(api, 4).startswith(second), "the history of a search is written as it was"


def test_a_search_without_deferred_tools_is_not_offered():
    api = turns_api(ANSWER)
    ask(api, tools=[{"type": "tool_search"}, space()])
    ask_messages(api, tools=[hosted(BM25), claude("b")])
    assert "tool_search" not in prompt_of(api, 0) + prompt_of(api, 1)


@pytest.mark.parametrize(
    "content",
    [
        {"type": "tool_search_tool_search_result", "tool_references": [
            {"type": "tool_reference", "tool_name": "NotebookEdit"}]},
        {"type": "tool_search_tool_search_result", "tool_references": []},
        {"type": "tool_search_tool_result_error", "error_code": "unavailable"},
    ],
    ids=["found", "nothing", "error"],
)  # fmt: skip
def test_a_result_without_its_search_is_no_error(content):
    result = {"type": "tool_search_tool_result", "tool_use_id": "srvtoolu_1", "content": content}
    said = {"role": "assistant", "content": [result]}
    response = ask_messages(tool_api(says("hi")), [*HI_MESSAGES, said, *HI_MESSAGES])
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("other", [{"type": "mcp", "server_label": "m"}, {"type": "tool_search"}])
def test_tools_that_only_openai_runs_may_be_deferred(other):
    api, other = turns_api(ANSWER), {**other, "defer_loading": True}
    response = ask(api, [HI], tools=[{"type": "tool_search"}, other, space("orders")])
    assert response.status_code == 200, response.text
    assert "They are among these:\\n- crm: Customers." in prompt_of(api)
