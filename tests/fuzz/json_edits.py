"""Random changes of JSON bodies: values of other types, other fields, parts of other bodies.

`edited` changes the structure, so that a parser gets behind the syntax, and sometimes the bytes as
`edits.py` does. The result is bytes, because invalid bodies are among them.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from tests.fuzz.edits import apply, draw
from tests.helpers.fuzzed_answers import changed

_TEXTS = (
    "", " ", "a", "\0", "\ud800", "\u2028", "\U0001f600", "e\u0301" * 9, "a" * 300, "\n" * 40,
    "{{ x }}", "{% raw %}", "[" * 40, "../../etc/passwd", "/dev/zero", "http://127.0.0.1:1/a",
    "data:image/png;base64,aGk=", "data:,", "null", "NaN", "1e999", "-1", "tiny", "tiny:latest",
    "function", "auto", "required", "json_schema", "text", "image_url", "input_audio", "assistant",
    "tool", "system", "developer", "(a+)+$", "a{1,99999}", "\\", "<|im_end|>", "<think>",
    "sha256:a",
)  # fmt: skip
_NUMBERS = (
    0, 1, -1, 2, 3, 127, 128, 129, 511, 512, 4096, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1,
    2**63, 2**64, 10**40, 0.5, -0.0, 1e-9, 1e30, 1e308, -1e308, float("nan"), float("inf"),
)  # fmt: skip
_SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
    {"$ref": "#"}, {"anyOf": []}, {"type": "array", "items": {"$ref": "#/x"}}, {"enum": []},
    {"const": None}, {"pattern": "(a"}, {"type": "integer", "minimum": 9, "maximum": 1},
)  # fmt: skip
_OTHERS = (
    None, True, False, [], {}, [None], [[]], [{}], {"": ""}, {"a": {"a": {}}}, {"type": "text"},
    {"type": "function", "function": {"name": "f"}}, {"role": "user", "content": "a"},
    {"type": None}, [0, 1, 2], ["a", "b"], [[0.5, -1]], *_SCHEMAS,
)  # fmt: skip
_DEEP = (30, 300)
_MOST_COPIES = 40
_MOST_EDITS = 4

_OF_KIND: dict[str, tuple[Any, ...]] = {
    "string": _TEXTS,
    "integer": tuple(number for number in _NUMBERS if isinstance(number, int)),
    "number": _NUMBERS,
    "boolean": (True, False),
    "array": ([], ["a"], ["a", "b"], [0, 1, 2], [2**31], [0.5], [[0, 1]], [{}], [None], ["a"] * 70),
    "object": ({}, {"a": 1}, {"0": 1.5}, {"type": "json_object"}, {"type": "text"}, *_SCHEMAS),
}

Kinds = tuple[str, ...]  # the JSON types of a field
Place = tuple[Any, Any]  # a list or object, and an index or key of it


def edited(
    rng: random.Random, body: bytes, fields: Mapping[str, Kinds], donors: Sequence[bytes]
) -> bytes:
    """Return a JSON body after random changes.

    fields: the types of the fields that the body may have. donors: other bodies, whose parts it
    may get.
    """
    root = [json.loads(body)]
    for _ in range(rng.randint(1, _MOST_EDITS)):
        _edit(rng, root, fields, donors)
    data = json.dumps(root[0], ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:
        files = {"body.json": data}
        data = apply(draw(rng, files), "body.json", data)
    return data


def nasty(rng: random.Random, kinds: Kinds = ()) -> Any:
    """Return a value that a field may not expect; kinds: the types that it should have."""
    if rng.random() < 0.03:
        value: Any = rng.choice((0, "a", []))
        for _ in range(rng.choice(_DEEP)):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    typed = [value for kind in kinds for value in _OF_KIND[kind]]
    every = rng.choice((_TEXTS, _NUMBERS, _OTHERS))
    return copy.deepcopy(rng.choice(typed if typed and rng.random() < 0.8 else every))


def places(value: Any) -> list[Place]:
    """Return all places of values inside a list or object."""
    found: list[Place] = []
    waiting = [value]
    while waiting:
        each = waiting.pop()
        keys = list(each) if isinstance(each, dict) else range(len(each))
        found += [(each, key) for key in keys]
        waiting += [each[key] for key in keys if isinstance(each[key], dict | list)]
    return found


def _edit(
    rng: random.Random, root: list[Any], fields: Mapping[str, Kinds], donors: Sequence[bytes]
) -> None:
    body, way = root[0], rng.random()
    if way < 0.35 and fields and isinstance(body, dict):
        name = rng.choice([*fields])
        body[name] = nasty(rng, fields[name])
    elif way < 0.5 and isinstance(body, dict):
        other = json.loads(rng.choice(donors))
        if isinstance(other, dict) and other:
            name = rng.choice([*other])
            body[name] = other[name]
    elif inside := places(body) if isinstance(body, dict | list) else []:
        _edit_inside(rng, *rng.choice(inside), fields, donors)
    else:
        root[0] = nasty(rng)


def _edit_inside(
    rng: random.Random, holder: Any, key: Any, fields: Mapping[str, Kinds], donors: Sequence[bytes]
) -> None:
    value, way = holder[key], rng.random()
    if way < 0.1:
        other, at = rng.choice(places([json.loads(rng.choice(donors))]))
        holder[key] = other[at]
    elif way < 0.2:
        del holder[key]
    elif way < 0.3 and isinstance(holder, dict):
        holder[rng.choice((*fields, *_TEXTS))] = holder.pop(key)
    elif way < 0.4:
        holder[key] = nasty(rng)
    elif isinstance(value, str):
        holder[key] = changed(value, rng.random()) if value and way < 0.7 else rng.choice(_TEXTS)
    elif isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int | float):
        holder[key] = rng.choice((-value, value + 1, value - 1, value * 2, rng.choice(_NUMBERS)))
    elif isinstance(value, list) and value:
        count = rng.randint(2, _MOST_COPIES)
        holder[key] = [copy.deepcopy(rng.choice(value)) for _ in range(count)]
    elif isinstance(value, dict):
        value[rng.choice((*fields, *_TEXTS, *value))] = nasty(rng)
    else:
        holder[key] = nasty(rng)
