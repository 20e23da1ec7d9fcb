"""Arguments of calls with numbers that JSON, or a double, cannot hold."""

import json
import math

import pytest

from cpuserve.tokenizer.finite_json import FiniteJson, loads_finite

TEXTS = {
    '{"a": NaN}': {"a": None},
    '{"a": Infinity, "b": [-Infinity, 1]}': {"a": None, "b": [None, 1]},
    '{"a": 1e400, "b": -1E+999}': {"a": None, "b": None},
    '{"a": 1e308, "b": -0.5, "c": true, "d": null}': {"a": 1e308, "b": -0.5, "c": True, "d": None},
    '{"NaN": "NaN, Infinity: 1e400"}': {"NaN": "NaN, Infinity: 1e400"},
    r'{"a\"": "\\", "b": NaN, "c": "\" NaN"}': {'a"': "\\", "b": None, "c": '" NaN'},
    ' {"a":{"b":[NaN,[1e999]]}}': {"a": {"b": [None, [None]]}},
    '{"a": ' + "9" * 400 + "}": {"a": None},
}


def fed(text, size):
    made = FiniteJson()
    return "".join(made.feed(text[i : i + size]) for i in range(0, len(text), size)) + made.end()


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_no_number_is_infinite_in_pieces_of_any_size(text, size):
    assert json.loads(fed(text, size), parse_constant=float) == TEXTS[text]
    if len(text) < 100:  # Python itself reads whole numbers of any length
        assert loads_finite(text) == TEXTS[text]


@pytest.mark.parametrize("text", ["NaN", "[NaN]", "x = {NaN}", "{NaN", '{"a": "NaN', '{"a": -'])
def test_what_is_no_object_is_as_the_model_wrote_it(text):
    wanted = text if text != "{NaN" else "{null"
    assert fed(text, 1) == wanted


def test_a_number_of_many_pieces_is_read_once():
    made = FiniteJson()
    made.feed('{"a": 1')
    assert {made.feed("0") for _ in range(100_000)} == {""}
    assert made.feed("}") == "null}"
    assert math.isinf(float("1" + "0" * 100_000))
