"""Structural tags as grammars: which texts they allow, and which tags are refused."""

import json

import pytest

from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.structured import CALLS, WITH_CALLS, StructuredOutputs, structured_from
from tests.helpers.grammars import allows  # noqa: F401

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
GET = {"begin": "<function=get>", "schema": CITY, "end": "</function>"}
ADD = {"begin": "<function=add>", "schema": {"type": "integer"}, "end": "</function>"}
OLD = {"type": "structural_tag", "structures": [GET, ADD], "triggers": ["<function="]}
CALL = '<function=get>{"city": "Rome"}</function>'
SUM = "<function=add>12</function>"


def of_format(**form):
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": form})


def tag(begin, content, end):
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def schema(**members):
    return {"type": "json_schema", "json_schema": members}


ANY, ONE = {"type": "any_text"}, {"type": "const_string", "value": "1"}
TAGS = [tag("<a>", schema(type="integer"), "</a>"), tag("<b>", ANY, "</b>")]
TRIGGERED = {"type": "triggered_tags", "triggers": ["<a", "<b"], "tags": TAGS}
SEPARATED = {"type": "tags_with_separator", "tags": TAGS, "separator": ","}


def check(allows, form, good, bad):  # noqa: F811
    wrong = [text for text in good if not allows(form, text)]
    assert not wrong, "not allowed"
    wrong = [text for text in bad if allows(form, text)]
    assert not wrong, "allowed"


@pytest.mark.parametrize("written", [OLD, json.dumps(OLD)], ids=["object", "text"])
def test_structures_begin_after_their_trigger_in_free_text(allows, written):  # noqa: F811
    form = StructuredOutputs(structural_tag=written)
    check(
        allows,
        form,
        ["", "hello <b> there", CALL, f"I call {CALL} and\n{SUM}{CALL} bye", "a <functio"],
        [
            "<function=",
            "<function=other>1</function>",
            "<function=get>1</function>",
            '<function=get>{"city": 1}</function>',
            "text <function=add>x</function>",
            f"{CALL} then <function=add>1",
        ],
    )


