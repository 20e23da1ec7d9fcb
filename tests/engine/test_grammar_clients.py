"""Schemas as clients' libraries write them: pydantic, Zod, OpenAI's helpers, LangChain, OpenAPI."""

import datetime
import enum
import ipaddress
import json
import uuid
from typing import Annotated, Literal

import pydantic
import pytest

from tests.engine.test_grammar_schemas import BOOL, INT, NULL, NUM, STR, check, obj
from tests.helpers.depth import deep_but
from tests.helpers.random_texts import Walker


@pytest.fixture(scope="module")
def walker():
    return Walker()


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, pydantic.Field(ge=0, le=9)] = 9


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    friends: list["Dog"] = []


class Base(pydantic.BaseModel):
    """With what models often have."""

    id: uuid.UUID
    on: datetime.date
    at: datetime.datetime | None = None
    color: Color = Color.RED
    score: Annotated[float, pydantic.Field(gt=0, lt=1)]
    name: Annotated[str, pydantic.Field(min_length=1, max_length=5, description="a name")]
    pair: tuple[int, bool]
    pet: Annotated[Cat | Dog, pydantic.Field(discriminator="kind")]


class Row(pydantic.BaseModel):
    counts: dict[str, int] = {}
    text: str | int
    nested: list[Cat] | None = None


class Tree(pydantic.BaseModel):
    value: int
    left: "Tree | None" = None
    right: "Tree | None" = None


class Bounds(pydantic.BaseModel):
    small: Annotated[int, pydantic.Field(multiple_of=5, ge=-10)]
    link: pydantic.AnyUrl | None = None
    address: ipaddress.IPv4Address | None = None
    hour: Annotated[str, pydantic.Field(pattern=r"^\d{2}:\d{2}$")]


@pytest.mark.matrix
@pytest.mark.parametrize("model", [Cat, Dog, Base, Row, Tree, Bounds], ids=lambda m: m.__name__)
@pytest.mark.parametrize("mode", ["validation", "serialization"])
def test_texts_of_a_pydantic_model_are_read_by_it(walker, model, mode):
    values = check(walker, model.model_json_schema(mode=mode))
    for value in values:
        model.model_validate(value)


