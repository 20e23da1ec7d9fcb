"""No line break before a colon or a comma of JSON, by a model that breaks lines where it may."""

import json
import random
import re

import numpy as np
import pytest

from cpuserve.engine.grammars.compiler import take
from cpuserve.engine.grammars.json_masks import LineBreaks, mask_of
from tests.helpers.random_texts import Walker

INT = {"type": "integer"}
SCHEMAS = [
    {"type": "object", "properties": {"a": INT, "b": INT}, "required": ["a", "b"]},
    {"type": "object", "properties": {"a": INT, "b": {"type": "string"}}},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": "object", "additionalProperties": INT, "minProperties": 1, "maxProperties": 3},
    {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "null"}}},
     "maxItems": 2},
    {"type": "object"},
]  # fmt: skip
WRONG = re.compile(rb"\n\s*[,:]")


@pytest.fixture(scope="module")
def walker():
    return Walker()


def broken(walker, kind, schema, rng):
    """The text of a model that writes a line break wherever it may, except at random."""
    matcher = walker.matcher(kind, json.dumps(schema)).deep_copy()
    mask, text, tail = np.zeros(walker.compiler.words, np.int32), b"", b""
    newlines = {i for i, b in walker.bytes.items() if b == b"\n"}
    for count in range(3000):
        walker.compiler.compute(mask.reshape(1, -1), [(matcher, 0)], 1)
        walker.compiler.finish(matcher, mask, (), tail, is_whole=True)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
        allowed = {int(i) for i in np.flatnonzero(bits)}
        if allowed & newlines and rng.random() < 0.8:
            token = min(allowed & newlines)
        else:
            token = walker._choose(allowed, rng, count > 60)
        if token in walker._ends:
            return text
        text += walker.bytes[token]
        take(matcher, [token])
        tail = walker.compiler.tails.after(tail, [token])
    pytest.fail(f"no end: {text[:200]}")


@pytest.mark.parametrize("kind", ["json", "open_json"])
@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_no_line_break_comes_before_a_separator(walker, schema, kind):
    rng = random.Random(7)
    texts = [broken(walker, kind, schema, rng) for _ in range(6)]
    for text in texts:
        json.loads(text)
        assert not WRONG.search(text), text
    assert any(b"\n" in text for text in texts)  # objects may be indented


TOKENS = [b"\n", b" \n  ", b",", b":", b"}", b"]", b'"', b'"\n', b"}\n,", b"\n,", b" \n :", b"\n}",
          b"{\n", b",\n", b'"}\n]', b"1", b" ", b" ,"]  # fmt: skip


@pytest.mark.parametrize(
    ("tail", "given", "wanted"),
    [
        (b'"', [b"\n", b" \n  ", b":", b" ", b"\n,"], [b":", b" "]),  # a name
        (b"1", [b"\n", b",", b"}", b"\n}", b"\n,"], [b"\n", b",", b"}", b"\n}"]),
        (b"1 ", [b"\n", b",", b" ,"], [b",", b" ,"]),  # a member must follow
        (b"1\n", [b",", b" ,", b"}", b" "], [b"}", b" "]),
        (b"{", [b"\n", b'"', b"}"], [b"\n", b'"', b"}"]),
        (b"a", [b'"', b'"\n', b"1"], [b'"', b"1"]),  # in a string
        (b"{", [b"{\n", b",\n", b'"}\n]', b"}\n,"], [b"{\n", b",\n", b'"}\n]']),
        (b"1", [b"\n"], [b"\n"]),  # nothing else is left
    ],
)
def test_tokens_of_several_characters_are_judged_as_a_whole(tail, given, wanted):
    breaks = LineBreaks(TOKENS.__getitem__, len(TOKENS))
    mask = mask_of([i for i, text in enumerate(TOKENS) if text in given], len(TOKENS))
    breaks.bound(tail, mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    assert [TOKENS[i] for i in np.flatnonzero(bits)] == [t for t in TOKENS if t in wanted]
