"""Tokenizers of tiktoken.model: the ids of the algorithm of tiktoken, and files that are refused.

With 49,156 ranks from the vocabulary of SmolLM2, tiktoken 0.14 had the same ids for 343 texts with
123,468 characters: code, Markdown, and random characters of many alphabets.
"""

import base64
import json
from itertools import pairwise

import pytest

from cpuserve.base.errors import ModelError
from cpuserve.tokenizer.ranks import MAX_TOKEN_BYTES, read_ranks
from cpuserve.tokenizer.tokenizer import Tokenizer

WORDS = (
    *("th", "the", " the", "he", "er", "in", "ing", "an", "and", " and", " a", "ab", "aba"),
    *("aa", "aaa", "00", "000", "  ", "\n\n", "中文", "文的", "é", "🙂"),
    *("hello", "hell", "ello", "lo"),
)


def made_ranks():
    """All bytes, and words with every beginning of theirs, which have higher ranks."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    for word in WORDS:
        data = word.encode()
        for end in range(2, len(data) + 1):
            ranks.setdefault(data[:end], len(ranks))
    return ranks


RANKS = made_ranks()
NAMED = {0: "[BOS]", 1: "[EOS]", 4: "<|media_pad|>", 9: "<think>"}


def written(path, ranks=RANKS, **settings):
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (path / "tiktoken.model").write_bytes(b"".join(lines))
    listed = {
        str(len(ranks) + i): {"content": text, "special": text != "<think>"}
        for i, text in NAMED.items()
    }
    usual = {"tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    found = {**usual, "added_tokens_decoder": listed, **settings}
    (path / "tokenizer_config.json").write_text(json.dumps(found))
    return path


def merged(piece):
    """The ids of a piece: the pair with the lowest rank is merged, the first of several."""
    parts = [bytes([byte]) for byte in piece]
    while piece not in RANKS:
        pairs = [left + right for left, right in pairwise(parts)]
        best = min(pairs, key=lambda pair: RANKS.get(pair, 1 << 30))
        if best not in RANKS:
            return [RANKS[part] for part in parts]
        at = pairs.index(best)
        parts[at : at + 2] = [best]
    return [RANKS[piece]]


@pytest.mark.parametrize(
    "pieces",
    [
        ["hello", " the", " and"],
        ["ababa", " aaaaa", " theing"],
        ["a", "000", "00"],
        ["中文的", "The"],
        ["é🙂"],
        ["x", "\n\n", "  ", " y"],
        ["It's", " lo"],
    ],
)
def test_ids_are_those_of_tiktoken(tmp_path, pieces):
    tokenizer, text = Tokenizer.load(written(tmp_path)), "".join(pieces)
    ids = [i for piece in split(text) for i in merged(piece.encode())]
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def split(text):
    """The pieces of a text by the expression of Kimi's own code."""
    from tokenizers import Regex, pre_tokenizers

    upper, lower = (
        r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]",
        r"\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]",
    )
    before, after = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    words = f"{before}[{upper}]*[{lower}]+{after}|{before}[{upper}]+[{lower}]*{after}"
    rest = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    found = pre_tokenizers.Split(Regex(rf"[\p{{Han}}]+|{words}|{rest}"), "isolated")
    return [piece for piece, _ in found.pre_tokenize_str(text)]


def test_control_tokens_have_the_ids_of_the_settings(tmp_path):
    tokenizer, first = Tokenizer.load(written(tmp_path)), len(RANKS)
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (first, first + 256)
    for i, text in NAMED.items():
        assert tokenizer.encode(f"hello{text}") == [RANKS[b"hello"], first + i]
    assert tokenizer.encode(f"<|reserved_token_{first + 2}|>") == [first + 2]
    ids = tokenizer.encode("[BOS]<think>hello[EOS]")
    assert tokenizer.decode(ids) == "<think>hello", "special tokens are left out"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"%%% 0\n", "base64|padding|alphabet"),
        (b"YQ==\n", "not enough values"),
        (b"YQ== x\n", "invalid literal"),
        (b"YQ== 0\n", "255 bytes have no token"),
        (b"".join(base64.b64encode(t) + b" %d\n" % (r + (r > 9)) for t, r in RANKS.items()), "ids"),
        (base64.b64encode(b"a" * (MAX_TOKEN_BYTES + 1)) + b" 0\n", "tokens of up to 512 bytes"),
        (b"", "256 bytes have no token"),
    ],
)
def test_files_that_are_no_ranks_are_refused(tmp_path, data, why):
    written(tmp_path)
    (tmp_path / "tiktoken.model").write_bytes(data)
    with pytest.raises(ValueError, match=why):
        read_ranks(data)
    with pytest.raises(ModelError, match=r"broken tokenizer in .*tiktoken.model"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tokenizer_class": "QWenTokenizer"}, "tokenizer_class 'QWenTokenizer'"),
        ({"tokenizer_class": None}, "is of no Kimi"),
        ({"added_tokens_decoder": {"5": {"content": "<a>"}}}, "has the id 5, which is no id"),
        ({"added_tokens_decoder": {"99999": {"content": "<a>"}}}, "has the id 99999"),
        ({"added_tokens_decoder": {str(len(RANKS)): {"content": "the"}}}, "two tokens"),
    ],
)
def test_settings_that_do_not_fit_are_named(tmp_path, settings, why):
    with pytest.raises(ModelError, match=why):
        Tokenizer.load(written(tmp_path, **settings))


def test_a_tokenizer_json_comes_first(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    tokenizer = Tokenizer.load(written(first))
    (written(second) / "tokenizer.json").write_text(tokenizer.to_json())
    (second / "tiktoken.model").write_bytes(b"")
    assert Tokenizer.load(second).encode("hello the") == tokenizer.encode("hello the")
