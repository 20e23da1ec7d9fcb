"""Models in several GGUF files: read as one, and an error that names the file for each fault."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpuserve.base.errors import ModelError
from cpuserve.engine.fingerprint import _files
from cpuserve.loader.gguf.parts import model_files, open_gguf, part_names
from cpuserve.loader.load import find_model, open_checkpoint, read_config
from cpuserve.loader.mapped import MappedFile
from cpuserve.quant import dequantize
from tests.helpers import gguf_file as make
from tests.helpers.gguf_file import I32, STRING, U32, gguf

U16 = 2
COUNT = 3


def tensors():
    return make.tiny_tensors(np.random.default_rng(0))


def keys(number, total, **changes):
    """The keys that llama-gguf-split writes into every part."""
    found = {
        "split.no": (U16, number),
        "split.count": (U16, COUNT),
        "split.tensors.count": (I32, total),
        **changes,
    }
    return [(key, *value) for key, value in found.items() if value is not None]


def write_parts(folder, changes=None, shares=None, more=()):
    """A tiny model in three parts. changes: part number to metadata; shares: tensors of parts."""
    every = tensors()
    shares = shares or [every[:4], every[4:9], every[9:]]
    names = part_names(f"tiny-00001-of-{COUNT:05}.gguf")
    for number, (name, share) in enumerate(zip(names, shares, strict=True)):
        values = make.tiny_values() if number == 0 else list(more)
        values = values + keys(number, len(every), **(changes or {}).get(number, {}))
        (folder / name).write_bytes(gguf(values, share))
    return [folder / name for name in names]


def test_parts_have_the_names_that_llama_gguf_split_gives():
    assert part_names("m-00002-of-00003.gguf") == [
        "m-00001-of-00003.gguf", "m-00002-of-00003.gguf", "m-00003-of-00003.gguf",
    ]  # fmt: skip
    for name in ("m.gguf", "m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-1-of-3.gguf",
                 "m-00001-of-99999.gguf", "m-00001-of-00003.gguf.part"):  # fmt: skip
        assert part_names(name) == [name]


def test_model_files_are_whole_models():
    names = ["b-00002-of-00002.gguf", "b-00001-of-00002.gguf", "a.gguf", "mmproj-a-f16.gguf",
             "a.imatrix.gguf", "config.json"]  # fmt: skip
    assert model_files(names) == ["a.gguf", "b-00001-of-00002.gguf"]


@pytest.mark.parametrize("given", [0, 1, 2, "directory"])
def test_any_part_and_the_directory_give_the_whole_model(tmp_path, given):
    parts = write_parts(tmp_path)
    checkpoint = open_checkpoint(tmp_path if given == "directory" else parts[given])
    assert checkpoint.path == parts[0]
    whole = tmp_path / "whole" / "m.gguf"
    whole.parent.mkdir()
    whole.write_bytes(gguf(make.tiny_values(), tensors()))
    wanted = open_checkpoint(whole)
    assert checkpoint.config == wanted.config
    assert checkpoint.weights.names() == wanted.weights.names()
    for name in wanted.weights.names():
        expected = dequantize(wanted.weights.get(name))
        assert np.array_equal(dequantize(checkpoint.weights.get(name)), expected), name


def test_tensors_are_released_in_their_own_part(tmp_path, monkeypatch):
    parts = write_parts(tmp_path)
    weights = open_checkpoint(parts[0]).weights
    released = []
    monkeypatch.setattr(
        MappedFile, "release", lambda file, *place: released.append((file.path, *place))
    )
    for name in weights.names():
        weights.get(name).release()
    file = open_gguf(parts[0])
    wanted = {(t.file.path, t.offset, t.size) for t in file.tensors.values()}
    assert set(released) >= wanted
    assert {path for path, *_ in wanted} == set(parts)


def test_a_part_that_changes_is_noticed(tmp_path):
    parts = write_parts(tmp_path)
    checkpoint = open_checkpoint(parts[0])
    parts[2].write_bytes(parts[2].read_bytes() + b"x")
    checkpoint.weights.get("model.embed_tokens.weight")
    with pytest.raises(ModelError, match=r"00003-of-00003\.gguf changed while"):
        checkpoint.weights.get("model.layers.0.mlp.down_proj.weight")


def test_a_first_part_may_have_no_tensors(tmp_path):
    every = tensors()
    parts = write_parts(tmp_path, shares=[[], every[:5], every[5:]])
    assert len(open_gguf(parts[0]).tensors) == len(every)


def test_one_part_of_one_is_a_file(tmp_path):
    path = tmp_path / "m-00001-of-00001.gguf"
    path.write_bytes(gguf([*make.tiny_values(), ("split.count", U16, 1)], tensors()))
    assert read_config(path)["num_hidden_layers"] == 1


def test_a_whole_file_with_the_name_of_a_part_stands_for_itself(tmp_path):
    path = tmp_path / "m-00002-of-00003.gguf"
    path.write_bytes(gguf(make.tiny_values(), tensors()))
    assert find_model(path) == path
    assert read_config(path)["num_hidden_layers"] == 1


def test_all_parts_tell_prefixes_of_models_apart(tmp_path):
    parts = write_parts(tmp_path)
    assert [name for name, *_ in _files(parts[0])] == [path.name for path in parts]


FAULTS = {
    "number": ({1: {"split.no": (U16, 2)}}, "00002-of-00003.gguf: split.no is 2"),
    "no number": ({2: {"split.no": None}}, "00003-of-00003.gguf: split.no is missing"),
    "first number": ({0: {"split.no": (U16, 1)}}, "00001-of-00003.gguf: split.no is 1"),
    "count": ({2: {"split.count": (U16, 2)}}, "00003-of-00003.gguf: split.count is 2"),
    "no count": ({1: {"split.count": None}}, "00002-of-00003.gguf: split.count is missing"),
    "first count": ({0: {"split.count": (U16, 2)}}, "must be called NAME-00001-of-00002.gguf"),
    "count 0": ({0: {"split.count": (U16, 0)}}, "split.count is 0"),
    "count -1": ({0: {"split.count": (I32, -1)}}, "split.count is -1"),
    "count huge": ({0: {"split.count": (U32, 2**32 - 1)}}, "split.count is 4294967295"),
    "count text": ({0: {"split.count": (STRING, "3")}}, "split.count is '3', not an integer"),
    "tensors": ({0: {"split.tensors.count": (I32, 12)}}, "split.tensors.count is 12, but"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_metadata_that_do_not_fit_are_refused_with_the_file(tmp_path, case):
    changes, reason = FAULTS[case]
    parts = write_parts(tmp_path, changes)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(parts[0])
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_missing_part_is_named(tmp_path, missing):
    parts = write_parts(tmp_path)
    parts[missing].unlink()
    for path in set(parts) - {parts[missing]}:
        with pytest.raises(ModelError) as caught:
            open_checkpoint(path)
        assert f"part {missing + 1} of the GGUF model" in str(caught.value)
        assert f"{parts[missing]} not found" in str(caught.value)


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    every = tensors()
    parts = write_parts(tmp_path, shares=[every[:4], every[3:9], every[9:]])
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: tensor .* is also in .*00001"):
        open_checkpoint(parts[0])


def test_a_part_of_another_architecture_is_refused(tmp_path):
    parts = write_parts(tmp_path, more=[("general.architecture", STRING, "qwen2")])
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: general\.architecture is 'qwen2'"):
        open_checkpoint(parts[0])


def test_a_part_that_is_broken_or_no_file_is_named(tmp_path):
    parts = write_parts(tmp_path)
    data = parts[1].read_bytes()
    parts[1].write_bytes(data[:-64])
    with pytest.raises(ModelError, match=r"broken GGUF .*00002-of-00003\.gguf"):
        open_checkpoint(parts[0])
    parts[1].unlink()
    parts[1].mkdir()
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf is a directory"):
        open_checkpoint(parts[0])


@pytest.mark.deep
@settings(
    max_examples=200,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    part=st.integers(0, COUNT - 1),
    at=st.integers(0, 400),
    byte=st.integers(0, 255),
    cut=st.booleans(),
)
def test_changed_parts_are_read_or_refused_in_one_line(tmp_path, part, at, byte, cut):
    path = write_parts(tmp_path)[part]
    data = bytearray(path.read_bytes())
    data[at] = byte
    path.write_bytes(bytes(data[:at] if cut else data))
    message = "read"
    try:
        open_checkpoint(tmp_path)
    except ModelError as error:
        message = str(error)
    assert message.isprintable()
