"""Hermes' tool calls: what is told does not depend on where the text is cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuserve.serving.tools.families import HERMES
from tests.helpers.tool_calls import INDEX, check_what_is_closed, told

ONE = '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}</tool_call>"}]}}\n</tool_call>'
TWO = '<tool_call>{"arguments":{"c":"\\"x\\\\"},"name":"g"}</tool_call>'


def parsed(*texts):
    return told(HERMES.parser(INDEX), texts)


CALL_F = ["f", '{"a": [1, {"b": "}</tool_call>"}]}']
CALL_G = ["g", '{"c":"\\"x\\\\"}']
CASES = {
    "no call": ("just <b>text</b> \n", ["just <b>text</b> \n"]),
    "white space only": (" \n", [" \n"]),
    "one": (ONE, [CALL_F]),
    "after text": (f"I look.\n\n{ONE}", ["I look.\n\n", CALL_F]),
    "two": (f"{ONE}\n{TWO}\n", [CALL_F, CALL_G]),
    "text after": (f"{ONE} so. ", [CALL_F, " so. "]),
    "text between": (f"{ONE} and {TWO}", [CALL_F, " and ", CALL_G]),
    "no end marker": (ONE.removesuffix("</tool_call>") + TWO, [CALL_F, CALL_G]),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', [["f", "{}"]]),
    "null": ('<tool_call>{"name": "f", "arguments": null}', [["f", "{}"]]),
    "a string": (r'<tool_call>{"name": "f", "arguments": "{\"a\": 1}"}', [["f", '{"a": 1}']]),
    "parameters": ('<tool_call>{"name":"f","parameters":{"a":1}}', [["f", '{"a":1}']]),
    "an escape": (r'<tool_call>{"name": "\u0066\"", "arguments": {}}', [['f"', "{}"]]),
    "other members": ('<tool_call>{"id": 7, "name": "f" , "arguments" : {} }', [["f", "{}"]]),
    "cut short": ('<tool_call>{"name": "f", "arguments": {"a": "b', [["f", '{"a": "b']]),
    "cut in the name": ('<tool_call>{"name": "f', []),
    "cut in the name, after text": ('I look.\n<tool_call>{"na', ["I look.\n"]),
    "cut in a marker": ("ok <tool_c", ["ok <tool_c"]),
    "no object": ("<tool_call>nothing</tool_call>", ["<tool_call>nothing</tool_call>"]),
    "no name": ('<tool_call>{"arguments": {}}!', ['<tool_call>{"arguments": {}}!']),
    "name is a number": ('<tool_call>{"name": 1} x', ['<tool_call>{"name": 1} x']),
    "no last brace": (
        '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}}\n</tool_call>' + TWO,
        [["f", '{"a": {"b": 1}}'], CALL_G],
    ),
    "no last brace, no arguments": ('<tool_call>{"name": "f" </tool_call>.', [["f", "{}"], "."]),
    "no last brace, arguments first": (
        '<tool_call>{"arguments": {"a": 1}, "name": "f"</tool_call>',
        [["f", '{"a": 1}']],
    ),
    "no last brace, null": ('<tool_call>{"name":"f","arguments":null</tool_call>', [["f", "{}"]]),
    "no last brace, no name": (
        '<tool_call>{"arguments": {"a": 1}</tool_call>',
        ['<tool_call>{"arguments": {"a": 1}</tool_call>'],
    ),
    "no last brace, cut in the end marker": (
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool',
        [["f", '{"a": 1}']],
    ),
    "another tag for the last brace": (
        '<tool_call>{"name": "f", "arguments": {"a": 1}</tool>',
        [["f", '{"a": 1}'], "</tool>"],
    ),
    "two braces missing": (
        '<tool_call>{"name": "f", "arguments": {"a": {"b": 1}</tool_call>',
        [["f", '{"a": {"b": 1}</tool_call>']],
    ),
    "broken, then a call": (f"<tool_call>{{}}{TWO}", ["<tool_call>{}", CALL_G]),
    "broken after the name": ('<tool_call>{"name": "f", 3 x', [["f", ""], "3 x"]),
    "broken value": ('<tool_call>{"name": "f", "arguments": ,', [["f", ""], ","]),
}


@pytest.mark.parametrize(("text", "wanted"), CASES.values(), ids=CASES)
def test_calls_are_found(text, wanted):
    assert parsed(text) == wanted
    assert parsed(*text) == wanted


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [ONE, TWO, "<tool_call>", "</tool_call>", "{", "}", '{"name": "f"', ", ", '"', "\\",
             ',"arguments":{}',
             '"arguments":', "[1]", " ", "\n", "ab", ":", "<", '{"name":"f","arguments":{"a":"']
        ),
        max_size=8,
    ).map("".join),
    st.lists(st.integers(1, 9), max_size=40),
)  # fmt: skip
def test_where_the_text_is_cut_changes_nothing(text, cuts):
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(text[start : start + cut])
        start += cut
    assert parsed(*pieces, text[start:]) == parsed(text)
    assert parsed(*text) == parsed(text)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.text(),
        st.recursive(st.none() | st.text() | st.integers(), st.lists, max_leaves=9),
        max_size=4,
    )
)
def test_any_arguments_pass_unchanged(value):
    for ascii_only in (True, False):
        written = json.dumps(value, ensure_ascii=ascii_only)
        assert parsed(f'<tool_call>{{"name": "f", "arguments": {written}}}') == [["f", written]]


def test_a_call_that_has_begun_is_not_closed():
    call = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    check_what_is_closed(HERMES.parser(0), call, len(call) - 20)


@pytest.mark.parametrize(
    ("end", "num_closed"), [("}</tool_call>", 1), ("</tool_call>", 1), ("</tool>", 0), ("", 0)]
)
def test_a_call_without_its_last_brace_is_complete_at_the_end_marker(end, num_closed):
    parser = HERMES.parser(0)
    parser.push('<tool_call>{"name": "f", "arguments": {"a": 1}' + end)
    parser.flush()
    assert (parser.num_calls, parser.num_closed) == (1, num_closed)
    assert parser.last_closed == bool(num_closed)


def test_arguments_are_told_while_they_are_written():
    parser = HERMES.parser(0)
    (call,) = parser.push('<tool_call>{"name": "f", "arguments": {"a')
    assert (call.name, call.arguments) == ("f", '{"a')
    (more,) = parser.push('": 1')  # a number is told when it has ended
    assert (more.id, more.arguments) == (None, '": ')
    assert parser.num_closed == 0
    (last,) = parser.push("}}")
    assert last.arguments == "1}"
    assert parser.num_closed == 1


@pytest.mark.parametrize("name", [None, "get_weather"])
def test_the_text_continues_an_opening(name):
    opening = HERMES.opening(name)
    parser = HERMES.parser(0, opening)
    rest = 'h", "arguments": {"a": 1}}' if name is None else ' {"a": 1}}'
    first, *others = parser.push(rest)
    assert first.name == (name or "h")
    assert first.arguments + "".join(o.arguments for o in others) == '{"a": 1}'
