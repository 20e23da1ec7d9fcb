"""cannot_fit never refuses a text that fits, for tokenizers with any normalizer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Core

from cpuserve.tokenizer.length import cannot_fit
from cpuserve.tokenizer.parts import Parts
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.depth import deep_but
from tests.helpers.tiny import tiny_model

RUN = "\u2581" * 8


def byte_level(*steps, **added) -> Tokenizer:
    """Bytes, two words, runs of 4 spaces, and one added token; normalized by `steps`."""
    words = {"the": [("t", "h"), ("th", "e")], "ĠĠĠĠ": [("Ġ", "Ġ"), ("ĠĠ", "ĠĠ")]}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [rule for rules in words.values() for rule in rules]
    spelled = [*alphabet, *("".join(rule) for rule in merges)]
    core = Core(models.BPE(vocab={t: i for i, t in enumerate(spelled)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    if steps:
        core.normalizer = normalizers.Sequence(list(steps))
    core.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False, **added)])
    return _tokenizer(core, "byte_level")


def sentence_piece(*, byte_fallback: bool) -> Tokenizer:
    """A few letters and runs of 8 spaces; the rest are bytes, or all one unknown token."""
    letters = ["<unk>", *"aeht\u2581", "\u2581\u2581", "\u2581" * 4, RUN]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)] if byte_fallback else []
    vocab = {token: i for i, token in enumerate([*letters, *bytes_])}
    merges = [("\u2581" * n, "\u2581" * n) for n in (1, 2, 4)]
    model = models.BPE(
        vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=byte_fallback
    )
    core = Core(model)
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    return _tokenizer(core, "byte_fallback")


def word_piece() -> Tokenizer:
    """A tokenizer in which any word of more than ten letters is one unknown token."""
    vocab = {"[UNK]": 0, "the": 1, "a": 2, "##a": 3}
    core = Core(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=10))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return _tokenizer(core, "plain")


def _tokenizer(core: Core, scheme) -> Tokenizer:
    size = core.get_vocab_size(with_added_tokens=True)
    return Tokenizer(Parts(core=core, scheme=scheme, vocab_size=size, special_ids=frozenset()))


MADE = {
    "tiny": Tokenizer.load(tiny_model("llama")),
    "byte-level": byte_level(),
    "nfc": byte_level(normalizers.NFC()),
    "nfd": byte_level(normalizers.NFD()),
    "strip": byte_level(normalizers.Strip()),
    "collapse": byte_level(normalizers.Replace(Regex(" {2,}"), " ")),
    "shorten": byte_level(normalizers.Replace("aaaa", "a")),
    "rstrip": byte_level(rstrip=True),
    "sentence-piece": sentence_piece(byte_fallback=True),
    "fused-unknown": sentence_piece(byte_fallback=False),
    "word-piece": word_piece(),
}
PIECES = st.sampled_from(
    ["    ", "\n", "a", "the", "e\u0301", "\u1112\u1161\u11ab", "\u2126", "<|end|>"]
)
TEXTS = st.lists(st.tuples(PIECES, st.integers(1, 400)), max_size=5).map(
    lambda runs: "".join(text * times for text, times in runs)
)


@pytest.mark.parametrize("name", deep_but(["tiny", "strip", "sentence-piece"], MADE))
def test_no_text_that_fits_is_refused(name):
    tokenizer = MADE[name]

    @settings(max_examples=150, deadline=None)
    @given(TEXTS, st.integers(1, 60))
    def check(text, most):
        if cannot_fit(tokenizer, text, most):
            assert len(tokenizer.encode(text, add_special_tokens=False)) > most

    check()


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("byte-level", 7),  # "<|end|>"
        ("nfc", 3 * 7),
        ("sentence-piece", 3 * 8),  # a run of spaces
        *((name, None) for name in ("strip", "collapse", "shorten", "rstrip")),
        *((name, None) for name in ("fused-unknown", "word-piece")),
    ],
)
def test_the_longest_text_of_a_token_is_known_where_there_is_one(name, most):
    assert MADE[name].most_bytes_per_token == most


@pytest.mark.parametrize("name", MADE)
def test_a_text_of_far_too_many_tokens_is_refused(name):
    unit = "the a " if name in ("word-piece", "collapse", "strip") else "a"
    assert cannot_fit(MADE[name], unit * 100_000, 1000)


def test_an_ordinary_text_is_not_looked_at():
    assert not cannot_fit(None, "the quick brown fox " * 100, 500)
