"""The scripted server: what a user's text says is what the clients of each dialect get."""

import json

import anthropic
import httpx
import openai
import pytest

from cpuserve.testing.replies import ScriptedCall
from cpuserve.testing.writing import written_call
from tests.clients.script import DONE, HELLO, THOUGHT, TITLE, items_of, written
from tests.clients.scripted import BLOCK, scripted_server, tokenizer
from tests.helpers.patience import PATIENCE_S, wait_until

READ = {"name": "read", "parameters": {"type": "object", "properties": {"path": {}}}}
WRITE = {"name": "write", "parameters": {"type": "object", "properties": {"path": {}}}}
TOOLS = [{"type": "function", "function": function} for function in (READ, WRITE)]
SCRIPT = (
    'Do this: [[think Look first.]] [[call read {"path": "a"}]] '
    '[[calls read {"path": "b"} ;; write {"path": "c"}]] [[say It is done.]]'
)


@pytest.fixture(scope="module")
def server():
    with scripted_server() as server:
        yield server


def openai_client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
def chat(server):
    with openai_client(server) as client:
        yield lambda **fields: client.chat.completions.create(model="scripted", **fields)


def user(text):
    return {"role": "user", "content": text}


def turn(role, text):
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[[say It is [1].]]", [("say", "It is [1].")]),
        ("[[say a [b]]]", [("say", "a [b]")]),
        ("[[raw <x>\n\ny]] [[think t]]", [("raw", "<x>\n\ny"), ("think", "t")]),
        ("[[say without an end", []),
        ("[[call f]]", [("f", {})]),
        ('[[call f {"a": [[1]], "b": "]]"}]] x', [("f", {"a": [[1]], "b": "]]"})]),
        ('[[call f {"a": "two\nlines"} ]]', [("f", {"a": "two\nlines"})]),
        ('[[call f {"a": }]] [[say b]]', [("say", "b")]),
        ('[[call f {"task": "[[say c]]"}]]', [("f", {"task": "[[say c]]"})]),
        ('[[calls f {"a": 1} ;; g]]', [("f", {"a": 1}), ("g", {})]),
        ("[[custom apply *** Begin\n+x]]", [("apply", {"input": "*** Begin\n+x"})]),
        ("[[other x]] [say y] [[saying z]]", []),
    ],
)
def test_items_are_found_in_a_text(text, found):
    items = items_of(text)
    shown = [
        pair
        for item in items
        for pair in [(call.name, json.loads(call.arguments)) for call in item.calls]
        or [(item.kind, item.text)]
    ]
    assert shown == found
    assert all(item.source in text for item in items)


def test_an_agent_runs_its_loop_through_chat_completions(chat):
    messages = [user(SCRIPT)]
    seen = []
    for _ in range(4):
        choice = chat(messages=messages, tools=TOOLS).choices[0]
        said = choice.message
        calls = said.tool_calls or []
        seen.append(
            (
                getattr(said, "reasoning_content", None),
                said.content,
                [(call.function.name, json.loads(call.function.arguments)) for call in calls],
                choice.finish_reason,
            )
        )
        messages.append(said.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": c.id, "content": "ok"} for c in calls]
        if not calls:
            messages.append(user("Go on."))
    assert seen == [
        ("Look first.", None, [("read", {"path": "a"})], "tool_calls"),
        (None, None, [("read", {"path": "b"}), ("write", {"path": "c"})], "tool_calls"),
        (None, "It is done.", [], "stop"),
        (None, DONE, [], "stop"),
    ]


def test_messages_and_responses_get_the_same_script(server):
    text = f"{SCRIPT} [[say end]]"
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        tools = [{"name": "read", "input_schema": READ["parameters"]}]
        told = client.messages.create(
            model="scripted", max_tokens=200, messages=[user(text)], tools=tools
        )
    assert [block.type for block in told.content] == ["thinking", "tool_use"]
    assert told.content[1].input == {"path": "a"}
    with openai_client(server) as client:
        given = client.responses.create(
            model="scripted", input=text, tools=[{"type": "function", "strict": False, **READ}]
        )
    assert [item.type for item in given.output] == ["reasoning", "function_call"]
    assert json.loads(given.output[1].arguments) == {"path": "a"}
    body = {"model": "scripted", "messages": [user(text)], "tools": TOOLS, "stream": False}
    message = httpx.post(f"{server.url}/api/chat", json=body, timeout=PATIENCE_S).json()["message"]
    assert message["thinking"] == "Look first."
    assert message["tool_calls"][0]["function"]["arguments"] == {"path": "a"}


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize("text", ['[[call write {"path": "a"}]]', "[[say no call]]"])
def test_forced_calls_are_the_scripts_or_have_no_arguments(text, thinks):
    with scripted_server(thinks=thinks) as server, openai_client(server) as client:
        for choice, name in (
            ("required", "write" if "write" in text else "read"),
            ({"type": "function", "function": {"name": "write"}}, "write"),
        ):
            told = client.chat.completions.create(
                model="scripted", messages=[user(text)], tools=TOOLS, tool_choice=choice
            )
            (call,) = told.choices[0].message.tool_calls
            assert call.function.name == name
            wanted = {"path": "a"} if "write" in text else {}
            assert json.loads(call.function.arguments) == wanted
            thought = getattr(told.choices[0].message, "reasoning_content", None)
            assert thought == (THOUGHT if thinks else None)


def test_a_forced_call_has_an_object_of_the_script_as_its_arguments(chat):
    named = {"type": "function", "function": {"name": "write"}}
    told = chat(messages=[user('[[say {"path": "z"}]]')], tools=TOOLS, tool_choice=named)
    (call,) = told.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"path": "z"}


