"""Numbers in texts with a schema end, whatever a model prefers."""

import json
import math
import random

import numpy as np
import pytest

from cpuserve.engine.grammars.compiler import take
from cpuserve.engine.grammars.json_masks import MAX_EXPONENT, MAX_FRACTION, MAX_INTEGER
from cpuserve.sampling.structured import StructuredOutputs
from tests.engine.test_grammars import Engine
from tests.helpers.random_texts import Walker

INTEGERS = [
    {"type": "integer"},
    {"type": "integer", "minimum": 0},
    {"minimum": 5, "type": "integer"},
]
NUMBERS = [
    {"type": "number"},
    {"type": "number", "minimum": 0},
    {"exclusiveMaximum": 0.5, "type": "number"},
]


@pytest.fixture(scope="module")
def walker():
    return Walker()


def greedy(walker, schema, likes, most=400):
    """The text of a model that writes these characters wherever it may."""
    matcher = walker.matcher("json", json.dumps(schema)).deep_copy()
    mask, text, tail = np.zeros(walker.compiler.words, np.int32), b"", b""
    tokens = {i: b for i, b in walker.bytes.items() if b and set(b) <= set(likes)}
    for _ in range(most):
        walker.compiler.compute(mask.reshape(1, -1), [(matcher, 0)], 1)
        walker.compiler.finish(matcher, mask, (), tail)
        allowed = {
            int(i) for i in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        }
        liked = sorted(allowed & tokens.keys(), key=lambda i: (likes.index(walker.bytes[i][:1]), i))
        if not liked and allowed & set(walker._ends):
            return text.decode()
        token = liked[0] if liked else min(allowed)
        text += walker.bytes[token]
        take(matcher, [token])
        tail = walker.compiler.tails.after(tail, [token])
    return text.decode()


@pytest.mark.parametrize("schema", INTEGERS, ids=json.dumps)
@pytest.mark.parametrize("digit", [b"3", b"9"])
def test_an_integer_ends_after_20_digits(walker, schema, digit):
    assert greedy(walker, schema, digit) == digit.decode() * MAX_INTEGER


@pytest.mark.parametrize("schema", NUMBERS, ids=json.dumps)
def test_a_fraction_ends_with_what_a_double_holds(walker, schema):
    whole, _, fraction = greedy(walker, schema, b".0123").partition(".")
    assert len(fraction) == MAX_FRACTION
    assert len(whole) <= MAX_INTEGER + 1


@pytest.mark.parametrize("likes", [b"9e", b"e9.", b"1e-", b"e0+"])
def test_an_exponent_ends_and_the_number_is_finite(walker, likes):
    text = greedy(walker, {"type": "number"}, likes)
    assert math.isfinite(float(text))
    assert len(text.partition("e")[2].strip("+-")) <= MAX_EXPONENT
    assert len(text) < 50


def test_numbers_end_in_lists_and_objects(walker):
    three = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}
    item = "7" * MAX_INTEGER
    assert greedy(walker, three, b"7[,]") == f"[{item},{item},{item}]"
    of_numbers = {"type": "object", "properties": {"a": three}, "required": ["a"]}
    assert greedy(walker, of_numbers, b'7[,]{"a:}') == f'{{"a":[{item},{item},{item}]}}'


def test_digits_in_strings_are_not_counted(walker):
    text = greedy(walker, {"type": "string", "maxLength": 60}, b"7")
    assert text == '"' + "7" * 60 + '"'
    long = {"type": "string", "pattern": "^[0-9]{40}$"}
    assert len(greedy(walker, long, b"5")) == 42
    assert float(greedy(walker, {"const": 2.0**160}, b"1")) == 2.0**160


@pytest.mark.parametrize("name", ["date-time", "time"])
def test_fractions_of_a_second_have_up_to_9_digits(walker, name):
    text = greedy(walker, {"type": "string", "format": name}, b'".0')
    assert len(text.partition(".")[2].partition("Z")[0].partition("+")[0].partition("-")[0]) == 9


def test_numbers_of_other_grammars_have_any_length():
    engine = Engine()
    for form in ({"regex": "[0-9]{90}"}, {"grammar": "start: /[0-9]{90}/ | /x{90}/"}):
        number = engine.add(structured_outputs=StructuredOutputs(**form))
        engine.run()
        assert len(engine.text(number)) == 90
    bound = [engine.json({"type": "integer"}, seed=s) for s in range(6)]
    engine.run()
    assert all(len(engine.text(n).strip("-")) <= MAX_INTEGER for n in bound)
    engine.core.close()


def test_random_numbers_are_finite(walker):
    rng = random.Random(1)
    for schema in NUMBERS + INTEGERS:
        for value in walker.values(schema, rng, 40, free=30):
            assert math.isfinite(value)
