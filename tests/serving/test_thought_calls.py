"""Calls inside a thought: calls if the response ends with them, else a part of the thought."""

import json
import sys

import pytest

from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.events import Text, Thought, ToolCallDelta
from cpuserve.serving.tools.families import HERMES, family, names
from cpuserve.serving.tools.learn import LearnedFormat
from cpuserve.serving.tools.thoughts import THINK
from cpuserve.serving.tools.use import tool_use
from cpuserve.serving.tools.wrapped import ThoughtCalls, finds_calls
from tests.helpers.fuzzed_answers import cuts
from tests.serving.test_call_families import WRITTEN

PARAMETERS = {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
CITY = {"city": "Paris", "days": 3}


class _Prompt:
    thinks = continues = False


def parser_of(found, **fields):
    offered = [{"name": "f", "parameters": PARAMETERS}, {"name": "g"}]
    tools = [{"type": "function", "function": function} for function in offered]
    call = GenerateCall(messages=[], tools=tools, **fields)
    return tool_use(call, LearnedFormat(found, THINK)).parser(0, _Prompt, "")


def read(text, found=HERMES, *, cut=False, **fields):
    """(thoughts, text, calls) of a response, which no division of the text changes."""
    results = []
    for pieces in ([text], list(text), cuts(text, 1), cuts(text, 2)):
        parser = parser_of(found, **fields)
        told = [p for piece in pieces for p in parser.push(piece)] + parser.flush(cut=cut)
        thoughts = "".join(p.text for p in told if isinstance(p, Thought))
        texts = "".join(p.text for p in told if isinstance(p, Text))
        calls = []
        for piece in told:
            if isinstance(piece, ToolCallDelta):
                if piece.name is not None:
                    assert piece.id
                    calls.append([piece.name, ""])
                assert piece.call == len(calls) - 1
                calls[-1][1] += piece.arguments
        assert parser.num_closed <= parser.num_calls
        assert not calls or parser.ends_with_call
        results.append((thoughts, texts, [(name, json.loads(given)) for name, given in calls]))
    assert all(result == results[0] for result in results)
    return results[0]


def made(name="f", arguments='{"city": "Paris", "days": 3}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def is_marked(name):
    parser = family(name).parser(0)
    return finds_calls(parser) and WRITTEN[name].startswith(parser.markers)


IN_THOUGHT = [name for name in names() if name != "openai" and is_marked(name)]


@pytest.mark.parametrize("name", IN_THOUGHT)
@pytest.mark.parametrize("end", ["", "\n</think>", "</think>\n\n"])
def test_a_response_that_ends_with_calls_in_its_thought_calls(name, end):
    text = f"<think>\nI need it.\n{WRITTEN[name]}{end}"
    thoughts, texts, calls = read(text, family(name))
    assert (thoughts, texts) == ("I need it.", "")
    assert calls[0] == ("f", CITY)
    assert calls[1:] in ([], [("g", {})])


def test_formats_of_most_families_are_found():
    assert len(IN_THOUGHT) >= 15
    assert {"hermes", "qwen3_coder", "kimi_k2", "glm45", "deepseek_v32", "gemma4"} <= {*IN_THOUGHT}


DRAFTS = {
    "text follows the thought": f"I may write {made()}\n</think>\n\nHello.",
    "a call follows the thought": f"I may write {made()}\n</think>\n\n{made('g', '{}')}",
    "words follow in the thought": f"I may write {made()} or so.",
    "words follow before its end": f"I may write {made()} or so.\n</think>",
    "the call is not complete": made()[:-30],
    "the function is not offered": made("h"),
    "the markers are only mentioned": "The tags are <tool_call> and </tool_call>",
    "no JSON": "<tool_call>\nf(city)\n</tool_call>",
    "the marker is not complete": "Now I write <tool_ca",
}


@pytest.mark.parametrize("why", DRAFTS)
def test_other_calls_in_thoughts_are_drafts(why):
    text = DRAFTS[why]
    thought, _, rest = text.partition("\n</think>")
    thoughts, texts, calls = read("<think>\n" + text)
    assert thoughts == thought
    assert (texts, calls) in ([("Hello.", []), ("", [("g", {})])] if rest else [("", [])])


def test_the_last_calls_count_after_drafts():
    draft = f"Say {made('g', '{}')} no, <tool_call> is a tag, {made('h', '{}')}, and a city"
    thoughts, _, calls = read(f"<think>\n{draft}: {made()}\n{made('g', '{}')}")
    assert calls == [("f", CITY), ("g", {})]
    assert thoughts == draft + ":"
    limited = read(f"<think>\n{draft}: {made()}\n{made('g', '{}')}", parallel_tool_calls=False)
    assert limited[2] == [("f", CITY)]


def test_a_text_in_the_arguments_may_have_markers():
    given = {"city": f"{made()} <think> </think"}
    _, _, calls = read(f"<think>\n{made('f', json.dumps(given))}")
    assert calls == [("f", given)]


def test_a_thought_that_max_tokens_cuts_calls_nothing():
    text = f"I write {made()}"
    assert read("<think>\n" + text, cut=True) == (text, "", [])


def test_a_forced_call_comes_after_the_thought_and_not_in_it():
    assert not isinstance(parser_of(HERMES, tool_choice="required"), ThoughtCalls)
    assert isinstance(parser_of(HERMES), ThoughtCalls)


@pytest.mark.parametrize("more", [made(), "<tool_call>", '<tool_call>\n{"name": "f", "', "a b\n"])
@pytest.mark.parametrize("begun", ["", made()[:60]])
def test_four_times_the_thought_takes_four_times_the_work(begun, more):
    def work(length):
        parser, count = parser_of(HERMES), 0
        text = "<think>\n" + begun + more * (length // len(more))

        def counted(*_):
            nonlocal count
            count += 1

        sys.setprofile(counted)
        try:
            for at in range(0, len(text), 3):
                parser.push(text[at : at + 3])
                count += len(parser._held)
            parser.flush()
        finally:
            sys.setprofile(None)
        return count

    assert work(8000) < 6 * work(2000)