def closed(*required, **properties):
    return {**obj(*required, **properties), "additionalProperties": False}


ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)
ZOD_TIME = (
    r"^(?:(?:\d\d[2468][048]|\d\d[13579][26]|\d\d0[48]|[02468][048]00|[13579][26]00)-02-29|"
    r"\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|"
    r"(?:02)-(?:0[1-9]|1\d|2[0-8])))T(?:(?:[01]\d|2[0-3]):[0-5]\d(?::[0-5]\d(?:\.\d+)?)?(?:Z))$"
)
DRAFT = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
SAFE = {"minimum": -9007199254740991, "maximum": 9007199254740991}
SCHEMAS = {
    # z.record, z.email, z.iso.datetime, z.int, z.discriminatedUnion, z.tuple, z.lazy of Zod 4
    "zod record": {"type": "object", "propertyNames": STR, "additionalProperties": NUM},
    "zod record of an enum": {
        "type": "object",
        "propertyNames": {"type": "string", "enum": ["a", "b"]},
        "additionalProperties": NUM,
        "required": ["a", "b"],
    },
    "zod object": {**DRAFT, **closed("a", a={"type": "integer", **SAFE}, b=STR)},
    "zod email": {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
    "zod datetime": {"type": "string", "format": "date-time", "pattern": ZOD_TIME},
    "zod union": {"oneOf": [closed("t", t={"const": n, "type": "string"}) for n in "ab"]},
    "zod tuple": {"type": "array", "prefixItems": [STR, NUM], "items": False},
    "zod lazy": {
        **DRAFT,
        **closed("next", next={"anyOf": [{"$ref": "#"}, NULL]}),
    },
    "zod 3 nullable": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **closed("a", a={"type": ["string", "null"]}, b={"anyOf": [{"not": {}}, BOOL]}),
    },
    "openai strict": closed(
        "steps",
        "answer",
        steps={"type": "array", "items": {"$ref": "#/$defs/step"}},
        answer={"type": ["string", "null"], "description": "the answer"},
    )
    | {"$defs": {"step": closed("text", text=STR)}},
    "openai helper's root": {
        "$ref": "#/definitions/root",
        "definitions": {
            "root": closed("child", child={"anyOf": [NULL, {"$ref": "#/definitions/root"}]})
        },
    },
    "langchain": {
        "title": "Joke",
        "description": "A joke",
        **obj(
            "setup", setup={"title": "Setup", **STR}, rating={"default": None, "anyOf": [INT, NULL]}
        ),
    },
    "langchain of TypedDict": {"$defs": {}, **obj("a", a={"items": {}, "type": "array"}, b={})},
    "openapi": obj(
        "a",
        a={"type": "integer", "format": "int64", "minimum": -(2**63), "maximum": 2**63 - 1},
        b={"type": "number", "format": "float", "example": 1.5},
        c={"type": "string", "nullable": True, "enum": ["x", "y"]},
        d={"allOf": [{"$ref": "#/components/schemas/d"}], "xml": {"name": "d"}},
    )
    | {"components": {"schemas": {"d": obj("e", e=BOOL)}}},
    "instructor's partial": obj(
        a={"anyOf": [STR, NULL]}, b={"anyOf": [{"$ref": "#/$defs/c"}, NULL]}
    )
    | {"$defs": {"c": {"enum": ["x"], "title": "C", "type": "string"}}},
    "no arguments": {"type": "object", "properties": {}},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_of_schemas_that_clients_send_are_valid(walker, name):
    check(walker, SCHEMAS[name], count=20)


@pytest.mark.deep
def test_an_object_has_the_members_that_its_schema_names(walker):
    """Small models invent further ones until max_tokens."""
    base = obj("a", a=INT, b=BOOL)
    for schema, names in (
        (base, {"a", "b"}),
        ({"properties": base["properties"]}, {"a", "b"}),
        ({"allOf": [base, obj(c=INT)]}, {"a", "b", "c"}),
        ({"allOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": base}}, {"a", "b"}),
        ({"$ref": "#/$defs/x", "properties": {"d": NULL}, "$defs": {"x": base}}, {"a", "b", "d"}),
        ({"anyOf": [obj(c=INT), obj(d=INT)], **base}, {"a", "b", "c", "d"}),
        ({"if": {"required": ["b"]}, "then": obj(c=INT), **base}, {"a", "b", "c"}),
        (obj(), set()),
    ):
        values = check(walker, schema, count=30)
        assert set().union(*values) <= names, schema
        opened = check(walker, schema, count=120, kind="open_json")
        assert not set().union(*(v if isinstance(v, dict) else () for v in opened)) <= names


@pytest.mark.parametrize("more", [True, INT, {"unevaluated": 1}])
def test_an_object_that_says_what_other_members_are_has_them(walker, more):
    key = "additionalProperties" if more != {"unevaluated": 1} else "unevaluatedProperties"
    schema = {**obj("a", a=INT), key: INT if key[0] == "u" else more}
    assert set().union(*check(walker, schema, count=30)) - {"a"}


def test_objects_without_properties_have_any_members(walker):
    for schema in ({"type": "object"}, {"type": "object", "additionalProperties": INT}, {}):
        values = check(walker, schema, count=40)
        assert any(isinstance(value, dict) and value for value in values)


@pytest.mark.parametrize("number", deep_but([50], [50, 500]))
def test_many_optional_properties_are_kept(walker, number):
    schema = obj(**{f"p{i}": BOOL for i in range(number)})
    values = check(walker, schema, count=3)
    whole = {f"p{i}": i % 2 == 0 for i in range(number)}
    matcher = walker.matcher("json", json.dumps(schema)).deep_copy()
    ids = {text: i for i, text in walker.bytes.items()}
    for byte in json.dumps(whole, separators=(",", ":")).encode():
        assert matcher.consume_tokens([ids[bytes([byte])]]), matcher.get_error()
    assert matcher.is_accepting()
    assert all(isinstance(value, dict) for value in values)
