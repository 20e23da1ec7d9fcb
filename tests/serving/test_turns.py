"""Responses whose texts, thoughts and calls have headers: found, read at any cut, and forced."""

import json
from types import SimpleNamespace

import pytest

from cpuserve.serving.calls.call import GenerateCall
from cpuserve.serving.calls.events import Text, Thought, ToolCallDelta
from cpuserve.serving.prompts.chat_prompt import begins_thought
from cpuserve.serving.tools.learn import learn_format
from cpuserve.serving.tools.use import tool_use
from cpuserve.tokenizer.chat import ChatTemplate
from tests.api.fakes import tokenizer
from tests.helpers.depth import deep_but
from tests.helpers.turn_templates import ALL, HEADED, TURNS
from tests.serving.test_layouts import ARGUMENTS, SCHEMAS, TOOLS, call, strict

ASKED = [{"role": "user", "content": "x"}]
THOUGHT = "It may be\n\nanywhere."
families = pytest.mark.parametrize("family", ALL)
turned = pytest.mark.parametrize("family", TURNS)
_found = {}


def learned(family):
    """(how responses are written, what the template writes for messages) of a family."""
    if family not in _found:
        template = ChatTemplate(ALL[family][0], tokenizer())

        def written(messages, prompt=False):
            return template.render(messages, tools=TOOLS, add_generation_prompt=prompt)

        _found[family] = learn_format(template), written
    return _found[family]


def response(family, content, *calls, thought=""):
    """(what follows the prompt, whether the prompt has begun the thought)."""
    found, written = learned(family)
    turn = {"role": "assistant", "content": content, "reasoning_content": thought}
    text = written([*ASKED, turn | ({"tool_calls": list(calls)} if calls else {})])
    prompt = written(ASKED, True)
    assert text.startswith(prompt)
    tags = found.tags
    return text[len(prompt) :], tags is not None and begins_thought(prompt, tags)


def parsed(found, *texts, thinks=False, opening=""):
    """(thought, text, [[name, arguments]], parser) of a response that comes in these texts."""
    around = found.around(thinks=thinks)
    parser = found.calls.parser(0, opening, SCHEMAS, around)
    pieces = [p for text in texts for p in parser.push(text)] + parser.flush()
    calls = []
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            if piece.name is not None:
                calls.append([piece.name, ""])
            calls[-1][1] += piece.arguments
    thought, said = (
        "".join(p.text for p in pieces if isinstance(p, kind)) for kind in (Thought, Text)
    )
    return thought, said, [[name, json.loads(text)] for name, text in calls], parser


def without_end(family, text):
    """A response without the end of the turn, which the server leaves out."""
    for end in ("<|eot_id|>", "<|eot|>", "<|stop|>\n", "<|im_end|>\n", "<|end_sampling|>",
                "<|eos|>\n", "<|end|>", "<|close|>message<|sep|>"):  # fmt: skip
        if family != "Solar" or end == "<|eos|>\n":
            text = text.removesuffix(end)
    return text


@families
def test_the_headers_are_found(family):
    found, _ = learned(family)
    assert found.calls is not None, found.why
    assert found.calls.name == ALL[family][1], found.calls
    assert "learned" in found.why
    assert found.turns is not None
    assert (found.turns.begun != "") == (family in TURNS)
    assert (found.tags is None) == (family == "Functionary 3.2")


@pytest.mark.matrix
@families
@pytest.mark.parametrize(
    ("content", "count"), [("", 1), ("", 3), ("I look.", 0), ("I look.", 1), ("I look.", 3)]
)
@pytest.mark.parametrize("thought", deep_but([THOUGHT], ["", THOUGHT]))
def test_what_the_template_writes_is_read_wherever_it_is_cut(family, content, count, thought):
    found = learned(family)[0]
    thought = "" if found.tags is None else thought
    names = ["get_weather", "other.tool", "get_weather"][:count]
    calls = [call(i, ARGUMENTS, name) for i, name in enumerate(names)]
    text, thinks = response(family, content, *calls, thought=thought)
    text = without_end(family, text)
    *told, parser = parsed(found, text, thinks=thinks)
    assert told == [thought, content, [[name, ARGUMENTS] for name in names]]
    assert parser.ends_with_call == bool(count)
    assert [*parsed(found, *text, thinks=thinks)[:3]] == told
    for cut in range(0, len(text), 5):
        assert [*parsed(found, text[:cut], text[cut:], thinks=thinks)[:3]] == told