FORMATS = {
    "const": (ONE, ["1"], ["", "11", "2"]),
    "schema": (schema(type="integer"), ["12"], ["", "x"]),
    "regex": ({"type": "regex", "pattern": "a+b"}, ["aab"], ["b", "aabx"]),
    "gbnf": ({"type": "grammar", "grammar": 'root ::= "a" | "b" root'}, ["bba"], ["b", ""]),
    "any": (ANY, ["", "a\nb"], []),
    "any without": ({**ANY, "excludes": ["no", "<"]}, ["", "n o"], ["a no b", "<"]),
    "or": ({"type": "or", "elements": [ONE, schema(type="boolean")]}, ["1", "true"], ["", "1true"]),
    "sequence": (
        {"type": "sequence", "elements": [ONE, schema(type="integer"), ANY]},
        ["12", "13 and so on"],
        ["1", "2"],
    ),
    "text before a constant": (
        {"type": "sequence", "elements": [ANY, {"type": "const_string", "value": "!"}, ONE]},
        ["!1", "so\nso!1"],
        ["so", "so!", "so!2", "!1!1"],
    ),
    "tag": (tag("<x>", ANY, "</x>"), ["<x></x>", "<x>a <y> b</x>"], ["<x>", "<x></x>b", "a"]),
    "tag with two ends": (tag("<", ONE, ["/", ">"]), ["<1/", "<1>"], ["<1", "<1/>"]),
    "nested tags": (
        tag("<x>", {"type": "regex", "pattern": ".*"}, "</x>"), ["<x>a<b</x>"], ["<x></x></x>"],
    ),
    "tag with a grammar": (
        tag("<x>", {"type": "grammar", "grammar": 'root ::= "(" root? ")"'}, "</x>"),
        ["<x>(())</x>"],
        ["<x>(()</x>", "<x>(())"],
    ),
    "triggered": (
        TRIGGERED,
        ["", "x", "<a>1</a>", "x<b>y</b>z<a>2</a>", "<c>"],
        ["<a", "<a>x</a>", "<a>1</a><b>"],
    ),
    "at least one": (
        {**TRIGGERED, "at_least_one": True},
        ["<a>1</a>", "x <b>y</b> z", "<a>1</a><a>2</a>"],
        ["", "x", "<a>"],
    ),
    "the first one": (
        {**TRIGGERED, "stop_after_first": True},
        ["", "x", "<a>1</a>", "x<b></b>"],
        ["<a>1</a>x", "<a>1</a><a>1</a>"],
    ),
    "only one": (
        {**TRIGGERED, "stop_after_first": True, "at_least_one": True},
        ["<a>1</a>", "x<b></b>"],
        ["", "x", "<a>1</a>x"],
    ),
    "triggered in a tag": (
        tag("[", TRIGGERED, "]"),
        ["[]", "[x]", "[x<a>1</a>y]", "[<b>]</b>]"],
        ["[", "[<a>]", "[x]y"],
    ),
    "separated": (
        SEPARATED,
        ["", "<a>1</a>", "<a>1</a>,<b>x</b>,<a>2</a>"],
        ["x", "<a>1</a>,", "<a>1</a><a>1</a>"],
    ),
    "separated, at least one": (
        {**SEPARATED, "at_least_one": True, "stop_after_first": True},
        ["<a>1</a>"],
        ["", "<a>1</a>,<a>1</a>"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_allows_its_texts_and_no_others(allows, name):  # noqa: F811
    form, good, bad = FORMATS[name]
    check(allows, of_format(**form), good, bad)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, "format"),
        ([], "structural_tag"),
        ("{", "no JSON"),
        ({"format": {}}, "format.type"),
        ({"format": {"type": "qwen_xml_parameter"}}, "qwen_xml_parameter"),
        ({"format": ["x"]}, "format"),
        ({"format": {"type": "const_string"}}, "format.value"),
        ({"format": {"type": "json_schema", "json_schema": 1}}, "json_schema"),
        ({"format": {"type": "json_schema", "json_schema": "{"}}, "no JSON"),
        ({"format": {"type": "or", "elements": []}}, "elements"),
        ({"format": {"type": "sequence", "elements": [ANY, schema(type="integer")]}}, "any_text"),
        ({"format": tag("<", ANY, 1)}, "end"),
        ({"format": tag("<", None, ">")}, "content"),
        ({"format": {**TRIGGERED, "triggers": []}}, "triggers"),
        ({"format": {**TRIGGERED, "triggers": ["<c"]}}, "begin"),
        ({"format": {**TRIGGERED, "triggers": ["<", "<a"]}}, "begin"),
        ({"format": {**TRIGGERED, "triggers": ["<a", "<b", "<c"]}}, "no tag"),
        ({"format": {**TRIGGERED, "at_least_one": "x"}}, "at_least_one"),
        ({"format": {**TRIGGERED, "tags": [1]}}, "begin"),
        ({"structures": [GET]}, "triggers"),
        ({"structures": [{"begin": "<"}], "triggers": ["<"]}, "schema"),
        ({"structures": 1, "triggers": ["<"]}, "structures"),
    ],
    ids=str,
)
def test_a_bad_tag_is_refused_with_the_place(given, named):
    with pytest.raises(InvalidRequest, match=named) as refused:
        structured_from({"structural_tag": given})
    assert refused.value.role == "structured_outputs"


def test_formats_that_nest_too_deeply_are_refused():
    form = ONE
    for _ in range(40):
        form = {"type": "sequence", "elements": [form]}
    with pytest.raises(InvalidRequest, match="too deeply"):
        of_format(**form)


def test_equal_tags_have_one_key_and_calls_may_take_their_place(allows):  # noqa: F811
    form = StructuredOutputs(structural_tag=json.dumps(OLD, indent=2))
    assert form.key == StructuredOutputs(structural_tag=OLD).key
    assert form.key[0] == CALLS
    both = StructuredOutputs(structural_tag=OLD, calls='start: "!" /[0-9]/')
    assert both.key[0] == WITH_CALLS
    check(allows, both, ["!1", f"x{CALL}"], ["<function=x"])


def test_a_schema_that_no_grammar_can_express_is_an_error_with_its_place(allows):  # noqa: F811
    from cpuserve.engine.grammars.compiler import GrammarError

    form = of_format(**tag("<x>", schema(type="array", uniqueItems=True), "</x>"))
    with pytest.raises(GrammarError, match=r"format\.content"):
        allows(form, "<x>[]</x>")
