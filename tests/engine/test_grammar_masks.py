"""Masks are the same with any number of threads, and with patterns in place of formats."""

import json
from functools import cache

import llguidance
import numpy as np
import pytest

from cpuserve.engine.grammars import compiler as module
from cpuserve.engine.grammars.compiler import Compiler, GrammarError, take
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import tiny_end_ids, tiny_model

VOCAB = 512
ENDS = sorted(tiny_end_ids("llama"))
EMAIL = {"type": "string", "format": "email"}
RIGHT = ["a@b", "x.y!z@a-b--c.d0.org", "0@9-9", "q@[1.20.255.249]", "{a}/+b.c@xn--d.e"]
WRONG = [
    "a@",
    "@b",
    "a@-b",
    "a@b-",
    "a@b..c",
    "a.@b",
    "a@b-.c",
    "q@[1.2.3]",
    "q@[1.2.3.256]",
    "a b@c",
]


def make_compiler(threads=1):
    return Compiler(tiny_model("llama"), VOCAB, ENDS, threads)


def matcher_of(compiler, schema, prepare=None):
    prepare = prepare or (lambda text: compiler.prepare("json", text))
    return compiler.compile(prepare(json.dumps(schema)))


@cache
def byte_ids():
    tokenizer = Tokenizer.load(tiny_model("llama"))
    return {tokenizer.token_bytes(i): i for i in range(VOCAB)}


def masks_along(compiler, matcher, text):
    """The masks before each byte of a text, until none of them allows the next byte."""
    ids, (mask, found) = byte_ids(), (np.zeros(compiler.words, np.int32), [])
    for byte in text.encode():
        compiler.fill(matcher, mask, ())
        found.append(mask.tolist())
        token = ids[bytes([byte])]
        if not mask[token // 32] >> token % 32 & 1:
            return found, False
        take(matcher, [token])
    compiler.fill(matcher, mask, ())
    return [*found, mask.tolist()], bool(matcher.is_accepting())


@pytest.mark.parametrize(
    "more", [{}, {"maxLength": 9}, {"minLength": 6, "type": ["string", "null"]}]
)
def test_masks_of_an_email_are_those_of_the_library(more):
    compiler, schema = make_compiler(), {**EMAIL, **more}
    ours, its = (
        matcher_of(compiler, schema, prepare)
        for prepare in (None, llguidance.LLMatcher.grammar_from_json_schema)
    )
    accepted = set()
    for text in (*RIGHT, *WRONG):
        found, accepts = masks_along(compiler, ours.deep_copy(), json.dumps(text))
        assert (found, accepts) == masks_along(compiler, its.deep_copy(), json.dumps(text))
        if accepts:
            accepted.add(text)
    long = {"maxLength": lambda t: len(t) <= 9, "minLength": lambda t: len(t) >= 6}
    fits = [test for key, test in long.items() if key in more]
    assert accepted == {text for text in RIGHT if all(test(text) for test in fits)}


SCHEMAS = [EMAIL, {"type": "integer"}, {"enum": ["red", "green"]}, {"type": "number"}, {"const": 5}]


@pytest.mark.parametrize("rows", [2, 20])
def test_several_threads_fill_the_masks_that_one_fills(rows):
    one, many = make_compiler(), make_compiler(threads=3)
    want, masks = (np.full((rows + 2, one.words), -1, np.int32) for _ in range(2))
    kinds = sorted(i % len(SCHEMAS) for i in range(rows))
    copies = []
    for compiler in (one, many):
        begins = [matcher_of(compiler, schema) for schema in SCHEMAS]
        copies.append([begins[kind].deep_copy() for kind in kinds])
    for step in range(4):
        many.compute(masks, list(zip(copies[1], range(1, rows + 1), strict=True)), len(SCHEMAS))
        for row, (left, right) in enumerate(zip(*copies, strict=True), 1):
            ends = one.fill(left, want[row], ())
            assert many.finish(right, masks[row], ()) == ends
            allowed = np.flatnonzero(np.unpackbits(want[row].view(np.uint8), bitorder="little"))
            token = int(allowed[(7 * row + step) % len(allowed)])
            if token not in ENDS:
                take(left, [token])
                take(right, [token])
        assert masks.tolist() == want.tolist()
    assert masks[0].tolist() == masks[-1].tolist() == [-1] * one.words
    assert (many._executor is not None) == (rows > module.FEW_ROWS)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json", '{"$ref":"#"}'),
        ("grammar", "start: start"),
        ("regex", "[^\\x00-\\U0010ffff]"),
    ],
)
def test_a_form_that_no_text_has_is_an_error_that_says_so(kind, text):
    compiler = make_compiler()

    def first_mask():
        matcher = compiler.compile(compiler.prepare(kind, text))
        compiler.fill(matcher, np.zeros(compiler.words, np.int32), ())

    with pytest.raises(GrammarError, match="no finite text matches it"):
        first_mask()


