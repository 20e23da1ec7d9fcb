"""Byte-level vocabularies whose file has another decoder, as after a conversion, and Gemma 4's."""

import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer as Core
from tokenizers import decoders, models, normalizers, pre_tokenizers

from cpuserve.engine.grammars.compiler import Compiler, take
from cpuserve.tokenizer.directory import _scheme
from cpuserve.tokenizer.parts import byte_level_bytes
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import tiny_end_ids, tiny_model

TEXT = "Hello how\n are \u00e9\u4e2d <b>\tyou?"
SENTENCEPIECE = decoders.Sequence(
    [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
     decoders.Strip(" ", 1, 0)]
)  # fmt: skip
DECODERS = {
    "byte level": decoders.ByteLevel(),
    "sentencepiece": SENTENCEPIECE,
    "metaspace": decoders.Metaspace(),
    "bpe": decoders.BPEDecoder(),
    "none": None,
}


@pytest.fixture(params=DECODERS)
def resaved(request, tmp_path):
    """A tiny model's tokenizer with another decoder in its file."""
    path = shutil.copytree(tiny_model("llama"), tmp_path / "m")
    file = path / "tokenizer.json"
    core = Core.from_file(str(file))
    decoder = DECODERS[request.param]
    if decoder is not None:
        core.decoder = decoder
    saved = json.loads(core.to_str())
    if decoder is None:
        saved["decoder"] = None
    file.write_text(json.dumps(saved))
    return path


def test_texts_are_the_bytes_of_the_tokens(resaved):
    known = Tokenizer.load(resaved)
    ids = known.encode(TEXT, add_special_tokens=False)
    assert known.decode(ids) == TEXT
    assert b"".join(map(known.token_bytes, ids)) == TEXT.encode()
    assert known.decode(known.encode(" a", add_special_tokens=False)) == " a"


def test_grammars_match_them(resaved):
    known = Tokenizer.load(resaved)
    compiler = Compiler(resaved, known.vocab_size, sorted(tiny_end_ids("llama")))
    matcher = compiler.compile(compiler.prepare("choice", json.dumps([TEXT]))).deep_copy()
    mask, ids = np.zeros(compiler.words, np.int32), []
    while not compiler.fill(matcher, mask, ()):
        bits = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        ids.append(int(bits[0]))
        take(matcher, ids[-1:])
    assert known.decode(ids) == TEXT


def test_a_vocabulary_of_sentencepiece_that_has_all_characters_is_none_of_bytes():
    vocab = {f"<0x{i:02X}>": i for i in range(256)}
    for char in [*byte_level_bytes(), "\u2581", "\u2581a"]:
        vocab.setdefault(char, len(vocab))
    core = Core(models.BPE(vocab, [("\u2581", "a")], byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Replace(" ", "\u2581")
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    assert _scheme(core) == ("byte_fallback", False)
    core.decoder = decoders.ByteLevel()
    assert _scheme(core)[0] == "byte_fallback"


def test_a_byte_level_vocabulary_without_its_pre_tokenizer_is_still_one_of_bytes():
    core = Core(models.BPE({char: i for i, char in enumerate(byte_level_bytes())}, []))
    assert _scheme(core) == ("byte_level", False)
    words = Core(models.WordLevel({char: i for i, char in enumerate(byte_level_bytes())}, "!"))
    assert _scheme(words) == ("plain", False)
