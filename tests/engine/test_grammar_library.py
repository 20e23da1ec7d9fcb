"""What llguidance does by itself: each fact is the reason for code in engine/grammars.

If a test fails with a new version of llguidance, the code that its name refers to can go, once
the version is the oldest that pyproject.toml permits.
"""

import json
from functools import cache

import llguidance
import pytest
from llguidance.gbnf_to_lark import gbnf_to_lark

from cpuserve.engine.grammars.compiler import Compiler, GrammarError, take
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.random_texts import ENDS, VOCAB
from tests.helpers.tiny import tiny_model


@cache
def compiler():
    return Compiler(tiny_model("llama"), VOCAB, ENDS)


@cache
def byte_ids():
    tokenizer = Tokenizer.load(tiny_model("llama"))
    return {tokenizer.token_bytes(i): i for i in range(VOCAB)}


def after(grammar, text):
    """The matcher of llguidance after a text; None if the text does not fit."""
    matcher = compiler().compile(grammar)
    try:
        take(matcher, [byte_ids()[bytes([byte])] for byte in text.encode()])
    except GrammarError:
        return None
    return matcher


def fits(grammar, text):
    matcher = after(grammar, text)
    return matcher is not None and matcher.is_accepting()


def of_schema(schema):
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))


def of_lark(text):
    return llguidance.LLMatcher.grammar_from_lark(text)


INT = {"type": "integer"}
OBJECT = {"type": "object", "properties": {"a": INT, "b": INT}}
REFUSED = {
    "not": {**INT, "not": {"const": 3}},
    "if": {**OBJECT, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "dependentRequired": {**OBJECT, "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {**OBJECT, "dependentSchemas": {"a": {"required": ["b"]}}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "contains": {"type": "array", "contains": {"const": 1}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "unevaluatedProperties": {**OBJECT, "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#n", "$defs": {"b": {"$dynamicAnchor": "n", **INT}}},
    "oneOf": {"oneOf": [INT, {"type": "number"}]},
    "minProperties": {**OBJECT, "minProperties": 2},
    "minLength": {"type": "string", "minLength": 2.0},
    "format": {"type": "string", "format": "x-mine"},
    "bounds": {"type": "number", "maximum": 1e308},
    "ranges": {"type": "integer", "minimum": 10**25},
    "siblings": {
        "$ref": "#/$defs/n",
        "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n", "type": "object"}}}},
    },
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_it_refuses_keywords_that_schemas_py_expresses_by_others(keyword):
    with pytest.raises(GrammarError):
        compiler().compile(of_schema(REFUSED[keyword]))


LOOSE = [
    (OBJECT, '{"c": 1}'),  # objects are open: schemas.py closes them
    ({"type": "object", "additionalProperties": INT, "minProperties": 2}, '{"a": 1, "a": 1}'),
    ({"type": "string", "pattern": "a\\"}, '"a"'),  # schema_values.checked_pattern refuses it
    ({"type": "string", "format": "date"}, '"2023-02-29"'),  # schema_values._DATE
    ({"type": "string", "format": "date"}, '"0000-01-01"'),
    ({"type": "string", "format": "date-time"}, '"2023-02-29T10:00:00Z"'),
    ({"type": "string", "format": "time"}, f'"10:00:00.{"1" * 40}Z"'),  # _TIME
    ({"type": "string", "format": "duration"}, f'"P{"1" * 40}Y"'),  # _N
    (INT, "1" * 60),  # json_masks.Digits
    (OBJECT, '{"a"\n:1}'),  # json_masks.LineBreaks
]


@pytest.mark.parametrize(("schema", "text"), LOOSE)
def test_it_accepts_texts_that_grammars_here_do_not(schema, text):
    assert fits(of_schema(schema), text)


STRICT = [
    ({"type": "string", "format": "ipv6"}, '"::ffff:192.0.2.1"'),  # schema_values._IPV6
    ({"const": 2**53 + 1}, str(2**53 + 1)),  # numbers are doubles: schema_values.check_value
    ({"type": "integer", "maximum": 2**53 + 1}, str(2**53 + 1)),  # schema_values._inwards
    ({"type": "integer", "maximum": 2**63}, str(2**63)),  # schema_values.LARGEST
]


@pytest.mark.parametrize(("schema", "text"), STRICT)
def test_it_refuses_texts_that_fit_a_schema(schema, text):
    assert not fits(of_schema(schema), text)


def test_it_begins_texts_that_cannot_end_so_schema_finite_removes_their_schemas():
    endless = {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
    schema = {"anyOf": [{"$ref": "#/$defs/n"}, INT], "$defs": {"n": endless}}
    assert after(of_schema(schema), '{"a": {"a": {"a": {"a": {"a": ') is not None


def test_patterns_have_neither_look_around_nor_references_to_groups():
    for pattern in ("^(?!a).*$", "^(a)\\1$"):
        with pytest.raises(GrammarError):
            compiler().compile(of_schema({"type": "string", "pattern": pattern}))


def test_lists_of_one_recursive_schema_need_no_conversion():
    part = {"allOf": [{"$ref": "#/$defs/n"}]}
    node = {"type": "object", "properties": {"next": part}, "additionalProperties": False}
    for schema in (part, {"anyOf": [part, INT]}, {"type": "array", "items": part}):
        text = '[{"next": {"next": {}}}]' if "items" in schema else '{"next": {"next": {}}}'
        assert fits(of_schema({**schema, "$defs": {"n": node}}), text)


@pytest.mark.parametrize(
    "text", ['start: _list{"a"}\n_list{x}: x+', 'start: A\nA.2: "a"', "%import .foo.A\nstart: A"]
)
def test_lark_has_no_templates_priorities_and_imports_of_files(text):
    """lark_reader.py leaves priorities out, and refuses the others with their place."""
    with pytest.raises(GrammarError):
        compiler().compile(of_lark(text))


GBNF = [
    ('root ::= "\\u0041"', "A"),
    ('root ::= "a"{0} "b"', "b"),
    ('root ::= start\nstart ::= "b"', "b"),
]
GBNF += [("root ::= .", "\n")]


def fits_its_gbnf(grammar, text):
    try:
        return fits(of_lark(gbnf_to_lark(grammar)), text)
    except Exception:  # its converter raises Exception itself
        return False


@pytest.mark.parametrize(("grammar", "text"), GBNF)
def test_its_converter_of_gbnf_lacks_forms_that_gbnf_py_reads(grammar, text):
    assert not fits_its_gbnf(grammar, text)
    assert fits(compiler().prepare("grammar", grammar), text)


def test_a_lexeme_is_not_shortened_so_input_grammars_py_makes_one_terminal():
    """The first lexeme takes the backslash, and the escape after it cannot begin any more."""
    assert not fits(of_lark('start: a b\na: /.*/\nb: /\\\\n/ "x"'), "a\\nx")
    assert fits(of_lark('start: A\nA: /.*/ /\\\\n/ "x"'), "a\\nx")


def test_a_literal_does_not_match_the_special_token_of_its_text():
    """compiler.with_special adds the token."""
    ids = Tokenizer.load(tiny_model("llama")).masks.ids
    text, token = next((text, i) for text, i in ids.items() if i < VOCAB and i not in ENDS)
    assert not compiler().compile(of_lark(f"start: {json.dumps(text)}")).consume_tokens([token])
    assert compiler().compile(of_lark(f"start: <[{token}]>")).consume_tokens([token])
