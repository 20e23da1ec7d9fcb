"""Models of pydantic: every text of their schemas is a value of the model."""

from __future__ import annotations

import json
import random
from typing import Annotated, Literal

import jsonschema
import pytest
from pydantic import BaseModel, Discriminator, Field, RootModel, Tag

from tests.helpers.random_texts import Walker


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    name: str | None = None


class Black(BaseModel):
    kind: Literal["cow"] = "cow"
    color: Literal["black"] = "black"


class White(BaseModel):
    kind: Literal["cow"] = "cow"
    color: Literal["white"] = "white"
    spots: int = 1


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]
Cow = Annotated[Black | White, Field(discriminator="color")]


class Owner(BaseModel):
    pet: Pet
    more: list[Pet] = []


class Farm(BaseModel):
    animal: Annotated[Cow | Dog, Field(discriminator="kind")]


class Root(RootModel):
    root: Pet


class Untagged(BaseModel):
    pet: Annotated[
        Annotated[Cat, Tag("a")] | Annotated[Dog, Tag("b")],
        Discriminator(lambda value: "a" if "lives" in value else "b"),
    ]


class Leaf(BaseModel):
    kind: Literal["leaf"] = "leaf"
    value: Annotated[int, Field(ge=0, le=9)]


class Negative(BaseModel):
    kind: Literal["negative"] = "negative"
    of: Expression


Expression = Annotated[Negative | Leaf, Field(discriminator="kind")]
Negative.model_rebuild()


class Options(BaseModel):
    flags: set[Literal["gift", "fast", "late"]] = set()


@pytest.fixture(scope="module")
def walker() -> Walker:
    return Walker()


@pytest.mark.parametrize("model", [Owner, Farm, Root, Untagged, Negative, Options])
def test_every_text_of_a_model_is_one_of_its_values(walker: Walker, model: type[BaseModel]) -> None:
    schema = model.model_json_schema()
    validator = jsonschema.Draft202012Validator(schema)
    for value in walker.values(schema, random.Random(7), 20):
        model.model_validate(value)
        validator.validate(value)


@pytest.mark.parametrize(
    ("model", "value", "without"),
    [
        (Owner, {"pet": {"kind": "cat", "lives": 3}}, {"pet": {"lives": 3}}),
        (Owner, {"pet": {"kind": "dog"}, "more": [{"kind": "dog"}]}, {"pet": {}}),
        (Farm, {"animal": {"kind": "cow", "color": "white"}}, {"animal": {"kind": "cow"}}),
    ],
)
def test_a_tag_with_a_default_is_always_written(
    walker: Walker, model: type[BaseModel], value: object, without: object
) -> None:
    matcher = walker.matcher("json", json.dumps(model.model_json_schema()))
    assert _is_text(walker, matcher, json.dumps(value))
    assert not _is_text(walker, matcher, json.dumps(without))


def _is_text(walker: Walker, matcher: object, text: str) -> bool:
    of = {data: token for token, data in walker.bytes.items()}
    matcher = matcher.deep_copy()  # type: ignore[attr-defined]
    tokens = [of[bytes([byte])] for byte in text.encode()]
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())