@turned
def test_a_call_that_is_cut_off_is_not_complete(family):
    found = learned(family)[0]
    text = without_end(family, response(family, "", call(0, {"city": "Paris", "days": 3}))[0])
    for end in range(len(text)):
        parser = found.calls.parser(0, "", SCHEMAS, found.around(thinks=False))
        pieces = parser.push(text[:end]) + parser.flush()
        assert parser.num_closed <= parser.num_calls <= 1
        said = "".join(p.text for p in pieces if isinstance(p, Text))
        assert found.turns.begun not in said, "the header is a part of the prompt"


@turned
@pytest.mark.parametrize("text", ["Hello.", "{", "", " ", "all", "assistant"])
def test_a_response_without_a_header_is_text(family, text):
    found = learned(family)[0]
    for texts in ([text], text):
        assert parsed(found, *texts)[:3] == ("", text, [])


@turned
def test_a_message_that_is_continued_has_no_header(family):
    found = learned(family)[0]
    parser = found.calls.parser(0, "", SCHEMAS, found.around(thinks=False, continues=True))
    pieces = parser.push(" and more") + parser.flush()
    assert [p.text for p in pieces] == [" and more"]


@turned
def test_a_structured_output_has_the_header_of_a_text(family):
    found = learned(family)[0]
    form = {"response_format": {"type": "json_object"}, "messages": ASKED}
    used = tool_use(GenerateCall(**form), found)
    assert used.opening == found.turns.text
    around = found.around(thinks=False)
    parser = used.format.parser(0, used.opening, {}, around)
    assert [p.text for p in parser.push('{"a": 1}') + parser.flush()] == ['{"a": 1}']


@pytest.mark.matrix
@pytest.mark.parametrize("family", deep_but(["Functionary 3.2"], ALL))
@pytest.mark.parametrize("tools", [TOOLS, strict("get_weather", "other.tool")], ids=["", "strict"])
def test_a_forced_call_is_what_the_template_writes(family, tools, allows):
    found = learned(family)[0]
    good, _ = response(family, "", call(0, {"city": "P", "days": 3}))
    bad, _ = response(family, "", call(0, {"city": "P", "days": {"x": 1}}))
    for fields in ({}, {"tool_name": "get_weather"}):
        used = tool_use(GenerateCall(tools=tools, tool_choice="required", **fields), found)
        begin = good.rindex(used.opening) + len(used.opening) if used.opening else 0
        ends = [good[begin:end] for end in range(len(good) - 40, len(good) + 1)]
        assert any(allows(used.form, end) for end in ends if end), good[begin:]
        assert not any(allows(used.form, bad[begin:end]) for end in range(begin + 1, len(bad) + 1))
        _, _, calls, parser = parsed(found, good[begin:], opening=used.opening)
        assert calls == [["get_weather", {"city": "P", "days": 3}]]
        assert parser.num_closed == 1


@turned
def test_calls_of_strict_functions_in_text_fit_their_schema(family, allows):
    found = learned(family)[0]
    used = tool_use(GenerateCall(tools=strict("get_weather")), found)
    texts = {
        days: without_end(family, response(family, said, call(0, {"city": "P", "days": days}))[0])
        for said in ("", "I look.")
        for days in (3, "three")
    }
    assert allows(used.form, texts[3])
    assert not allows(used.form, texts["three"])
    assert allows(used.form, without_end(family, response(family, "I know.")[0]))


@families
def test_the_server_ends_a_thought_as_the_template_does(family):
    found, _ = learned(family)
    if found.tags is None:
        return
    text, thinks = response(family, "Yes.", thought=THOUGHT)
    end = found.thought_end
    begun = text[: text.index(THOUGHT) + len(THOUGHT)]
    given = begun + end.closed + end.begin + "Yes."
    assert parsed(found, given, thinks=thinks)[:2] == (THOUGHT, "Yes.")
    assert "".join(given.split()) in "".join(text.split())


@turned
def test_the_parser_sees_the_tokens_of_headers(family):
    found = learned(family)[0]
    tokens = dict(enumerate(["<|start|>", "<|message|>", "<|model|>", "<|unknown|>", "<|end|>"]))
    shown = found.shown_ids(SimpleNamespace(special_ids=tokens, token_text=tokens.get))
    texts = str([found.turns, found.tags])
    assert shown == {i for i, token in tokens.items() if token in texts}


def test_headers_of_texts_are_left_out():
    for family in HEADED:
        found = learned(family)[0]
        assert found.turns.marks
        for mark in found.turns.marks:
            assert parsed(found, f"a{mark}")[1] == "a"
