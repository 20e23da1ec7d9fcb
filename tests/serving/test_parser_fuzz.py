"""Randomly changed responses through every parser: no fault, the same pieces for every cut."""

import random
import sys

import pytest

from cpuserve.serving.calls.events import Text, Thought
from cpuserve.serving.tools.families import family, names
from cpuserve.serving.tools.harmony import HARMONY
from cpuserve.serving.tools.learn import learn_format
from cpuserve.serving.tools.machine import PLAIN
from cpuserve.serving.tools.thoughts import THINK, Around
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import tokenizer
from tests.helpers.depth import deep_but
from tests.helpers.family_templates import LEARNED, template
from tests.helpers.fuzzed_answers import changed, cuts
from tests.helpers.turn_templates import ALL as HEADED
from tests.serving.test_call_families import SCHEMA, WRITTEN
from tests.serving.test_layouts import SCHEMAS, TOOLS, call

CHANNELS = WRITTEN["openai"]
NAMES = [f"table {name}" for name in names()]
NAMES += [f"learned {name}" for name in (*LEARNED, *HEADED)] + ["plain", "channels without calls"]
parsers = pytest.mark.parametrize("name", deep_but(NAMES[::3], NAMES))
_made = {}


def made(name):
    """(a function that returns a new parser, a response that its format describes)."""
    if name not in _made:
        kind, _, which = name.partition(" ")
        schemas, around, written = {"f": SCHEMA, "g": {}}, Around("\n", THINK), CHANNELS
        if kind == "plain":
            found, written = PLAIN, "<think>\nIt may be.\n</think>\n\nI look."
        elif kind == "channels":
            found = HARMONY.without_calls()
        elif kind == "table":
            found, written = family(which), "<think>a</think>\nI look\n" + WRITTEN[which]
        else:
            source = template(which) if which in LEARNED else HEADED[which][0]
            rendered = ChatTemplate(source, tokenizer())
            learned = learn_format(rendered)
            found, around, schemas = learned.calls, learned.around(thinks=False), SCHEMAS
            arguments = {"city": 'a "b"\nc', "days": 3, "list": ["x", 2], "more": {"k": "v"}}
            turn = {"role": "assistant", "content": "" if which == "Llama 4" else "I look."}
            turn["tool_calls"] = [call(0, arguments), call(1, {}, "other.tool")]
            asked = [{"role": "user", "content": "x"}]
            prompt = rendered.render(asked, tools=TOOLS)
            written = rendered.render([*asked, turn], tools=TOOLS, add_generation_prompt=False)
            written = written.removeprefix(prompt)
        _made[name] = (lambda: found.parser(0, "", schemas, around)), written
    return _made[name]


def told(parser, pieces):
    """The pieces of a response, with neighbours of one kind joined, and the state at its end."""
    joined, calls = [], 0
    events = [p for text in pieces for p in parser.push(text)] + parser.flush()
    for piece in events:
        if isinstance(piece, Text | Thought):
            kind, said = type(piece).__name__, piece.text
            assert said
        elif piece.name is not None:
            joined.append((piece.name, piece.arguments))
            calls += 1
            assert piece.id
            assert piece.call == calls - 1
            continue
        else:
            kind, said = joined[-1][0], piece.arguments
            assert kind not in ("Text", "Thought"), "arguments continue a call"
        if joined and joined[-1][0] == kind:
            joined[-1] = (kind, joined[-1][1] + said)
        else:
            joined.append((kind, said))
    assert parser.num_closed <= parser.num_calls
    return joined, parser.num_closed, parser.num_calls, parser.ends_with_call, parser.in_thought


@pytest.mark.matrix
@parsers
@pytest.mark.parametrize("seed", range(4))
def test_changed_responses_are_no_faults_and_no_cut_matters(name, seed):
    new, written = made(name)
    others = tuple(WRITTEN.values())
    for number in range(12):
        key = f"{name} {seed} {number}"
        text = changed(written, key, others)
        whole = told(new(), [text])
        assert told(new(), text) == whole, repr(text)
        assert told(new(), cuts(text, key)) == whole, repr(text)


@parsers
@pytest.mark.parametrize("every", deep_but([7], [7, 1]))
def test_no_cut_matters_to_a_long_word(name, every):
    new, written = made(name)
    for begun in range(0, len(written), every):
        text = f"{written[:begun]}{'a1' * 200}{written[begun:]}"
        assert told(new(), text) == told(new(), [text]), repr(text)


@parsers
@pytest.mark.parametrize("begun", ["<", "to", " <|", "<|start|", "a"])
def test_no_cut_matters_to_a_broken_beginning(name, begun):
    new, written = made(name)
    for mark in (*new().markers, "<|message|>", "<think>", written[:40]):
        text = f"{begun}{mark}|more"
        assert told(new(), text) == told(new(), [text]), repr(text)


def test_the_changes_break_calls_and_leave_some_whole():
    new, written = made("table glm45")
    closed = [told(new(), [changed(written, seed)])[1] for seed in range(200)]
    assert {0, 1, 2} <= set(closed)


@pytest.mark.matrix
@parsers
@pytest.mark.parametrize("more", ["word ", " ", "\n", "{", "<", '"', "[", "</"])
def test_little_is_held_back(name, more):
    new, written = made(name)
    for begun in (0, len(written) // 3, len(written) // 2, 3 * len(written) // 4, len(written)):
        parser = new()
        parser.push(written[:begun])
        for _ in range(2400 // len(more)):
            parser.push(more)
        assert len(parser._held) <= 1100, f"after {written[:begun][-40:]!r}"


@parsers
def test_four_times_the_text_takes_four_times_the_work(name):
    """The work: calls of functions, and characters that are held when a text comes."""
    new, written = made(name)
    draw = random.Random(name)
    begun = written[: draw.randrange(len(written))]
    more = draw.choice(["a\n", "<", "{", '"\\', "[1,", "</"])

    def work(length):
        parser, text, count = new(), begun + more * (length // len(more)), 0

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

    assert work(4000) <= 5 * work(1000) + 1000, more
