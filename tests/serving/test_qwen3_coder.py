"""Qwen3-Coder's tool calls: what is told does not depend on where the text is cut."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpuserve.base.errors import InvalidRequest
from cpuserve.engine.grammars.compiler import Compiler
from cpuserve.serving.calls.call import GenerateCall, Prompt
from cpuserve.serving.tools.families import QWEN3_CODER
from cpuserve.serving.tools.learn import LearnedFormat
from cpuserve.serving.tools.use import tool_use
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import tiny_end_ids, tiny_model
from tests.helpers.tool_calls import INDEX, check_what_is_closed, told

PARAMETERS = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "n": {"type": "integer"},
        "yes": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "string"}},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["text"],
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
SCHEMAS = {"f": PARAMETERS}


def call(*arguments, name="f"):
    """A call in the format; arguments: pairs of a key and a text."""
    inner = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in arguments)
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


def parsed(*texts, opening=""):
    return told(QWEN3_CODER.parser(INDEX, opening, SCHEMAS), texts)


ONE, NONE = call(("text", "Paris")), call()
CALL_ONE, CALL_NONE = ["f", '{"text": "Paris"}'], ["f", "{}"]
BARE = ONE.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
CASES = {
    "no call": (" just <b>text</b> \n", [" just <b>text</b> \n"]),
    "white space only": (" \n", [" \n"]),
    "one": (ONE, [CALL_ONE]),
    "after text": (f"I look.\n\n{ONE}\n", ["I look.\n\n", CALL_ONE]),
    "two": (f"{ONE}\n{NONE}", [CALL_ONE, CALL_NONE]),
    "text between": (f"{ONE} and {NONE}", [CALL_ONE, " and ", CALL_NONE]),
    "without a marker": (f"So: {BARE} then", ["So: ", CALL_ONE, " then"]),
    "values": (
        call(("n", "-3"), ("yes", "True"), ("list", '["a"]'), ("new", "1.5")),
        [["f", '{"n": -3, "yes": true, "list": ["a"], "new": 1.5}']],
    ),
    "no JSON": (
        call(("n", "many"), ("list", "NaN"), ("new", "a b")),
        [["f", '{"n": "many", "list": "NaN", "new": "a b"}']],
    ),
    "strings": (
        call(("text", '"7"\n\n <b>\\n</b>'), ("maybe", "null"), ("text", "")),
        [["f", '{"text": "\\"7\\"\\n\\n <b>\\\\n</b>", "maybe": null, "text": ""}']],
    ),
    "line breaks of the value": (call(("text", "\n a \n")), [["f", '{"text": "\\n a \\n"}']]),
    "other line breaks": (
        "<function=f>\r\n<parameter=text>\r\na\r\n</parameter></function>",
        [["f", '{"text": "a"}']],
    ),
    "on one line": (
        "<function=f><parameter=text>a</parameter></function>",
        [["f", '{"text": "a"}']],
    ),
    "another function": (call(("text", "1"), name="g"), [["g", '{"text": 1}']]),
    "cut in a string": (ONE.partition("is")[0], [["f", '{"text": "Par']]),
    "cut in an end": (ONE.partition("ameter>\n</f")[0], [["f", '{"text": "Paris\\n</par']]),
    "cut in a number": (call(("n", "1")).partition("\n</par")[0], [["f", '{"n": ']]),
    "cut in the name": ("<tool_call>\n<function=f", []),
    "cut in a marker": ("ok <func", ["ok <func"]),
    "no function": ("<tool_call>\n{}</tool_call>", ["<tool_call>\n{}</tool_call>"]),
    "no name": ("<function=>x", ["<function=>x"]),
    "broken": ("<function=f>\nx</function>", [["f", "{"], "x</function>"]),
    "broken, then a call": (
        f"<tool_call> <function=\n{ONE}",
        ["<tool_call> <function=\n", CALL_ONE],
    ),
}


@pytest.mark.parametrize(("text", "wanted"), CASES.values(), ids=CASES)
def test_calls_are_found(text, wanted):
    assert parsed(text) == wanted
    assert parsed(*text) == wanted


@settings(max_examples=500, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [ONE, NONE, BARE, "<tool_call>", "</tool_call>", "<function=", "f>", "</function>", ">",
             "<parameter=", "text>", "n>", "</parameter>", "\n", "\r\n", " ", "<", "1", '"a', "</",
             "<function=f>\n<parameter=text>", "\r\n</parameter>"]
        ),
        max_size=9,
    ).map("".join),
    st.lists(st.integers(1, 9), max_size=40),
    st.sampled_from(["", QWEN3_CODER.opening(None), QWEN3_CODER.opening("f")]),
)  # fmt: skip
def test_where_the_text_is_cut_changes_nothing(text, cuts, opening):
    pieces, start = [], 0
    for cut in cuts:
        pieces.append(text[start : start + cut])
        start += cut
    whole = parsed(text, opening=opening)
    assert parsed(*pieces, text[start:], opening=opening) == whole
    assert parsed(*text, opening=opening) == whole


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\r")), st.integers(-99, 99))
def test_any_string_and_number_pass(text, number):
    ((name, arguments),) = parsed(call(("text", text), ("n", str(number))))
    assert (name, json.loads(arguments)) == ("f", {"text": text, "n": number})


@pytest.mark.parametrize(
    "schema", [{"anyOf": True}, {"oneOf": 1}, {"enum": 2.5}, {"type": {}}, {"anyOf": [1]}, 3]
)
def test_a_value_whose_schema_is_invalid_is_read_as_json(schema):
    parser = QWEN3_CODER.parser(INDEX, "", {"f": {"properties": {"n": schema}}})
    assert told(parser, [call(("n", "5"))]) == [["f", '{"n": 5}']]


@pytest.mark.parametrize(("inmost", "value"), [("string", '"5"'), ("integer", "5")])
def test_a_value_whose_schema_is_nested_deeply_is_read_by_the_inmost_type(inmost, value):
    schema = {"type": inmost}
    for _ in range(5000):
        schema = {"anyOf": [schema, {"type": "null"}]}
    parser = QWEN3_CODER.parser(INDEX, "", {"f": {"properties": {"n": schema}}})
    assert told(parser, [call(("n", "5"))]) == [["f", f'{{"n": {value}}}']]


def test_a_call_that_has_begun_is_not_closed():
    call = "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>"
    check_what_is_closed(QWEN3_CODER.parser(0, "", SCHEMAS), call, call.index("1"))


def test_strings_are_told_while_they_are_written():
    parser = QWEN3_CODER.parser(0, "", SCHEMAS)
    (begun,) = parser.push("<tool_call>\n<function=f>\n<par")
    assert (begun.name, begun.arguments) == ("f", "{")
    pieces = parser.push("ameter=text>\nPar")
    assert "".join(piece.arguments for piece in pieces) == '"text": "Par'
    assert [piece.arguments for piece in parser.push("is\n</param")] == ["i"]
    assert parser.num_closed == 0
    pieces = parser.push("eter>\n</function>")
    assert "".join(piece.arguments for piece in pieces) == 's"}'
    assert parser.num_closed == 1


@pytest.fixture(scope="module")
def matches():
    """Whether a grammar allows a text, and no more behind it."""
    compiler = Compiler(tiny_model("llama"), 512, sorted(tiny_end_ids("llama")))
    tokenizer = Tokenizer.load(tiny_model("llama"))

    def matches(form, text):
        matcher = compiler.compile(compiler.prepare(*form.key))
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_stopped()

    return matches


def forced(tool, name=None):
    strict = {**tool, "function": {**tool["function"], "strict": True}}
    asked = GenerateCall(tools=[strict], tool_choice="required", tool_name=name)
    return tool_use(asked, LearnedFormat(QWEN3_CODER))


@pytest.mark.parametrize("name", [None, "f"])
@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ([("text", "a <b>\n</b>\n")], True),
        ([("text", ""), ("n", "7"), ("list", '["x"]'), ("maybe", "?")], True),
        ([("n", "7")], False),
        ([("text", ""), ("n", "seven")], False),
        ([("text", ""), ("other", "7")], False),
    ],
    ids=str,
)
def test_a_strict_call_has_the_arguments_of_its_schema(matches, name, arguments, fits):
    use = forced(TOOL, name)
    text = call(*arguments).removeprefix(use.opening).removesuffix("\n</tool_call>")
    assert matches(use.form, text) == fits
    if fits:
        pieces = use.parser(0, Prompt([]), use.opening).push(text)
        written = json.loads("".join(piece.arguments for piece in pieces))
        assert written["text"] == arguments[0][1]


def test_what_a_strict_string_cannot_keep_is_refused():
    limited = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 3}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": limited}}
    with pytest.raises(InvalidRequest, match="maxLength of a string is not supported"):
        forced(tool)


ROOT = {
    "$defs": {
        "Mode": {"type": "string", "enum": ["1", "on"]},
        "Size": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/Mode"}]},
        "Loop": {"$ref": "#/$defs/Loop"},
        "a/b": {"type": "object"},
    }
}
# Schemas, and what the texts of a value become.
TYPED = {
    "boolean or null": (
        {"type": ["boolean", "null"]},
        {"True": True, "false": False, "null": None, "NULL": None, "1": True, "no": "no"},
    ),
    "boolean": ({"type": "boolean"}, {"TRUE": True, "0": False, "null": None}),
    "string or null": (
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"null": None, "nullable": "nullable", "nu": "nu", "5": "5", "": "", "a\nb": "a\nb"},
    ),
    "string": ({"type": "string"}, {"null": "null", "5": "5", "true": "true", "[1]": "[1]"}),
    "reference": ({"$ref": "#/$defs/Mode"}, {"1": "1"}),
    "all of a reference": ({"allOf": [{"$ref": "#/$defs/Mode"}], "default": "on"}, {"1": "1"}),
    "union by reference": ({"$ref": "#/$defs/Size"}, {"7": 7, "on": "on"}),
    "escaped reference": ({"$ref": "#/$defs/a~1b"}, {'{"k": 1}': {"k": 1}}),
    "reference in a circle": ({"$ref": "#/$defs/Loop"}, {"7": 7, "x": "x"}),
    "reference to nothing": ({"$ref": "#/$defs/No"}, {"7": 7}),
    "reference to elsewhere": ({"$ref": "https://x.test/a.json"}, {"7": 7}),
    "text constant": ({"const": "7"}, {"7": "7"}),
    "number constant": ({"const": 7}, {"7": 7}),
    "texts": ({"enum": ["7", "true"]}, {"7": "7", "true": "true"}),
    "texts and null": ({"enum": ["7", None]}, {"7": "7", "null": None}),
    "texts and numbers": ({"enum": ["a", 7]}, {"7": 7, "a": "a"}),
    "integer or string": ({"type": ["string", "integer"]}, {"7": 7, "7.5": "7.5", "+7": 7}),
    "integer": ({"type": "integer"}, {"007": 7, " 7 ": 7, "7.5": 7.5, "many": "many"}),
    "number": ({"type": "number"}, {"1e3": 1000.0, ".5": 0.5, "1e999": "1e999", "nan": "nan"}),
    "number or string": ({"oneOf": [{"type": "string"}, {"type": "number"}]}, {"2": 2, "x": "x"}),
    "object or string": (
        {"anyOf": [{"type": "object"}, {"type": "string"}]},
        {'{"a": [1]}': {"a": [1]}, "[1]": "[1]", "{": "{"},
    ),
    "array": ({"type": "array"}, {"[1, 2]": [1, 2], "NaN": "NaN", "[NaN]": "[NaN]"}),
    "words of other languages": ({"type": "int"}, {"7": 7}),
    "nothing": ({}, {"7": 7, "x": "x", '{"a": 1}': {"a": 1}}),
}


@pytest.mark.parametrize(("schema", "values"), TYPED.values(), ids=TYPED)
def test_types_are_read_through_the_whole_schema_in_vllms_order(schema, values):
    schemas = {"f": {**ROOT, "properties": {"a": schema, "b": {"type": "string"}}}}
    for text, value in values.items():
        for texts in ([call(("a", text), ("b", "x"))], [*call(("a", text), ("b", "x"))]):
            ((_, arguments),) = told(QWEN3_CODER.parser(INDEX, "", schemas), texts)
            read = json.loads(arguments)
            assert read == {"a": value, "b": "x"}
            assert type(read["a"]) is type(value)


@pytest.mark.parametrize("kind", ["string", "integer", "array"])
@pytest.mark.parametrize("gap", ["\n", ""])
def test_a_missing_end_of_a_value_is_the_next_tag(kind, gap):
    value = {"string": "Paris", "integer": "7", "array": "[1]"}[kind]
    schemas = {"f": {"properties": {"a": {"type": kind}, "b": {"type": "integer"}}}}
    wanted = {"a": value if kind == "string" else json.loads(value), "b": 3}
    for text in (
        f"<function=f>\n<parameter=a>\n{value}{gap}<parameter=b>\n3\n</parameter>\n</function>",
        f"<function=f>\n<parameter=b>\n3\n</parameter>\n<parameter=a>\n{value}{gap}</function>",
        f"<function=f>\n<parameter=b>\n3{gap}<parameter=a>\n{value}{gap}</function>\n</tool_call>",
    ):
        for texts in ([text], [*text]):
            parser = QWEN3_CODER.parser(INDEX, "", schemas)
            ((name, arguments),) = told(parser, texts)
            assert (name, json.loads(arguments)) == ("f", wanted)
            assert parser.last_closed


def test_a_text_that_may_be_null_is_told_while_it_is_written():
    schemas = {"f": {"properties": {"a": {"type": ["string", "null"]}}}}
    parser = QWEN3_CODER.parser(0, "", schemas)
    parser.push("<function=f>\n<parameter=a>\nnul")
    assert "".join(p.arguments for p in parser.push("ls in C and more")) == '"nulls in C and more'


@pytest.mark.parametrize(
    ("schema", "fits", "other"),
    [
        ({"$ref": "#/$defs/Mode"}, ["1", "on"], ["2", "null"]),
        ({"allOf": [{"$ref": "#/$defs/Mode"}]}, ["1"], ["2"]),
        ({"enum": ["a", None, 7, True]}, ["a", "null", "7", "true"], ["None", "True", "b"]),
        ({"const": "x"}, ["x"], ["y"]),
        ({"type": ["string", "null"]}, ["null", "any"], ["a</function>", "a<parameter=b>"]),
        ({"type": ["boolean", "null"]}, ["true", "null", "True", "None"], ["TRUE", "x"]),
    ],
    ids=str,
)
def test_a_strict_value_has_the_types_of_the_whole_schema(matches, schema, fits, other):
    parameters = {"type": "object", **ROOT, "properties": {"a": schema}, "required": ["a"]}
    use = forced({"type": "function", "function": {"name": "f", "parameters": parameters}}, "f")
    for value, good in (*((v, True) for v in fits), *((v, False) for v in other)):
        text = call(("a", value)).removeprefix(use.opening).removesuffix("\n</tool_call>")
        assert matches(use.form, text) == good, value
