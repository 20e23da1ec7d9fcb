"""The identity of a model's files: an engine never reads another file under an old name."""

import os
import shutil

import pytest

from cpuserve.base.errors import SourceChanged
from cpuserve.config.engine import SourceFile
from cpuserve.loader.source_files import check_same, source_files
from tests.helpers.tiny import tiny_model


@pytest.fixture
def model(tmp_path):
    return shutil.copytree(tiny_model("llama"), tmp_path / "model")


def another(file):
    """Move another file over it, as a download does, with the same size and time."""
    new = file.with_name("new")
    shutil.copy2(file, new)
    new.replace(file)


def touch(file):
    """Change a file in place."""
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))


def grow(file):
    """Add a byte, and set the old time again."""
    status = file.stat()
    with file.open("ab") as stream:
        stream.write(b"\n")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def remove(file):
    file.unlink()


@pytest.mark.parametrize("change", [another, touch, grow, remove])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_file_that_is_changed_replaced_or_removed_is_named(model, name, change):
    sources = source_files([model])
    check_same(sources)
    change(model / name)
    with pytest.raises(SourceChanged) as raised:
        check_same(sources)
    assert f"{name} (in {model})" in str(raised.value)


@pytest.mark.parametrize(
    "name", ["merges.txt", "tokenizer.model", "tiktoken.model", "rwkv_vocab_v20230424.txt"]
)
def test_each_kind_of_tokenizer_file_is_watched(model, name):
    (model / name).write_text("x")
    sources = source_files([model])
    grow(model / name)
    with pytest.raises(SourceChanged, match=f"the file {name}"):
        check_same(sources)


def test_a_file_that_comes_back_is_the_same(model):
    sources = source_files([model])
    weights = model / "model.safetensors"
    kept = weights.rename(model / "kept")
    weights.write_bytes(b"another")
    with pytest.raises(SourceChanged):
        check_same(sources)
    kept.replace(weights)
    check_same(sources)


def test_all_parts_of_a_gguf_and_the_folders_of_a_directory_are_watched(tmp_path):
    parts = [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    dense = tmp_path / "2_Dense" / "model.safetensors"
    dense.parent.mkdir()
    for file in (*parts, dense):
        file.write_bytes(b"x")
    assert [file.path for file in source_files([parts[0]])] == list(map(str, parts))
    assert [file.path for file in source_files([tmp_path])] == [str(dense)]


def test_a_file_that_cannot_be_read_is_left_to_the_error_of_opening_it(tmp_path):
    assert source_files([tmp_path / "missing.gguf", tmp_path / ("x" * 300)]) == []
    gone = SourceFile("bad\0name", 1, 1, 1, 1)
    with pytest.raises(SourceChanged, match="removed"):
        check_same([gone])