def test_tokens_are_limited_and_counted(chat):
    text = "[[say one two three four five six seven]]" + " more" * 40
    whole = chat(messages=[user(text)])
    cut = chat(messages=[user(text)], max_tokens=3, logprobs=True, top_logprobs=2)
    said = tokenizer().encode("one two three four five six seven", add_special_tokens=False)
    assert cut.choices[0].finish_reason == "length"
    assert cut.choices[0].message.content == tokenizer().decode(said[:3])
    assert len(cut.choices[0].logprobs.content) == 3
    assert (whole.usage.completion_tokens, cut.usage.completion_tokens) == (len(said) + 1, 3)
    cached = cut.usage.prompt_tokens_details.cached_tokens
    assert cached == (cut.usage.prompt_tokens - 1) // BLOCK * BLOCK
    assert cached > 0


def test_a_prompt_that_does_not_fit_is_refused_and_recorded(tmp_path):
    with scripted_server(max_model_len=200, names=("a", "b"), record=tmp_path) as server:
        with openai_client(server) as client:
            assert [card.id for card in client.models.list()] == ["a", "b"]
            with pytest.raises(openai.BadRequestError, match="maximum context length is 200"):
                client.chat.completions.create(model="b", messages=[user("word " * 400)])
        wait_until(lambda: len(server.exchanges) == 2)
        assert [exchange.status for exchange in server.exchanges] == [200, 400]
        assert server.prompts == []
    kept = json.loads((tmp_path / "001.json").read_text())
    assert kept["request"] == "POST /v1/chat/completions"
    assert kept["body"]["model"] == "b"
    assert json.loads(kept["response"])["error"]["code"] == "context_length_exceeded"


def test_streams_are_recorded_to_their_end(server, chat):
    num_before = len(server.exchanges)
    text = "one two three four five six seven eight nine ten"
    with chat(messages=[user(f"[[say {text}]]")], stream=True) as stream:
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert said == text
    wait_until(lambda: len(server.exchanges) > num_before)
    response = server.exchanges[-1].response
    assert response.count(b"data: {") > 4
    assert response.endswith(b"data: [DONE]\n\n")


def test_a_script_goes_on_after_a_summary():
    asked = turn("tools", '{"function": {"name": "f"}}') + turn("user", "[[call f]] [[say two]]")
    one = turn("assistant", "<tool_call>...</tool_call>") + turn("tool", "ok")
    opened = "<|im_start|>assistant\n"
    wanted = turn("user", "Write a detailed summary of the conversation.") + opened
    summary = written(asked + one + wanted)
    assert "[[say two]]" in summary
    assert "[[call f]]" not in summary
    for role in ("user", "assistant"):  # agents put it into a turn of either role
        again = turn(role, summary) + turn("user", "Go on.") + opened
        assert written(asked + one + again) == "two"
    nothing_left = asked + one + turn("assistant", "two") + wanted
    assert DONE in written(nothing_left)


@pytest.mark.parametrize("before", [True, False])
def test_a_summary_of_a_quoted_conversation_leaves_out_what_was_done(before):
    done = 'Bot: f(a=["one"])\n'
    items = '[[call f {"a": ["one"]}]] [[call f {"a": ["two"]}]]'
    quoted = done + items if before else items + done
    asked = turn("user", f"Summarize this.\nConversation:\n{quoted}")
    summary = written(asked + "<|im_start|>assistant\n")
    assert "two" in summary
    assert "one" not in summary


def test_items_in_a_call_are_the_script_of_another_agent():
    asked = turn("user", '[[call f {"task": "[[say sub]]"}]] [[say one]]')
    called = written_call(ScriptedCall("f", '{"task": "[[say sub]]"}'))
    opened = "<|im_start|>assistant\n"
    assert written(asked + turn("assistant", called) + turn("tool", "ok") + opened) == "one"


def test_texts_without_a_script_and_without_tools():
    opened = "<|im_start|>assistant\n"
    assert written(turn("user", "Hi") + opened) == HELLO
    assert written(turn("user", "[[call f]]") + opened) == TITLE
    assert written("[[say plain completions]]") == "plain completions"
    assert written(turn("user", "[[say a b]]") + opened + "a ") == "b"
    assert written(turn("user", "[[say a]]") + opened, thinks=True) == (
        f"<think>\n{THOUGHT}\n</think>\n\na"
    )
    off = opened + "<think>\n\n</think>\n\n"
    assert written(turn("user", "[[say a]]") + off, thinks=True) == "a"
    half = opened + f"<think>\n{THOUGHT[:5]}"
    assert written(turn("user", "[[say a]]") + half, thinks=True) == f"{THOUGHT[5:]}\n</think>\n\na"
