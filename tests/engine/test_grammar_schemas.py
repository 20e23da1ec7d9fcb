"""Every keyword of JSON Schema is kept, or refused with its name and place; nothing is in between.

Texts are random walks over what the masks allow, and an independent validator judges them.
"""

import datetime
import ipaddress
import json
import random

import jsonschema
import pytest

from cpuserve.engine.grammars.compiler import GrammarError
from cpuserve.engine.grammars.schema_values import KEPT_FORMATS, PATTERNS
from tests.helpers.depth import deep_but
from tests.helpers.random_texts import Walker

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_2019 = "https://json-schema.org/draft/2019-09/schema"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def obj(*required, **properties):
    """An object with these properties, of which some are required."""
    return {"type": "object", "properties": properties, "required": list(required)}


OTHER_FORMATS = ("uri-reference", "iri", "regex", "json-pointer", "idn-email", "int32", "x-mine")
STR, INT, NUM, BOOL, NULL = (
    {"type": name} for name in ("string", "integer", "number", "boolean", "null")
)
CAT = obj("kind", "lives", kind={"const": "cat"}, lives=INT)
DOG = obj("kind", kind={"const": "dog"}, good=BOOL)
NODE = {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, NULL]}}}

# keyword -> schemas that are kept: every text of theirs is valid.
KEPT = {
    "$schema": [{"$schema": DRAFT_7, **obj("a", a=INT)}],
    "$vocabulary": [{"$vocabulary": {}, **BOOL}],
    "$id": [{"$id": "https://example.com/a", "$ref": "a#/$defs/b", "$defs": {"b": BOOL}}],
    "$ref": [
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"enum": ["x"]}}},
        {"$ref": "#/$defs/%C3%A9", "$defs": {"é": BOOL}},
        {"properties": {"a": {"$ref": "#/properties/b"}, "b": BOOL}, "required": ["a"]},
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        {"$ref": "#/$defs/cat", "required": ["extra"], "$defs": {"cat": CAT}},
    ],
    "$anchor": [{"$ref": "#here", "$defs": {"b": {"$anchor": "here", **BOOL}}}],
    "$dynamicRef": [{"$dynamicRef": "#n", "$defs": {"b": {"$dynamicAnchor": "n", **BOOL}}}],
    "$dynamicAnchor": [{"$ref": "#n", "$defs": {"b": {"$dynamicAnchor": "n", **BOOL}}}],
    "$defs": [{"$defs": {"unused": {"not": {"pattern": "a"}}}, **BOOL}],
    "$comment": [{"$comment": "no effect", **BOOL}],
    "allOf": [
        {"allOf": [obj("a", a=INT), obj("b", b=BOOL)]},
        {"allOf": [{"$ref": "#/$defs/cat"}], "$defs": {"cat": CAT}},
        {"allOf": [{"$ref": "#/$defs/cat"}, obj("x", x=BOOL)], "$defs": {"cat": CAT}},
        {"allOf": [{"minimum": 3}, {"maximum": 9}], **INT},
        {"allOf": [CAT, {"anyOf": [obj("u", u=INT), obj("v", v=INT)]}]},
    ],
    "anyOf": [
        {"anyOf": [INT, NULL, CAT, {"type": "array", "items": BOOL, "maxItems": 2}]},
        {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], **obj(a=INT, b=BOOL)},
        {"anyOf": [obj("a", a=INT), obj("b", b=BOOL)], "properties": {"c": NULL}},
    ],
    "oneOf": [
        {
            "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
            "$defs": {"cat": CAT, "dog": DOG},
        },
        {"oneOf": [STR, INT, NULL]},
        {"oneOf": [{"const": 1}, {"const": "1"}, {"enum": [2, True]}]},
        {"oneOf": [obj("a", a=INT), obj("b", b=INT)]},
        {"oneOf": [{"required": ["a"]}, {"properties": {"a": False}}], **obj(a=INT, c=BOOL)},
        {"oneOf": [{"oneOf": [CAT, DOG]}, obj("kind", kind={"enum": ["cow", "ox"]})]},
        {"oneOf": [obj(kind={"const": "a"}, x=INT), obj(kind={"const": "b"}, x=INT)]},
        {"oneOf": [obj(t={"const": 1}, u={"const": n}) for n in (1, 2)] + [obj(t={"const": 2})]},
        {"oneOf": [{"required": [name]} for name in "abc"], **obj("x", x=INT, a=INT, b=INT, c=INT)},
        {"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]},
        {"oneOf": [{"maximum": 3}, {"minimum": 9}], **INT},
        {"oneOf": [{"maxLength": 3, **STR}, {"minLength": 2, **STR}]},
        {"oneOf": [{"maxLength": 3, **STR}, {"enum": ["ab", "abcd"]}, BOOL]},
    ],
    "not": [
        {"not": {"enum": ["b", 3]}, "enum": ["a", "b", 3]},
        {"not": {"type": ["object", "array", "number"]}},
        {"not": {"required": ["a"]}, **obj(a=INT, b=INT)},
        {"not": {"enum": ["b", "bc", "", "\n", 3]}, **STR},
        {"not": {"const": "b"}},
        {"not": {"minimum": 3}, **INT},
        {"not": {"maxItems": 1}, "type": "array", "items": BOOL},
        {"not": {"properties": {"a": {"const": True}}, "required": ["a"]}, **obj(a=BOOL)},
        {"not": False, **BOOL},
    ],
    "if": [
        {"if": {"minLength": 3}, "then": {"pattern": "a"}, **STR},
        {"if": {"pattern": "^a"}, "then": {"maxLength": 3}, "else": {"minLength": 2}, **STR},
        {
            "if": {"properties": {"a": {"const": "x"}}, "required": ["a"]},
            "then": {"required": ["b"]},
            **obj("a", a=STR, b=INT),
        },
        {
            "if": {"properties": {"a": {"maximum": 17}}},
            "then": {"required": ["b"]},
            "else": {"required": ["c"]},
            **obj("a", a=INT, b=BOOL, c=BOOL),
        },
        {
            "if": {"properties": {"a": {"const": "x"}}, "required": ["a"]},
            "then": {"required": ["b"]},
            "else": {"properties": {"b": False}},
            **obj(a={"enum": ["x", "y"]}, b=INT),
        },
        {
            "if": {"properties": {"a": {"const": True}}},
            "then": {"required": ["b"]},
            **obj("a", a=BOOL, b=INT),
        },
        {"if": {"required": ["a"]}, "then": obj("b", b=BOOL), **obj(a=INT)},
    ],
    "then": [
        {"then": False, **BOOL},
        {"if": BOOL, "then": {"const": True}, "type": ["boolean", "null"]},
    ],
    "else": [{"else": False, **BOOL}, {"if": BOOL, "else": NULL, "type": ["boolean", "null"]}],
    "dependentSchemas": [
        {"dependentSchemas": {"a": obj("b", b=BOOL)}, **obj(a=INT)},
        {"dependentSchemas": {}},
    ],
    "dependentRequired": [
        {"dependentRequired": {"a": ["b"], "b": ["c"]}, **obj(a=INT, b=INT, c=INT)},
        {"dependentRequired": {}, **obj("a", a=INT)},
        {"dependentRequired": {"a": []}, **obj(a=INT)},
    ],
    "dependencies": [
        {
            "$schema": DRAFT_7,
            "dependencies": {"a": ["b"], "b": obj("c", c=BOOL)},
            **obj(a=INT, b=INT),
        },
    ],
    "prefixItems": [{"type": "array", "prefixItems": [INT, BOOL], "items": False, "minItems": 1}],
    "items": [
        {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3},
        {"$schema": DRAFT_7, "type": "array", "items": [INT, BOOL], "additionalItems": False},
        {"items": BOOL, "maxItems": 3},
    ],
    "additionalItems": [
        {"$schema": DRAFT_7, "items": [INT], "additionalItems": BOOL, "minItems": 3, "maxItems": 4},
    ],
    "contains": [
        {"type": "array", "contains": {"const": 7}, "items": INT, "maxItems": 4},
        {"type": "array", "prefixItems": [STR, INT], "contains": INT, "maxItems": 3},
        {"type": "array", "contains": BOOL, "minContains": 2, "maxItems": 3},
        {"type": ["array", "null"], "contains": BOOL, "maxItems": 2},
    ],
    "minContains": [
        {"type": "array", "contains": STR, "minContains": 0, "items": INT, "maxItems": 2}
    ],
    "maxContains": [{"type": "array", "contains": True, "maxContains": 2, "items": INT}],
    "properties": [obj("b", a=INT, b=BOOL), obj(), {"properties": {"a": False, "b": True}}],
    "patternProperties": [
        {
            "type": "object",
            "patternProperties": {"^x": INT, "^y": BOOL},
            "additionalProperties": False,
        },
        {"patternProperties": {"^x": INT}, **obj("a", a=BOOL)},
    ],
    "additionalProperties": [
        {"additionalProperties": INT, **obj("a", a=BOOL), "maxProperties": 3, "minProperties": 2},
        {"additionalProperties": False, **obj("a", a=BOOL)},
        {"additionalProperties": True, **obj("a", a=BOOL)},
    ],
    "propertyNames": [
        {"type": "object", "propertyNames": STR, "additionalProperties": NUM},
        {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": INT},
        {"type": "object", "propertyNames": {"pattern": "^[a-z]{2}$"}, "additionalProperties": INT},
        {"type": "object", "propertyNames": {"minLength": 2, "maxLength": 3}, "maxProperties": 2},
        {"propertyNames": {"pattern": "^a"}, **obj("ab", ab=INT, b=INT)},
        {"propertyNames": {"$ref": "#/$defs/n"}, "type": "object", "$defs": {"n": {"const": "k"}}},
        {"propertyNames": {"format": "date"}, "type": "object", "additionalProperties": NULL},
        {"propertyNames": {"format": "date"}, **obj(a=INT)},
        {"propertyNames": False, "type": "object"},
    ],
    "unevaluatedItems": [
        {"type": "array", "prefixItems": [INT], "unevaluatedItems": False},
        {"type": "array", "items": INT, "unevaluatedItems": False, "maxItems": 2},
    ],
    "unevaluatedProperties": [
        {"unevaluatedProperties": False, "allOf": [CAT, obj("x", x=BOOL)]},
        {"unevaluatedProperties": False, "anyOf": [CAT, DOG], "properties": {"x": INT}},
        {"unevaluatedProperties": BOOL, "maxProperties": 3, **obj("a", a=INT)},
        {"unevaluatedProperties": True, **obj("a", a=INT)},
    ],
    "type": [{"type": ["integer", "null"]}, STR, BOOL, {"type": "array", "maxItems": 1}],
    "const": [{"const": value} for value in (None, 5, -2.5, 'a"\\b', [1, {"a": []}], {"b": {}})],
    "enum": [{"enum": ["a", 1, 1.5, None, [2], {"k": True}, 2**53]}, {"enum": ["x", None], **STR}],
    "multipleOf": [
        {"multipleOf": 3, **INT},
        {"multipleOf": 0.25, "minimum": 0, "maximum": 9, **NUM},
    ],
    "maximum": [
        {"maximum": 2**63 - 1, "minimum": -(2**63), **INT},
        {"maximum": 2**64 - 1, "minimum": 0, **INT},
        {"maximum": 1.7976931348623157e308, "minimum": -1.7976931348623157e308, **NUM},
        {"maximum": 3.4028234663852886e38, "minimum": -3.4028234663852886e38, **NUM},
        {"maximum": 2**53 + 1, "minimum": 2**53 - 3, **INT},
        {"maximum": 5, "type": ["integer", "null"]},
    ],
    "exclusiveMaximum": [
        {"exclusiveMaximum": 3, "minimum": 0, **INT},
        {"exclusiveMaximum": 2.5, "minimum": 0, **INT},
        {"$schema": DRAFT_4, "maximum": 4, "exclusiveMaximum": True, "minimum": 3, **INT},
        {"exclusiveMaximum": 1, "minimum": 0.5, **NUM},
    ],
    "minimum": [
        {"minimum": 0, **INT},
        {"minimum": -0.5, **NUM},
        {"minimum": 1e-9, "maximum": 1, **NUM},
    ],
    "exclusiveMinimum": [
        {"exclusiveMinimum": 0, "maximum": 2, **INT},
        {"exclusiveMinimum": 0, **NUM},
        {"minimum": 5, "exclusiveMinimum": 7, "maximum": 9, **INT},
    ],
    "maxLength": [{"maxLength": 3, **STR}, {"maxLength": 3.0, **STR}, {"maxLength": 10**6, **STR}],
    "minLength": [{"minLength": 4, "maxLength": 6, **STR}],
    "pattern": [
        {"pattern": "^a+b$", **STR},
        {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", **STR},
        {"pattern": r"^(?!^[-+.]*$)[+-]?0*\d{0,3}\.?\d{0,2}0*$", **STR},
        {"pattern": r"^\\$", **STR},
        {"pattern": r"^[\w.]+@x\.org$", **STR},
        {"pattern": "^(a|b){2,3}$", "minLength": 3, **STR},
        {"pattern": "^$|^(?:[0-9a-f]{2})+$", **STR},
    ],
    "format": [
        {"format": name, **STR}
        for name in (
            "date-time",
            "date",
            "time",
            "duration",
            "email",
            "hostname",
            "ipv4",
            "ipv6",
            "uuid",
            "uri",
            "uri-reference",
            "iri",
            "regex",
            "json-pointer",
            "idn-email",
            "int32",
            "x-mine",
        )
    ]
    + [
        {"format": "int64", **INT},
        {"format": "double", **NUM},
        {"format": "date", "pattern": "^20", **STR},
    ],
    "uniqueItems": [
        {"type": "array", "uniqueItems": False, "items": INT, "maxItems": 3},
        {"type": "array", "uniqueItems": True, "items": INT, "maxItems": 1},
        {"type": "array", "uniqueItems": True, "items": {"enum": ["a", "b", 3]}},
        {"type": "array", "uniqueItems": True, "items": {"enum": [*"abcdefg"]}, "minItems": 2},
        {"type": "array", "uniqueItems": True, "items": BOOL},
    ],
    "maxItems": [{"type": "array", "maxItems": 2}],
    "minItems": [{"type": "array", "minItems": 2, "maxItems": 3, "items": BOOL}],
    "required": [
        {"type": "object", "required": ["x"], "maxProperties": 1},
        {"required": ["z"], **obj(a=INT)},
    ],
    "maxProperties": [
        {"type": "object", "maxProperties": 2, "additionalProperties": INT},
        {"maxProperties": 2, **obj("a", a=INT, b=INT, c=INT)},
    ],
    "minProperties": [
        {"minProperties": 1, **obj(a=INT, b=INT)},
        {"minProperties": 2, **obj(a=INT, b=INT, c=INT)},
        {"minProperties": 2, "maxProperties": 3, **obj("a", a=INT, b=INT, c=INT, d=INT)},
        {"type": "object", "minProperties": 1, "maxProperties": 3, "additionalProperties": NULL},
    ],
    **{
        name: [{name: {"a": ["b"]} if name == "default" else value, **obj("a", a=INT)}]
        for name, value in {
            "title": "t",
            "description": "d",
            "default": None,
            "deprecated": True,
            "readOnly": True,
            "writeOnly": True,
            "examples": [{"$ref": 1}],
        }.items()
    },
    "contentEncoding": [{"contentEncoding": "base64", **STR}],
    "contentMediaType": [{"contentMediaType": "application/json", **STR}],
    "contentSchema": [{"contentSchema": {"not": STR}, **STR}],
    "definitions": [{"$schema": DRAFT_7, "$ref": "#/definitions/a", "definitions": {"a": BOOL}}],
    "$recursiveRef": [
        {"$schema": DRAFT_2019, **obj("a", a={"anyOf": [NULL, {"$recursiveRef": "#"}]})}
    ],
    "$recursiveAnchor": [{"$schema": DRAFT_2019, "$recursiveAnchor": True, **BOOL}],
    "id": [{"$schema": DRAFT_4, "id": "https://example.com/x", **BOOL}],
    "x-guidance": [{"x-guidance": {"lenient": True, "coerce_one_of": True}, **obj("a", a=INT)}],
}

# What cannot be kept -> what the message has, beside the keyword.
REFUSED = [
    ("not", {"not": {"pattern": "a"}, **STR}, "#"),
    ("not", obj(a={"not": {"multipleOf": 3}, **INT}), "#/properties/a"),
    ("oneOf", {"oneOf": [INT, NUM]}, "#"),
    (
        "oneOf",
        obj(a={"items": {"oneOf": [CAT, obj("lives", lives=INT, kind=STR)]}}),
        "#/properties/a/items",
    ),
    (
        "oneOf",
        {"oneOf": [{"x-guidance": {"coerce_one_of": True}, **STR}, {"minLength": 2, **STR}]},
        "#",
    ),
    ("oneOf", {"x-guidance": {"coerce_one_of": True}, "oneOf": [INT, NUM]}, "#"),
    ("uniqueItems", obj(a={"type": "array", "items": INT, "uniqueItems": True}), "#/properties/a"),
    ("minProperties", {"type": "object", "minProperties": 2}, "the same name"),
    ("minProperties", {"minProperties": 9, **obj(**{f"k{i}": INT for i in range(20)})}, "#"),
    ("maxContains", {"type": "array", "contains": INT, "maxContains": 2}, "#"),
    ("minContains", {"type": "array", "contains": INT, "minContains": 1000}, "#"),
    ("propertyNames", {"type": "object", "propertyNames": {"pattern": "a", "maxLength": 3}}, "#"),
    ("unevaluatedItems", {"unevaluatedItems": False, "allOf": [{"prefixItems": [INT]}]}, "#"),
    (
        "unevaluatedProperties",
        {"unevaluatedProperties": False, "allOf": [{"anyOf": [CAT, DOG]}, obj(x=INT)]},
        "#",
    ),
    ("dependentRequired", {"dependentRequired": {f"k{i}": ["a"] for i in range(30)}}, "at most"),
    ("$ref", obj(a={"$ref": "#/$defs/none"}), "#/properties/a"),
    ("$ref", {"$ref": "https://example.com/elsewhere"}, "#"),
    (
        "$dynamicRef",
        {"$dynamicRef": "#n", "$defs": {k: {"$dynamicAnchor": "n"} for k in "ab"}},
        "#",
    ),
    ("pattern", {"pattern": "abc\\", **STR}, "backslash"),
    ("pattern", obj(a={"pattern": r"a\\\ "[:-1], **STR}), "#/properties/a"),
    ("patternProperties", {"patternProperties": {"a\\": INT}}, "backslash"),
    ("pattern", {"pattern": "^(?=a)b", **STR}, "look-around"),
    ("pattern", {"pattern": "^(?<!a)b", **STR}, "look-around"),
    ("pattern", {"pattern": r"^(a)\1$", **STR}, "groups"),
    ("const", {"const": 2**53 + 1}, "2^53"),
    ("enum", obj(a={"enum": [[{"a": 10**400}]]}), "#/properties/a"),
    ("minimum", {"minimum": 2**63, **INT}, "64 bits"),
    ("type", obj(a={"type": "sound"}), "sound"),
    ("type", {"type": []}, "empty"),
    ("enum", {"enum": 5}, "list"),
    ("multipleOf", {"multipleOf": 0}, "above 0"),
    ("maxLength", {"maxLength": -1}, "whole number"),
    ("required", {"required": "a"}, "list"),
    ("properties", {"properties": []}, "object"),
    ("anyOf", {"anyOf": []}, "list"),
    ("minimum", {"minimum": "1"}, "number"),
]

# Nothing finite fits these.
EMPTY = [
    False,
    {"not": {}},
    {"$ref": "#"},
    obj("a", a={"$ref": "#"}),
    {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    {
        "$ref": "#/$defs/a",
        "$defs": {"a": obj("b", b={"$ref": "#/$defs/b"}), "b": obj("a", a={"$ref": "#/$defs/a"})},
    },
    {
        "anyOf": [
            obj("a", a={"$ref": "#"}),
            {"type": "array", "items": {"$ref": "#"}, "minItems": 2},
        ]
    },
    {"allOf": [{"required": ["a"]}, obj(a={"$ref": "#"})], "type": "object"},
    {"minLength": 3, "maxLength": 2, **STR},
    {"minimum": 3, "maximum": 2, **INT},
    {"enum": ["a"], **INT},
    {"type": "object", "properties": {"a": INT}, "required": ["b"], "unevaluatedProperties": False},
]


FORMATS = jsonschema.FormatChecker(())  # those that are kept; others are annotations
for name in (*PATTERNS, *KEPT_FORMATS):
    if name in jsonschema.FormatChecker.checkers:
        FORMATS.checkers[name] = jsonschema.FormatChecker.checkers[name]
for name, kind in (("date-time", datetime.datetime), ("time", datetime.time)):
    FORMATS.checks(name, ValueError)(
        lambda value, kind=kind: not isinstance(value, str) or kind.fromisoformat(value) is not None
    )


@pytest.fixture(scope="module")
def walker():
    return Walker()


def validator(schema):
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    kind.check_schema(schema)
    return kind(schema, format_checker=FORMATS)


def check(walker, schema, count=12, kind="json"):
    rng = random.Random(json.dumps(schema))
    judge = validator(schema) if isinstance(schema, dict) else None
    values = walker.values(schema, rng, count, kind)
    for value in values:
        judge.validate(value)
    return values


def name(schema):
    return json.dumps(schema)[:70]


# Of each keyword, one schema is not deep.
SOME = [some[0] for some in KEPT.values()]


def accepts(walker, schema, text):
    """Whether a text fits a schema, by the masks of the bytes of the text."""
    matcher = walker.matcher("json", json.dumps(schema))
    of = {data: token for token, data in walker.bytes.items()}
    for byte in text.encode():
        if not matcher.consume_token(of[bytes([byte])]):
            return False
    return matcher.is_accepting()


ADDRESSES = [
    "::",
    "::1",
    "1::",
    "2001:db8::ff00:42:8329",
    "1:2:3:4:5:6:7:8",
    "::1.2.3.4",
    "::ffff:192.0.2.1",
    "64:ff9b::192.0.2.33",
    "1:2:3:4:5:6:255.0.0.10",
    "1:2:3:4:5:6:7::",
]
NO_ADDRESSES = ["", ":", ":::", "1::2::3", "1:2:3", "::12345", "::g", "1.2.3.4", "::256.0.0.1",
                "::01.2.3.4", "::1.2.3", "1:2:3:4:5:6:7:1.2.3.4", "1:2:3:4:5:6:7:8:9", "::1%eth0",
                "::1.2.3.4:5"]  # fmt: skip


@pytest.mark.parametrize("text", [*ADDRESSES, *NO_ADDRESSES])
def test_ipv6_has_every_form_of_an_address(walker, text):
    try:
        is_address = ipaddress.IPv6Address(text).scope_id is None
    except ValueError:
        is_address = False
    assert is_address == (text in ADDRESSES)
    schema = {"format": "ipv6", **STR}
    assert accepts(walker, schema, json.dumps(text)) == is_address


@pytest.mark.parametrize(
    "schema", deep_but(SOME, [s for some in KEPT.values() for s in some]), ids=name
)
def test_every_text_of_a_schema_is_valid(walker, schema):
    check(walker, schema)


# In these, closed objects are what the grammar can keep.
CLOSED = ("oneOf", "minProperties", "maxProperties")


@pytest.mark.parametrize(
    "schema",
    deep_but(SOME, [s for k, v in KEPT.items() if k not in CLOSED for s in v]),
    ids=name,
)
def test_every_text_of_a_schema_with_open_objects_is_valid(walker, schema):
    check(walker, schema, kind="open_json")


def test_the_table_has_every_keyword_of_drafts_4_to_2020():
    drafts = jsonschema.validators._META_SCHEMAS
    known = set()
    for kind in drafts.values():
        known |= kind.META_SCHEMA.get("properties", {}).keys()
        for part in kind.META_SCHEMA.get("allOf", ()):
            place = jsonschema.validators._REMOTE_WARNING_REGISTRY.resolver(kind.META_SCHEMA["$id"])
            known |= place.lookup(part["$ref"]).contents["properties"].keys()
    assert len(known) > 55
    assert not known - KEPT.keys() - {"extends", "disallow", "divisibleBy", "$recursiveAnchor"}


def mixed(rng, depth=0):
    """A random schema made of those of the table."""
    if depth > 1 or rng.random() < 0.3:
        return rng.choice(ALONE)

    def more():
        return mixed(rng, depth + 1)

    match rng.randrange(7):
        case 0 | 1 as n:
            return {("allOf", "anyOf")[n]: [more() for _ in range(rng.randint(1, 3))]}
        case 2:
            members = {name: more() for name in rng.sample("abcd", rng.randint(1, 3))}
            return obj(*rng.sample(sorted(members), rng.randint(0, len(members))), **members)
        case 3:
            return {"type": "array", "items": more(), "maxItems": 2}
        case 4:
            return {**more(), **more()}
        case 5:
            return {**more(), "additionalProperties": rng.choice([more(), False])}
    return {**more(), "dependentSchemas": {"a": more()}}


# Those that mean the same inside another schema.
PLACED = ("$", "definitions", "id", "x-guidance")
ALONE = [s for k, v in KEPT.items() if not k.startswith(PLACED) for s in v if "$" not in str(s)]


@pytest.mark.parametrize("seed", deep_but([0], range(8)))
def test_texts_of_mixed_schemas_are_valid_or_the_schema_is_refused(walker, seed):
    rng, kept = random.Random(seed), 0
    for _ in range(60):
        schema, kind = mixed(rng), rng.choice(["json", "open_json"])
        try:
            matcher = walker.matcher(kind, json.dumps(schema))
        except GrammarError:
            continue
        kept += 1
        for _ in range(2):
            validator(schema).validate(json.loads(walker.text(matcher, rng)))
    assert kept > 20


@pytest.mark.parametrize(("keyword", "schema", "words"), REFUSED, ids=lambda v: json.dumps(v)[:60])
def test_what_cannot_be_kept_is_refused_by_keyword_and_place(walker, keyword, schema, words):
    with pytest.raises(GrammarError) as raised:
        walker.matcher("json", json.dumps(schema))
    assert str(raised.value).startswith(f"{keyword} at #")
    assert words in str(raised.value)


@pytest.mark.parametrize("schema", EMPTY, ids=json.dumps)
def test_a_schema_without_a_finite_value_is_refused(walker, schema):
    with pytest.raises(GrammarError):
        walker.matcher("json", json.dumps(schema))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "5",
        '{"maximum": NaN}',
        '{"maximum": 1e999}',
        '{"items": ' * 5000 + "{}" + "}" * 5000,
        '{"const": ' + "9" * 5000 + "}",
    ],
)
def test_what_is_no_schema_is_refused(walker, text):
    with pytest.raises(GrammarError):
        walker.matcher("json", text)
