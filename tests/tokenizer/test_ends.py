"""The tokens that end an answer, found in the files of a model."""

import json

import pytest
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Core

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.file import GgufFile
from cpuserve.tokenizer.ends import end_ids
from cpuserve.tokenizer.vocabulary import ENDS
from tests.helpers.gguf_file import ARRAY, STRING, gguf
from tests.helpers.served import default_model


def write_json(path, value):
    path.write_text(json.dumps(value))


def write_tokenizer(path, *added, special=True):
    """tokenizer.json of the ordinary tokens a, b and c, and then `added`."""
    core = Core(models.BPE(vocab={"a": 0, "b": 1, "c": 2}, merges=[]))
    core.add_tokens([AddedToken(text, special=special) for text in added])
    core.save(str(path / "tokenizer.json"))
    write_json(path / "config.json", {})


def write_gguf(path, *tokens):
    file = path / "model.gguf"
    file.write_bytes(gguf([("tokenizer.ggml.tokens", ARRAY, (STRING, list(tokens)))]))
    return file


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", sorted(ENDS))
def test_every_known_end_is_found_in_a_directory(tmp_path, text, special):
    write_tokenizer(tmp_path, "<|im_start|>", text, special=special)
    assert end_ids((), tmp_path, 100) == {4}


@pytest.mark.parametrize("text", sorted(ENDS))
def test_every_known_end_is_found_in_a_gguf_file(tmp_path, text):
    assert end_ids((), write_gguf(tmp_path, "a", text, "</s>"), 100) == {1}


def test_an_open_file_is_read_only_if_it_is_the_tokenizer(tmp_path):
    (tmp_path / "other").mkdir()
    opened = GgufFile(write_gguf(tmp_path, "a", "<|im_end|>", "</s>"))
    tokenizer = write_gguf(tmp_path / "other", "a", "b", "<|eot_id|>")
    assert end_ids((), tokenizer, 100, opened) == {2}
    tokenizer.unlink()
    assert end_ids((), opened.path, 100, opened) == {1}
    with pytest.raises(ModelError, match="not found"):
        end_ids((), tokenizer, 100, opened)


def test_the_model_files_and_the_tokenizer_are_united(tmp_path):
    write_tokenizer(tmp_path, "<my end>", "<|im_end|>", "<|endoftext|>")
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": {"content": "<my end>"}})
    assert end_ids([1, 2], tmp_path, 100) == {1, 2, 3, 4, 5}


def test_ids_that_the_model_cannot_produce_are_left_out(tmp_path):
    write_tokenizer(tmp_path, "<|im_end|>", "<|endoftext|>")
    assert end_ids([1, 9], tmp_path, 4) == {1, 3}


def test_end_of_a_message_does_not_end_an_answer_of_several(tmp_path):
    """OpenAI's harmony format: an analysis message, <|end|>, then the final one, <|return|>."""
    harmony = ("<|return|>", "<|call|>", "<|end|>")
    write_tokenizer(tmp_path, *harmony)
    assert end_ids((), tmp_path, 100) == {3, 4}
    assert end_ids((), write_gguf(tmp_path, *harmony), 100) == {0, 1}
    assert end_ids([5], tmp_path, 100) == {3, 4, 5}, "unless the model's own files say so"


def test_vocab_json_without_tokenizer_json(tmp_path):
    write_json(tmp_path / "config.json", {})
    write_json(tmp_path / "vocab.json", {"a": 0, "</s>": 1, "<|endoftext|>": 2})
    assert end_ids((), tmp_path, 100) == {2}
    write_json(tmp_path / "special_tokens_map.json", {"eos_token": "</s>"})
    assert end_ids((), tmp_path, 100) == {1, 2}


def test_a_model_without_a_tokenizer_has_what_its_files_name(tmp_path):
    write_json(tmp_path / "config.json", {})
    assert end_ids([7], tmp_path, 100) == {7}
    (tmp_path / "model.gguf").write_bytes(gguf())
    assert end_ids([7], tmp_path / "model.gguf", 100) == {7}


@pytest.mark.parametrize("text", ["", "[1]", '{"added_tokens": [{"id": "x"}]}', "\xff"])
def test_a_broken_tokenizer_json_is_named(tmp_path, text):
    write_json(tmp_path / "config.json", {})
    (tmp_path / "tokenizer.json").write_text(text, encoding="latin-1")
    with pytest.raises(ModelError, match=r"broken tokenizer in .*tokenizer\.json"):
        end_ids((), tmp_path, 100)


@pytest.mark.network
def test_the_built_in_model_ends_at_the_turn_and_at_the_text():
    assert end_ids([2], default_model(), 49152) == {0, 2}
