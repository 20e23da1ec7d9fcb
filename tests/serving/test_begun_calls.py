"""What begins a call is never text, and a response of forced calls ends at a repeated call."""

import json

import pytest

from cpuserve.engine.ipc import Output
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.calls.call import GenerateCall, Prompt
from cpuserve.serving.calls.events import Finish, Text, ToolCallDelta
from cpuserve.serving.generation.text import TextProcessor
from cpuserve.serving.tools.families import HERMES
from cpuserve.serving.tools.learn import LearnedFormat
from cpuserve.serving.tools.llama3_json import LLAMA3_JSON
from cpuserve.serving.tools.use import tool_use
from tests.api.fakes import tokenizer
from tests.helpers.rendered_calls import NAME, ONE_CALL, OTHER, SOURCES, TOOLS, learned, written

families = pytest.mark.parametrize("family", SOURCES)


def parser_of(family, **fields):
    used = tool_use(GenerateCall(tools=TOOLS, messages=[], **fields), learned(family)[0])
    return used.parser(0, Prompt([], thinks=family == "Kimi K3"), "")


def said_in(pieces):
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


@families
def test_a_call_that_a_limit_cuts_off_is_never_text(family):
    text = written(family, (NAME, {"city": "Paris", "days": 3}))
    for end in range(1, len(text)):
        for texts in ([text[:end]], text[:end]):
            parser = parser_of(family)
            pieces = [p for one in texts for p in parser.push(one)] + parser.flush(cut=True)
            assert said_in(pieces).strip() == "", text[:end]


@families
def test_the_text_before_a_call_that_is_cut_off_stays(family):
    if family in ("Llama 4", *ONE_CALL):  # calls of these families are not written after a text
        return
    text, said = written(family, (NAME, {"city": "Paris", "days": 3}), said="I look."), "I look."
    at = text.index(NAME)
    parser = parser_of(family)
    pieces = parser.push(text[:at]) + parser.flush(cut=True)
    assert said_in(pieces).strip() == said


@families
def test_a_response_that_its_model_has_ended_keeps_what_may_begin_a_marker(family):
    """`a <` is a text, although `<` may begin a call."""
    header = "<|channel|>final<|message|>" if family == "gpt-oss" else ""
    closed = learned(family)[0].tags.close if family == "Kimi K3" else ""
    for text in ("a <", "1 [", "we had fun"):
        parser = parser_of(family)
        pieces = parser.push(closed + header + text) + parser.flush()
        assert said_in(pieces) == text


def test_a_word_in_a_sentence_is_not_the_beginning_of_a_marker():
    for text, kept in (("we had fun", "we had fun"), ("fun", ""), ("So:\nfunct", "So:\n")):
        parser = parser_of("Phi-4-mini")
        assert said_in(parser.push(text) + parser.flush(cut=True)) == kept


NAMED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"schema": NAMED}}}


@pytest.mark.parametrize(
    ("text", "shown", "in_form"),
    [
        ('{"name', "", '{"name'),
        ('{"name": "Bob', '{"name": "Bob', '{"name": "Bob'),
        ('{"name": "get_w', "", ""),
        ('{"name": "get_weather", "parame', "", ""),
        ('{"city": "P', '{"city": "P', '{"city": "P'),
        ('{"type": "function", "na', "", '{"type": "function", "na'),
    ],
)
def test_an_object_of_llama_3_is_a_call_if_it_may_have_the_name_of_a_function(text, shown, in_form):
    for fields, expected in (({}, shown), (FORM, in_form)):
        parser = parser_of("Llama 3", **fields)
        assert said_in(parser.push(text) + parser.flush(cut=True)) == expected, fields


@pytest.mark.parametrize(("finish", "shown"), [("length", "Hi "), ("stop", "Hi <tool_c")])
def test_only_a_limit_cuts_a_marker_off(finish, shown):
    text = "Hi <tool_c"
    processor = TextProcessor(tokenizer(), [1], SamplingParams())
    used = tool_use(GenerateCall(tools=TOOLS, messages=[]), LearnedFormat(HERMES))
    processor.find_calls(used.parser(0, Prompt([]), ""), frozenset())
    ids = tokenizer().encode(text, add_special_tokens=False)
    ids += [2] if finish == "stop" else []  # a stop token is not shown
    events, _ = processor.push(Output(1, ids, finish))
    assert said_in(events) == shown


SAME = {"city": "Paris", "days": 3}
MANY = [(NAME, SAME), (OTHER, SAME), (NAME, {"days": 3, "city": "Paris"}), (OTHER, SAME)]


def calls_of(pieces):
    found = []
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            if piece.name is not None:
                found.append([piece.name, ""])
            found[-1][1] += piece.arguments
    return [(name, json.loads(text)) for name, text in found]


@pytest.mark.parametrize("family", [f for f in SOURCES if f not in ONE_CALL])
def test_forced_calls_end_at_one_that_equals_an_earlier_one_and_drop_it(family):
    text = written(family, *MANY)
    for texts in ([text], text):
        parser = parser_of(family, tool_choice="required")
        pieces = []
        for one in texts:
            pieces += parser.push(one)
            if parser.is_full:
                break
        assert calls_of(pieces) == MANY[:2]
        assert parser.is_full
        assert (parser.num_calls, parser.num_closed) == (2, 2)


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"tool_choice": "required"}, True),
        (FORM, True),
        ({}, False),  # a grammar does not keep the model from ending here, so it means the calls
        ({"tool_choice": "none"}, False),
    ],
)
def test_a_grammar_of_calls_is_what_makes_a_model_repeat_itself(fields, ends):
    call = GenerateCall(tools=TOOLS, messages=[], **fields)
    for found in (HERMES, LLAMA3_JSON):
        used = tool_use(call, LearnedFormat(found))
        assert (used is not None and used.parser(0, Prompt([]), "").ends_at_repeat) == ends


def test_a_later_call_that_a_limit_cuts_off_is_reported_as_far_as_it_came():
    text = "".join(written("Hermes", (NAME, SAME), (OTHER, {"days": 4})))
    parser = parser_of("Hermes", tool_choice="required")
    pieces = parser.push(text[: text.index("4") + 1]) + parser.flush(cut=True)
    made = [piece for piece in pieces if isinstance(piece, ToolCallDelta)]
    assert [piece.name for piece in made if piece.name] == [NAME, OTHER]
    assert "".join(piece.arguments for piece in made if piece.call == 1) == '{"days": 4'


def test_a_repeated_call_ends_the_sequence_with_tool_calls():
    call = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}'
    text = "\n".join([f"<tool_call>\n{call}\n</tool_call>"] * 33)
    used = tool_use(
        GenerateCall(tools=TOOLS, messages=[], tool_choice="required"), LearnedFormat(HERMES)
    )
    opening = used.opening
    processor = TextProcessor(tokenizer(), [1], SamplingParams())
    processor.find_calls(used.parser(0, Prompt([]), opening), frozenset())
    ids = tokenizer().encode(text.removeprefix(opening), add_special_tokens=False)
    events, num_tokens = [], 0
    for token in ids:
        found, count = processor.push(Output(1, [token], None))
        events += found
        num_tokens += count
        if processor.finish:
            break
    assert processor.finish == "stop"
    assert events[-1] == Finish(0, "tool_calls", None)
    assert calls_of(events) == [("get_weather", {"city": "Paris", "days": 3})]
    assert num_tokens < len(ids) / 10
