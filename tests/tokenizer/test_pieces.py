"""Directories with a tokenizer.model: the ids of sentencepiece, added tokens, and broken files."""

import base64
import json

import pytest
from transformers.utils import sentencepiece_model_pb2_new as proto

from cpuserve.base.errors import ModelError
from cpuserve.tokenizer.directory import piece_ids
from cpuserve.tokenizer.ends import end_ids
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.tokenizer.test_sentencepiece import GOLDEN, NAMES


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())["models"]


def message(model, name, **trainer):
    """The message of protobuf with the vocabulary of a golden model."""
    made = proto.ModelProto()
    for text, score, kind in zip(model["tokens"], model["scores"], model["types"], strict=True):
        made.pieces.add(piece=text, score=score, type=kind)
    kinds = proto.TrainerSpec.ModelType
    made.trainer_spec.model_type = kinds.UNIGRAM if "unigram" in name else kinds.BPE
    for key, value in trainer.items():
        setattr(made.trainer_spec, key, value)
    made.normalizer_spec.add_dummy_prefix = model["space_prefix"]
    made.normalizer_spec.remove_extra_whitespaces = model["squeeze"]
    made.normalizer_spec.precompiled_charsmap = base64.b64decode(model["charsmap"])
    return made.SerializeToString()


def written(path, data, **settings):
    (path / "tokenizer.model").write_bytes(data)
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