@pytest.mark.parametrize("schema", ["true", " true ", "{}"])
def test_the_schema_true_means_any_json(schema):
    for text in ("[1]", '"a"', "null", '{"a":{"b":[true]}}'):
        compiler = make_compiler()
        matcher = compiler.compile(compiler.prepare("json", schema))
        assert masks_along(compiler, matcher, text)[1], text
    matcher = compiler.compile(compiler.prepare("json", schema))
    assert not masks_along(compiler, matcher, "x")[1]


def test_no_json_matches_the_schema_false():
    with pytest.raises(GrammarError, match="no finite text matches it"):
        make_compiler().prepare("json", "false")


def test_a_matcher_that_fails_ends_neither_the_others_nor_the_process():
    compiler = make_compiler(threads=2)
    matchers = [matcher_of(compiler, schema) for schema in SCHEMAS]
    assert not matchers[1].consume_tokens([300] * 50)
    masks = np.zeros((len(SCHEMAS), compiler.words), np.int32)
    compiler.compute(masks, list(zip(matchers, range(len(SCHEMAS)), strict=True)), len(SCHEMAS))
    for row, matcher in enumerate(matchers):
        if row == 1:
            with pytest.raises(GrammarError):
                compiler.finish(matcher, masks[row], ())
        else:
            compiler.finish(matcher, masks[row], ())
            alone = np.zeros_like(masks[row])
            compiler.fill(matcher_of(compiler, SCHEMAS[row]), alone, ())
            assert masks[row].tolist() == alone.tolist()


def test_where_threads_are_refused_one_fills_all_masks(monkeypatch):
    def refuse(threads):
        msg = "no thread"
        raise ValueError(msg)

    monkeypatch.setattr(llguidance, "LLExecutor", refuse)
    compiler = make_compiler(threads=2)
    matchers = [matcher_of(compiler, schema) for schema in SCHEMAS]
    masks = np.zeros((len(SCHEMAS), compiler.words), np.int32)
    compiler.compute(masks, list(zip(matchers, range(len(SCHEMAS)), strict=True)), len(SCHEMAS))
    assert all(mask.any() for mask in masks)


def test_a_choice_may_have_any_characters():
    compiler = make_compiler()
    characters = "".join(map(chr, range(1, 128))) + "\u00e9\u20ac\U0001f600"
    texts = [f"a{character}b" for character in characters]
    matcher = compiler.compile(compiler.prepare("choice", json.dumps(texts)))
    for text in texts:
        _, fits = masks_along(compiler, matcher.deep_copy(), text)
        assert fits, text
    assert masks_along(compiler, matcher.deep_copy(), "ab")[1] is False


def test_classes_of_characters_in_a_regular_expression_are_of_ascii():
    compiler = make_compiler()
    matcher = compiler.compile(compiler.prepare("regex", r"\w\d"))
    for text, fits in {"a1": True, "_0": True, "é1": False, "a٣": False, "\u03011": False}.items():
        assert masks_along(compiler, matcher.deep_copy(), text)[1] is fits, text
