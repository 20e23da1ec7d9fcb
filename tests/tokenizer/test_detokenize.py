"""Incremental detokenization: no partial characters, and the same text as decoding all ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Core
from tokenizers.pre_tokenizers import ByteLevel

from cpuserve.tokenizer.detokenize import Detokenizer
from cpuserve.tokenizer.parts import Parts, special_ids_of
from cpuserve.tokenizer.tokenizer import Tokenizer

ALPHABET = sorted(ByteLevel.alphabet())


def byte_level_core():
    vocab = {c: i for i, c in enumerate(ALPHABET)}
    core = Core(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<|end|>", special=True)])
    core.add_tokens([AddedToken("two words", normalized=False)])
    return core


def wrap(core, scheme, strips=False):
    size = core.get_vocab_size(with_added_tokens=True)
    special = special_ids_of(core)
    return Tokenizer(Parts(core, scheme, size, special, strips_leading_space=strips))


CORE = byte_level_core()
BYTES = wrap(CORE, "byte_level")
END = CORE.token_to_id("<|end|>")
IDS = st.lists(st.integers(0, BYTES.vocab_size + 3), max_size=60)
TEXT_IDS = st.text(max_size=20).map(lambda t: [ALPHABET.index(c) for c in byte_chars(t)])
MANY = settings(max_examples=300, deadline=None, derandomize=True)


def byte_chars(text):
    table = {BYTES.token_bytes(i)[0]: ALPHABET[i] for i in range(256)}
    return [table[b] for b in text.encode()]


@MANY
@given(ids=IDS, skip=st.booleans())
def test_decode_equals_the_tokenizers_library(ids, skip):
    known = [i for i in ids if i < BYTES.vocab_size]
    assert BYTES.decode(ids, skip) == CORE.decode(known, skip_special_tokens=skip)


@MANY
@given(ids=st.one_of(IDS, TEXT_IDS), data=st.data(), skip=st.booleans())
def test_pushed_in_any_pieces_the_text_is_that_of_all_at_once(ids, data, skip):
    detokenizer, out, at = Detokenizer(BYTES, [], skip), "", 0
    while at < len(ids):
        step = data.draw(st.integers(1, 5))
        out += detokenizer.push(ids[at : at + step])
        at += step
    assert out + detokenizer.flush() == BYTES.decode(ids, skip)


@MANY
@given(text=st.text(max_size=20), cut=st.integers(0, 80))
def test_valid_text_never_shows_a_replacement_character(text, cut):
    text = text.replace("\ufffd", "")
    ids = [ALPHABET.index(c) for c in byte_chars(text)]
    prompt, rest = ids[:cut], ids[cut:]
    detokenizer = Detokenizer(BYTES, prompt)
    pieces = [detokenizer.push([i]) for i in rest]
    assert "\ufffd" not in "".join(pieces)
    # If a prompt ends within a character, its last bytes begin the first character of the text.
    assert text.endswith("".join(pieces))
    assert detokenizer.flush() == ""


def test_half_a_character_waits_and_is_flushed_as_replacement():
    ids = [ALPHABET.index(c) for c in byte_chars("😀")]
    detokenizer = Detokenizer(BYTES)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "😀"]
    assert detokenizer.push(ids[:3]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_within_a_character_do_not_break_it():
    first, *rest = [ALPHABET.index(c) for c in byte_chars("é")]
    assert Detokenizer(BYTES).push([first, END, *rest]) == "é"
    assert "<|end|>" in Detokenizer(BYTES, (), False).push([END])


class Counting:
    """A tokenizer that counts the calls of token_bytes."""

    special_ids = frozenset()
    strips_leading_space = False

    def __init__(self):
        self.asked = 0

    def token_bytes(self, token_id):
        self.asked += 1
        return b"\xe4" if token_id else b"a"


@pytest.mark.parametrize("token", [0, 1], ids=["text", "never a character"])
def test_each_id_is_looked_at_once(token):
    counting = Counting()
    detokenizer = Detokenizer(counting, [0] * 1000)
    for _ in range(1000):
        detokenizer.push([token])
    assert counting.asked <= 1004


def sentencepiece():
    """Llama 2 style: U+2581 for spaces, <0xNN> for bytes."""
    vocab = {"<unk>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}}
    for token in ("▁Hello", "▁", "world", "▁wor", "ld"):
        vocab[token] = len(vocab)
    core = Core(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    core.add_special_tokens([AddedToken("<s>", special=True)])
    return core


def test_sentencepiece_scheme_is_recognized(tmp_path):
    core = sentencepiece()
    core.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.strips_leading_space
    ids = [core.token_to_id(t) for t in ("<s>", "▁Hello", "▁wor", "ld", "<0xF0>", "<0x9F>",
                                         "<0x98>", "<0x80>", "▁")]  # fmt: skip
    assert tokenizer.decode(ids) == core.decode(ids) == "Hello world😀 "
    # After a prompt the space belongs to the text.
    assert Detokenizer(tokenizer, ids[:1]).push(ids[1:3]) == " Hello wor"
    assert [Detokenizer(tokenizer, ids).push(ids[4:6])] == [""]
