"""The tokens of forced texts: they have the bytes of the text, and none is a control token."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from cpuserve.engine.grammars.compiler import GrammarTokens, ll_tokenizer
from cpuserve.tokenizer.parts import Parts
from cpuserve.tokenizer.tokenizer import Tokenizer as Known

PIECES = ["</s>", "<", " ", "a", "ab", "é", "e\u0301", "\n", "<tool>", "\u4e2d"]


def byte_level():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(alphabet))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.normalizer = normalizers.NFC()
    return core, "byte_level"


def sentencepiece():
    vocab = {f"<0x{i:02X}>": i for i in range(256)}
    for c in ["\u2581", "a", "b", "<", "/", "s", ">", "\u2581a", "ab"]:
        vocab[c] = len(vocab)
    core = Tokenizer(models.BPE(vocab, [("\u2581", "a"), ("a", "b")], byte_fallback=True))
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    core.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    return core, "byte_fallback"


@pytest.fixture(scope="module", params=[byte_level, sentencepiece])
def known(request):
    core, scheme = request.param()
    core.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    core.add_tokens([AddedToken("<tool>", normalized=False)])
    size = core.get_vocab_size(with_added_tokens=True)
    return Known(Parts(core, scheme, size, frozenset({core.token_to_id("</s>")})))


@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_forced_texts_have_their_bytes_in_ordinary_tokens(known, text):
    size = known.vocab_size
    words = GrammarTokens(known, size, known.token_id("</s>"))
    words.known = ll_tokenizer(known, size, words.eos_token_id)
    ids = words(text.encode())
    assert b"".join(map(known.token_bytes, ids)) == text.encode()
    assert set(known.masks.ids.values()).isdisjoint(ids)