@pytest.mark.parametrize("name", NAMES)
def test_ids_equal_those_of_sentencepiece(tmp_path, golden, name):
    tokenizer = Tokenizer.load(written(tmp_path, message(golden[name], name)))
    for text, ids in golden[name]["strings"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
    assert tokenizer.bos_id == 1
    assert tokenizer.special_tokens["eos_token"] == golden[name]["tokens"][2]


@pytest.mark.parametrize(("setting", "first"), [({}, [1]), ({"add_bos_token": False}, [])])
def test_a_text_begins_with_the_first_token_unless_the_settings_say_no(
    tmp_path, golden, setting, first
):
    tokenizer = Tokenizer.load(written(tmp_path, message(golden["llama"], "llama"), **setting))
    plain = tokenizer.encode("the dog", add_special_tokens=False)
    assert tokenizer.encode("the dog") == [*first, *plain]


# The tokens of transformers 5.24 with sentencepiece, if legacy is false.
ONCE = {
    "the dog": ["\u2581the", "\u2581do", "g"],
    "the dog</s>the dog": ["\u2581the", "\u2581do", "g", "</s>", "th", "e", "\u2581do", "g"],
    " the dog": ["\u2581the", "\u2581do", "g"],
    "<s> the  dog": ["<s>", "\u2581the", "\u2581\u2581", "d", "o", "g"],
}


def tokens_of(tokenizer, text):
    return [tokenizer.token_text(i) for i in tokenizer.encode(text, add_special_tokens=False)]


def test_only_the_beginning_of_a_text_gets_a_space_if_legacy_is_false(tmp_path, golden):
    tokenizer = Tokenizer.load(written(tmp_path, message(golden["llama"], "llama"), legacy=False))
    assert {text: tokens_of(tokenizer, text) for text in ONCE} == ONCE
    assert tokenizer.decode(tokenizer.encode("the dog</s>the dog")) == "the dogthe dog"


@pytest.mark.parametrize("name", ["llama", "unigram"])
@pytest.mark.parametrize("settings", [{}, {"legacy": True}])
def test_a_text_after_a_special_token_gets_a_space_as_well(tmp_path, golden, name, settings):
    tokenizer = Tokenizer.load(written(tmp_path, message(golden[name], name), **settings))
    tokens = tokens_of(tokenizer, "the dog</s>the dog")
    at = tokens.index("</s>")
    assert tokens[:at] == tokens[at + 1 :] == tokens_of(tokenizer, "the dog")


def test_added_tokens_replace_pieces_and_follow_them(tmp_path, golden):
    """InternLM 2 has other texts for the last pieces."""
    model = golden["llama"]
    count = len(model["tokens"])
    added = {
        "30": {"content": "<|im_start|>", "special": True},
        str(count): {"content": "<|more|>", "special": False},
    }
    path = written(tmp_path, message(model, "llama"), added_tokens_decoder=added)
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode("<|im_start|><|more|>", add_special_tokens=False)
    assert [i for i in ids if i in (30, count)] == [30, count]
    assert 30 in tokenizer.special_ids
    assert count not in tokenizer.special_ids
    assert tokenizer.vocab_size == count + 1


def test_an_added_token_ends_a_turn(tmp_path, golden):
    added = {"30": {"content": "<|im_end|>"}, "31": {"content": "<|plugin|>"}}
    path = written(tmp_path, message(golden["llama"], "llama"), added_tokens_decoder=added)
    assert end_ids([2], path, 900) == {2, 30}


# The tokens of sentencepiece 0.2.3 where runs of two and of four spaces are user-defined.
SPACES = {
    "the  dog": ["\u2581the", "\u2581\u2581", "d", "o", "g"],
    "the   dog": ["\u2581the", "\u2581\u2581", "\u2581do", "g"],
    "the     dog": ["\u2581the", "\u2581\u2581\u2581\u2581", "\u2581do", "g"],
    "  the": ["\u2581\u2581", "\u2581the"],
}


def test_user_defined_runs_of_spaces_are_found(tmp_path, golden):
    """The pieces of Gemma have such runs: a text has spaces, and a piece has U+2581."""
    runs = ["\u2581\u2581", "\u2581\u2581\u2581\u2581"]
    made = proto.ModelProto.FromString(message(golden["llama"], "llama"))
    for piece in made.pieces:
        if piece.piece in runs:
            piece.type, piece.score = proto.ModelProto.SentencePiece.USER_DEFINED, 0.0
            runs.remove(piece.piece)
    for run in runs:
        made.pieces.add(piece=run, type=proto.ModelProto.SentencePiece.USER_DEFINED)
    tokenizer = Tokenizer.load(written(tmp_path, made.SerializeToString()))
    assert {text: tokens_of(tokenizer, text) for text in SPACES} == SPACES


def test_a_piece_of_the_file_ends_a_turn(tmp_path, golden):
    model = golden["llama"]
    texts = [*model["tokens"][:-1], "<end_of_turn>"]
    path = written(tmp_path, message({**model, "tokens": texts}, "llama"), eos_token="</s>")
    assert end_ids([], path, 900) == {model["tokens"].index("</s>"), len(texts) - 1}
    path = written(tmp_path, b"\x08\x01")
    with pytest.raises(ModelError, match="broken tokenizer"):
        end_ids([], path, 900)


def test_tokens_of_an_older_directory_are_added(tmp_path, golden):
    """Directories of 2023 and before list them in a file of their own, without their kinds."""
    count = len(golden["llama"]["tokens"])
    added = {"<|im_start|>": count, "<|im_end|>": count + 1, "<|more|>": count + 2}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    special = {"eos_token": {"content": "<|im_end|>"}}
    more = ["<|im_start|>"]
    data = message(golden["llama"], "llama")
    path = written(tmp_path, data, **special, additional_special_tokens=more)
    tokenizer = Tokenizer.load(path)
    ids = tokenizer.encode("<|im_start|><|more|><|im_end|>", add_special_tokens=False)
    assert [i for i in ids if i >= count] == [count, count + 2, count + 1]
    assert {count, count + 1} <= tokenizer.special_ids
    assert count + 2 not in tokenizer.special_ids
    assert end_ids([2], path, count + 3) == {2, count + 1}


def test_ids_of_special_tokens_are_those_of_the_file(tmp_path, golden):
    data = message(golden["llama"], "llama", bos_id=2, eos_id=1, pad_id=-1)
    tokenizer = Tokenizer.load(written(tmp_path, data))
    assert tokenizer.bos_id == 2
    assert tokenizer.special_tokens["eos_token"] == golden["llama"]["tokens"][1]


BROKEN = {
    "empty": (b"", "no pieces"),
    "text": (b"IQ== 0\nIg== 1\n", "broken tokenizer"),
    "bytes": (b"\x0a\x03\x0a\x01\xff", "a piece is not UTF-8 text"),
    "number": (b"\x08\x01", "a number where a text"),
    "short": (b"\x0a\x7f", "is not a model of SentencePiece"),
    "endless": (b"\xff" * 12, "ends within a number"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_file_that_is_no_model_of_sentencepiece_is_one_line(tmp_path, case):
    data, why = BROKEN[case]
    with pytest.raises(ModelError, match=why):
        Tokenizer.load(written(tmp_path, data))


def test_words_and_characters_are_no_known_models(tmp_path, golden):
    kind = proto.TrainerSpec.ModelType.WORD
    data = message(golden["llama"], "llama", model_type=kind)
    with pytest.raises(ModelError, match="no pieces of a BPE or a Unigram"):
        Tokenizer.load(written(tmp_path, data))


@pytest.mark.parametrize("part", ["trainer_spec", "normalizer_spec"])
def test_spaces_after_pieces_and_spaces_without_a_character_are_refused(tmp_path, golden, part):
    made = proto.ModelProto.FromString(message(golden["llama"], "llama"))
    made.trainer_spec.treat_whitespace_as_suffix = part == "trainer_spec"
    made.normalizer_spec.escape_whitespaces = part == "trainer_spec"
    with pytest.raises(ModelError, match="spaces are not at the beginning"):
        Tokenizer.load(written(tmp_path, made.SerializeToString()))


@pytest.mark.parametrize("name", ["llama", "unigram"])
def test_a_piece_that_is_too_long_is_refused(tmp_path, golden, name):
    """A Unigram model of the library has a node for each of its characters."""
    texts = [*golden[name]["tokens"][:-1], "a" * 600]
    with pytest.raises(ModelError, match="a token has 600 characters"):
        Tokenizer.load(written(tmp_path, message({**golden[name], "tokens": texts}, name)))


def test_too_many_pieces_are_refused(tmp_path, golden, monkeypatch):
    data = message(golden["llama"], "llama")
    monkeypatch.setattr("cpuserve.tokenizer.pieces.MAX_PIECES", len(golden["llama"]["tokens"]))
    Tokenizer.load(written(tmp_path, data))
    with pytest.raises(ModelError, match=r"more than \d+ pieces"):
        Tokenizer.load(written(tmp_path, b"\x0a\x00" + data))


@pytest.mark.parametrize("table", [bytes([1, 2, 3]), bytes([255] * 16), bytes([8, *[0] * 12])])
def test_a_broken_table_of_characters_is_refused_at_the_start(tmp_path, golden, table):
    """The library fails only at the first text."""
    broken = {**golden["unigram"], "charsmap": base64.b64encode(table).decode()}
    with pytest.raises(ModelError, match="broken tokenizer"):
        Tokenizer.load(written(tmp_path, message(broken, "unigram")))


def test_an_id_of_thousands_of_digits_is_refused_in_one_line(tmp_path, golden):
    added = {"9" * 5000: {"content": "<|far|>"}}
    path = written(tmp_path, message(golden["llama"], "llama"), added_tokens_decoder=added)
    for read in (Tokenizer.load, piece_ids):
        with pytest.raises(ModelError, match=r"broken tokenizer in .*Exceeds the limit"):
            read(path)


def test_an_added_token_after_a_gap_is_refused(tmp_path, golden):
    model = golden["llama"]
    added = {str(len(model["tokens"]) + 1): {"content": "<|far|>"}}
    with pytest.raises(ModelError, match="the one before it is missing"):
        Tokenizer.load(written(tmp_path, message(model, "llama"), added_tokens_decoder=added))
