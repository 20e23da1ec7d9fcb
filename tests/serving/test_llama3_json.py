"""Llama 3's tool calls: what is told does not depend on where the text is cut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuserve.serving.tools.llama3_json import LLAMA3_JSON, TAG
from tests.helpers.tool_calls import INDEX, check_what_is_closed, told

# The words of the templates of Llama 3.1, 3.2 and 3.3.
F = '{"name": "f", "parameters": {"a": [1, {"b": "}; {"}]}}'
G = '{"type": "function", "parameters": {"c":"\\"x\\\\"}, "name": "g"}'
CALL_F = ["f", '{"a": [1, {"b": "}; {"}]}']
CALL_G = ["g", '{"c":"\\"x\\\\"}']


def parsed(*texts, opening=""):
    return told(LLAMA3_JSON.parser(INDEX, opening), texts)


CASES = {
    "no call": (" just {text} \n", [" just {text} \n"]),
    "white space only": (" \n", [" \n"]),
    "one": (F, [CALL_F]),
    "white space around": (f"\n {F}\n", [CALL_F]),
    "tagged": (TAG + F, [CALL_F]),
    "two": (f"{F}; {G}", [CALL_F, CALL_G]),
    "two lines, tagged": (f"{TAG}{F}\n{TAG}{G}", [CALL_F, CALL_G]),
    "text, then a tag": (f"I look.\n\n{TAG}{F}", ["I look.\n\n", CALL_F]),
    "text, then an object": (f"I look.\n\n{F}", [f"I look.\n\n{F}"]),
    "text after": (f"{F} so. ", [CALL_F, " so. "]),
    "text after, then an object": (f"{F} and {G}", [CALL_F, f" and {G}"]),
    "text after, then a tag": (f"{F} and {TAG}{G}", [CALL_F, " and ", CALL_G]),
    "code": (f"{TAG}print('{{}}')", [f"{TAG}print('{{}}')"]),
    "code after text": (f"See:\n{TAG} x = 1", [f"See:\n{TAG} x = 1"]),
    "a JSON answer": ('{"city": "Paris"}', ['{"city": "Paris"}']),
    "a JSON answer with a name": (' {"name": "Paris", "a": 2} ', [' {"name": "Paris", "a": 2} ']),
    "a JSON answer, then a call": (f'{{"name": "x"}} {F}', [f'{{"name": "x"}} {F}']),
    "a JSON answer, then a tag": (f'{{"name": "x"}} {TAG}{F}', ['{"name": "x"} ', CALL_F]),
    "arguments": ('{"name": "f", "arguments": {"a": 1}}', [["f", '{"a": 1}']]),
    "null": ('{"name": "f", "parameters": null}', [["f", "{}"]]),
    "cut short": ('{"name": "f", "parameters": {"a": "b', [["f", '{"a": "b']]),
    "cut before the arguments": ('{"name": "f", "param', []),
    "cut behind the tag": (f"I look. {TAG}", ["I look. "]),
    "another object, cut": ('{"city": "P', ['{"city": "P']),
    "cut in a tag": (f"{F}<|pyth", [CALL_F, "<|pyth"]),
    "broken": ('\n{"name": "f", x', ['\n{"name": "f", x']),
    "broken after the name": ('{"name": "f", "parameters": {}, 3', [["f", "{}"], "3"]),
    "no name": ('{"parameters": {}}', ['{"parameters": {}}']),
}


@pytest.mark.parametrize(("text", "wanted"), CASES.values(), ids=CASES)
def test_calls_are_found(text, wanted):
    assert parsed(text) == wanted
    assert parsed(*text) == wanted


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [F, G, TAG, "<|", "{", "}", '{"name": "f"', ", ", '"', "\\", '"parameters":', "[1]",
             " ", "\n", ";", "ab", ":", "<", '{"name":"f","parameters":{"a":"']
        ),
        max_size=8,
    ).map("".join),
    st.lists(st.integers(1, 9), max_size=40),
    st.sampled_from(["", '{"name": "', '{"name": "f", "parameters":']),
)  # fmt: skip
def test_where_the_text_is_cut_changes_nothing(text, cuts, opening):
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(text[start : start + cut])
        start += cut
    whole = parsed(text, opening=opening)
    assert parsed(*pieces, text[start:], opening=opening) == whole
    assert parsed(*text, opening=opening) == whole


def test_a_call_that_has_begun_is_not_closed():
    call = '{"name": "f", "parameters": {"a": 1}};'
    check_what_is_closed(LLAMA3_JSON.parser(0), call, len(call) - 5)


def test_arguments_are_told_while_they_are_written():
    parser = LLAMA3_JSON.parser(0)
    assert parser.push('{"name": "f", ') == []
    (call,) = parser.push('"parameters": {"a')
    assert (call.name, call.arguments) == ("f", '{"a')
    (more,) = parser.push('": 1')  # a number is told when it has ended
    assert (more.id, more.arguments) == (None, '": ')
    assert parser.num_closed == 0
    (last,) = parser.push("}}")
    assert last.arguments == "1}"
    assert parser.num_closed == 1


@pytest.mark.parametrize("name", [None, "get_weather"])
def test_the_text_continues_an_opening(name):
    opening = LLAMA3_JSON.opening(name)
    rest = 'h", "parameters": {"a": 1}}' if name is None else ' {"a": 1}}'
    assert parsed(rest, opening=opening) == [[name or "h", '{"a": 1}']]


def test_a_forced_call_needs_no_arguments():
    assert parsed('h"}', opening=LLAMA3_JSON.opening(None)) == [["h", "{}"]]
