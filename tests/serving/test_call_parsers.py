"""What all parsers of tool calls promise: about thoughts, white space, cuts, faults and time."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuserve.serving.calls.events import Text, Thought, ToolCallDelta
from cpuserve.serving.prompts.chat_prompt import begins_thought
from cpuserve.serving.tools.families import FORMATS, HERMES, QWEN3_CODER
from cpuserve.serving.tools.harmony import HARMONY
from cpuserve.serving.tools.llama3_json import LLAMA3_JSON
from cpuserve.serving.tools.thoughts import THINK, Around, ThinkTags
from tests.helpers.depth import deep_but

CALL = {
    HERMES: '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>',
    QWEN3_CODER: "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n"
    "</tool_call>",
    LLAMA3_JSON: '<|python_tag|>{"name": "f", "parameters": {"a": "x"}}',
    HARMONY: "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
    '<|message|>{"a": "x"}<|call|>',
}
SCHEMAS = {"f": {"type": "object", "properties": {"a": {"type": "string"}}}}
TAGGED = [found for found in FORMATS if found is not HARMONY]  # thoughts stand between tags
every = pytest.mark.parametrize("found", FORMATS, ids=lambda f: f.name)
tagged = pytest.mark.parametrize("found", TAGGED, ids=lambda f: f.name)


def parsed(found, *texts, around=None):
    """Texts, (thought,) and [name, arguments] of calls, in order, neighbours joined."""
    parser = found.parser(0, schemas=SCHEMAS, around=around)
    told = []
    for piece in [p for text in texts for p in parser.push(text)] + parser.flush():
        if isinstance(piece, Text):
            told.append(
                told.pop() + piece.text if told and isinstance(told[-1], str) else piece.text
            )
        elif isinstance(piece, Thought):
            begun = told.pop()[0] if told and isinstance(told[-1], tuple) else ""
            told.append((begun + piece.text,))
        elif piece.name is not None:
            told.append([piece.name, piece.arguments])
        else:
            told[-1][1] += piece.arguments
    assert parser.num_calls == sum(isinstance(one, list) for one in told)
    return [[one[0], json.loads(one[1])] if isinstance(one, list) else one for one in told], parser


def read(found, text, around=None):
    """What is told of a text, however it is cut."""
    told, parser = parsed(found, text, around=around)
    assert parsed(found, *text, around=around)[0] == told
    return told, parser


F = ["f", {"a": "x"}]


@tagged
@pytest.mark.parametrize("tags", [THINK, ThinkTags("[THINK]", "[/THINK]")], ids=lambda t: t.open)
def test_a_call_in_a_thought_is_no_call(found, tags):
    call, begin, end = CALL[found], tags.open, tags.close
    gap = "" if found is LLAMA3_JSON else "\n"
    around, within = Around(gap, tags), Around(gap, tags, thinks=True)
    inner = f"I could write {call} but no"
    thought = f"{begin}\n{inner}\n{end}"
    for text, told in {
        thought: [(inner,)],
        f"{begin}{call}": [(call,)],
        f"\n{begin}{call}{call}{end}\n\nNo.": [(call + call,), "No."],
        f"So {begin}{call}{end}": ["So ", (call,)],
        f"{begin}\n\n{end}\n\nNo.": ["No."],
        f"{begin}a{end}\n{begin}b{end}c\n": [("a\n\nb",), "c\n"],
        f"a{begin}b{end}\nc": ["a", ("b",), "\nc"],
    }.items():
        assert read(found, text, around)[0] == told
    assert read(found, inner, within)[0] == [(inner,)]
    told, parser = read(found, f"{thought}\n\n{call}", around)
    assert told == [(inner,), F]
    assert parser.ends_with_call
    rest = thought.removeprefix(begin)
    assert read(found, f"{rest}\n\n{call}", within)[0] == [(inner,), F]
    told, parser = read(found, f"{call}{begin}{call}", around)
    assert told == [F, (call,)]
    assert not parser.ends_with_call


@every
def test_a_thought_ends_where_the_parser_says(found):
    begin, end = (
        ("<|channel|>analysis<|message|>", "<|end|>")
        if found is HARMONY
        else ("<think>", "</think>")
    )
    parser = found.parser(0)
    for text, within in ((begin, True), ("Hm", True), (end[:3], True), (end[3:], False)):
        parser.push(text)
        assert parser.in_thought == within


@tagged
def test_a_tag_in_quotes_begins_no_thought(found):
    text = "I mend how `<think>` is read.\n"
    assert read(found, f"{text}{CALL[found]}")[0] == [text, F]


@pytest.mark.parametrize("found", [HERMES, QWEN3_CODER], ids=lambda f: f.name)
def test_a_tag_in_arguments_begins_no_thought(found):
    call = CALL[found].replace("x", "<think>")
    assert read(found, f"{call}\n{CALL[found]}")[0] == [["f", {"a": "<think>"}], F]


@tagged
@pytest.mark.parametrize("gap", ["", "\n", "\n\n"], ids=repr)
def test_white_space_is_the_models_but_for_what_the_template_writes(found, gap):
    call, around = CALL[found], Around(gap)
    for before in ("I look.", "I look.\n", "\n I look. ", "a\n\n\n"):
        assert read(found, before + gap + call, around)[0] == [before, F]
    for behind in (" so. ", "\n\nso.\n"):
        assert read(found, call + behind, around)[0] == [F, behind]
    for blank in ("", " ", "\n\n"):
        assert read(found, blank + call + blank + call + blank, around)[0] == [F, F]
        assert read(found, blank, around)[0] == [blank][: len(blank)]


@tagged
def test_texts_around_a_call_stay_divided(found):
    call = CALL[found]
    text = "".join(t for t in read(found, f"I could write {call} but no")[0] if isinstance(t, str))
    assert text == "I could write  but no"
    text = "".join(t for t in read(found, f"I look.{call}So.")[0] if isinstance(t, str))
    assert text == "I look.\nSo."


@pytest.mark.parametrize(
    ("prompt", "begins"),
    [("a<think>\n", True), ("a<think>", True), ("<think>\n\n</think>\n\n", False), ("a", False)],
)
def test_a_prompt_begins_a_thought_with_its_last_tag(prompt, begins):
    assert begins_thought(prompt, THINK) == begins


def nested(found, depth):
    """A call with a list in a list and so on as its argument, and text that is like one."""
    value = "[" * depth + "]" * depth
    if found is QWEN3_CODER:
        call = f"<function=f>\n<parameter=list>\n{value}\n</parameter>\n</function>"
        return call, call[: depth + 50]
    head = {HERMES: "<tool_call>", LLAMA3_JSON: "", HARMONY: ""}[found]
    if found is HARMONY:
        call = f'<|channel|>commentary to=functions.f<|message|>{{"a": {value}}}<|call|>'
        return call, call[: depth + 50]
    call = f'{head}{{"name": "f", "parameters": {{"a": {value}}}}}'
    return call, call.replace('"f"', value)


@every
@pytest.mark.parametrize("depth", [3000, 30_000])
def test_deeply_nested_lists_are_no_fault(found, depth):
    call, other = nested(found, depth)
    parser = found.parser(0)
    assert sum(piece.arguments.count("[") for piece in parser.push(call)) == depth
    assert parser.last_closed
    parser = found.parser(0)
    assert parser.push(other) + parser.flush()


ATOMS = [
    *CALL.values(), "<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "</parameter>",
    "</function>", '{"name": "f"','"arguments": ', '"parameters": {', "}", "{", '"', "\\", "[",
    ",", "<think>", "</think>", "`", "\n", " ", ";", "\r\n", "<", "<|", "<|python_tag|>",
    "<|channel|>", "<|message|>", "<|start|>", "assistant", "final", "analysis",
    " to=functions.g", "<|end|>", "é",
    "null", "I look.",
]  # fmt: skip


@pytest.mark.deep
@every
@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(ATOMS) | st.text(max_size=3), max_size=12).map("".join),
    st.lists(st.integers(1, 9), max_size=40),
    st.sampled_from(["", "\n", "\n\n"]),
    st.booleans(),
)
def test_where_any_text_is_cut_changes_nothing(found, text, cuts, gap, thinks):
    around = Around(gap, thinks=thinks)

    def told(*texts):
        parser = found.parser(0, schemas=SCHEMAS, around=around)
        pieces = [p for one in texts for p in parser.push(one)] + parser.flush()
        joined = []
        for piece in pieces:
            if not isinstance(piece, ToolCallDelta):
                same = joined and joined[-1][0] is type(piece)
                joined.append((type(piece), joined.pop()[1] + piece.text if same else piece.text))
            elif piece.name is not None:
                joined.append((piece.name, piece.arguments))
            else:
                joined.append((joined[-1][0], joined.pop()[1] + piece.arguments))
        return joined, parser.num_closed, parser.ends_with_call

    parts, start = [], 0
    for cut in cuts:
        parts.append(text[start : start + cut])
        start += cut
    whole = told(text)
    assert told(*parts, text[start:]) == whole
    assert told(*text) == whole


ENDLESS = {
    "white space": " ",
    "line breaks": "\n",
    "words": "and so on ",
    "an open thought": "<think>",
    "quotes": '"',
    "objects": "{",
    "tags": "<",
    "channels": "<|channel|>",
    "semicolons": "; ",
}


@pytest.mark.matrix
@every
@pytest.mark.parametrize("begun", deep_but(["", "marker"], ["", "call", "half", "marker"]))
@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_little_is_held_back_so_that_time_is_linear(found, text, begun):
    """Each push looks at what is held, so that its time is bounded if that is."""
    call = CALL[found]
    parser = found.parser(0, schemas=SCHEMAS)
    parser.push({"": "", "call": call, "half": call[: call.index("x")], "marker": call[:12]}[begun])
    most = 0
    for char in text * (2400 // len(text)):
        parser.push(char)
        most = max(most, len(parser._held))
    assert most <= 1100
