"""The token ids of sequence breakers, and the table of prefixes, compared with plain searches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.calls import sampler_ids
from cpuserve.serving.calls.sampler_ids import TokenTexts, prefixes, sequences, with_sampler_ids
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import tiny_model

WORDS = [b"", b"a", b"ab", b"abc", b"b", b"ab", b"\n", b"x\n", b"xa", b"cab", b"\xc3"]


class Letters:
    """A tokenizer with a token for each byte: 100 + the byte."""

    def encode(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return [100 + byte for byte in text.encode()]


def test_each_token_is_linked_to_the_longest_token_that_it_begins_with():
    links = np.frombuffer(prefixes(WORDS), "<i4").tolist()
    assert links == [-1, -1, 1, 5, -1, 2, -1, -1, -1, -1, -1]


def test_a_breaker_is_found_inside_a_token_and_across_tokens():
    assert sequences("\n", TokenTexts(WORDS), Letters()) == [(6,), (7,)]
    rest = [100 + byte for byte in b"bc"]
    # "abc" is in token 3; the others end with its beginning.
    assert sequences("abc", TokenTexts(WORDS), Letters()) == [
        (1, *rest), (2, 199), (3,), (5, 199), (8, *rest), (9, 199),
    ]  # fmt: skip


def plain_search(breaker, words, tokenizer):
    """The sequences of a breaker, found in every token by itself."""
    text, found = breaker.encode(), set()
    for token, word in enumerate(words):
        if text in word:
            found.add((token,))
            continue
        for size in range(1, len(text)):
            rest = tokenizer.encode(text[size:].decode("utf-8", "ignore"), add_special_tokens=False)
            if word.endswith(text[:size]) and rest:
                found.add((token, *rest[:20]))
    return found


@given(
    st.text("ab\n\0é", min_size=1, max_size=6),
    st.lists(st.text("ab\n\0é", max_size=5).map(str.encode), max_size=12),
)
def test_the_index_finds_what_a_search_in_every_token_finds(breaker, words):
    found = sequences(breaker, TokenTexts(words), Letters())
    assert set(found) == plain_search(breaker, words, Letters())
    assert len(found) == len(set(found))


def test_a_breaker_reads_the_texts_of_few_tokens():
    """The rest of a breaker is tokenized once for each of its beginnings, not for each token."""
    calls = []

    class Counting(Letters):
        def encode(self, text, *, add_special_tokens):
            calls.append(text)
            return super().encode(text, add_special_tokens=add_special_tokens)

    words = [b"%d" % number for number in range(5000)]
    assert len(sequences("7" + "x" * 39, TokenTexts(words), Counting())) == 500
    assert len(calls) == 39


def test_breakers_in_too_many_tokens_are_refused(tokenizer, monkeypatch):
    monkeypatch.setattr(sampler_ids, "MAX_BREAKER_IDS", 3)
    with pytest.raises(InvalidRequest, match="dry_sequence_breakers has texts that are in too"):
        ids_of(tokenizer, dry_multiplier=1.0, dry_sequence_breakers=["a", "e", "\u0000a"])
    monkeypatch.setattr(sampler_ids, "MAX_BREAKER_IDS", 1 << 19)
    monkeypatch.setattr(sampler_ids, "MAX_ALL_BREAKER_IDS", 4)
    with pytest.raises(InvalidRequest, match="at most 2 are allowed"):
        ids_of(tokenizer, dry_multiplier=1.0, dry_sequence_breakers=["a", "e", "\u0000a"])


def test_the_rest_of_a_breaker_is_cut():
    (found,) = sequences("a" + "z" * 39, TokenTexts([b"a"]), Letters())
    assert found == (0, *[100 + ord("z")] * 20)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(tiny_model("llama"))


def ids_of(tokenizer, **fields):
    params = [SamplingParams(**fields), SamplingParams(**fields)]
    with_sampler_ids(params, tokenizer, 300)
    assert params[0] == params[1]
    return params[0]


def test_only_requests_that_need_ids_get_them(tokenizer):
    assert ids_of(tokenizer, typical_p=0.5).dry_breaker_ids == []
    assert ids_of(tokenizer, dry_multiplier=1.0, samplers=["top_k"]).dry_breaker_ids == []
    assert ids_of(tokenizer, samplers=["infill"], mirostat=2).infill_prefixes == b""
    assert len(ids_of(tokenizer, samplers=["top_k", "infill"]).infill_prefixes) == 1200
    given = ids_of(tokenizer, dry_multiplier=1.0, dry_sequence_breakers=["a", "\n"])
    assert given.dry_breaker_ids
    assert given.dry_breaker_ends[-1] == len(given.dry_breaker_ids)
    assert ids_of(tokenizer, dry_multiplier=1.0).dry_breaker_ids  # the default breakers


def test_infill_is_limited_to_the_memory_of_its_tables(tokenizer):
    params = [SamplingParams(samplers=["infill"], n=100)]
    with pytest.raises(InvalidRequest, match="samplers with infill allows 64 sequences"):
        with_sampler_ids(params, tokenizer, 1 << 16)
