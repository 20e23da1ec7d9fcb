"""Headers of weight files with more than any model has are refused with one line, at once."""

import json
import struct

import pytest

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.file import GgufFile
from cpuserve.loader.safetensors import SafetensorsFile, SafetensorsStore
from cpuserve.media.pictures.families.checkpoint import _read

EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
UINT32, ARRAY, STRING = 4, 9, 8


def safetensors(path, header):
    data = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(data)) + data)
    return path


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(path, num_tensors, values, body):
    head = struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, values)
    path.write_bytes(head + body)
    return path


def test_300_000_empty_tensors_are_refused(tmp_path):
    path = safetensors(tmp_path / "model.safetensors", {f"t.{i}": EMPTY for i in range(300_000)})
    with pytest.raises(ModelError, match="its header has 300000 tensors; at most 131072"):
        SafetensorsFile(path)


def test_entries_that_are_no_tensors_are_counted_too(tmp_path):
    path = safetensors(tmp_path / "model.safetensors", {f"t.{i}": 0 for i in range(200_000)})
    with pytest.raises(ModelError, match="200000 entries, more than 131072"):
        SafetensorsFile(path)


@pytest.mark.parametrize("values", ["[[],@0]", "{@}"])
def test_a_header_of_millions_of_values_is_refused_before_it_is_read(values, tmp_path):
    each = "[]," if "[]" in values else '"":0,'
    header = f'{{"__metadata__":{values.replace("@", each * 3_000_000)}}}'.encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(ModelError, match=r"has [36]\d+ values; at most"):
        SafetensorsFile(path)


def test_an_index_of_millions_of_values_is_refused_before_it_is_read(tmp_path):
    text = f'{{"weight_map":{{}},"x":[{"[]," * 3_000_000}0]}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelError, match=r"has 6\d+ values; at most"):
        SafetensorsStore(tmp_path)


def test_a_tensor_of_a_million_dimensions_is_refused(tmp_path):
    shape = {**EMPTY, "shape": [2**62] * 1_000_000}
    path = safetensors(tmp_path / "model.safetensors", {"t": shape})
    with pytest.raises(ModelError, match="'t' has 1000000 dimensions; at most 8") as refused:
        SafetensorsFile(path)
    assert len(str(refused.value)) < 1000


def test_an_index_of_more_than_524_288_tensors_is_refused(tmp_path):
    index = ",".join(f'"t.{i}":"m.safetensors"' for i in range(524_289))
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map":{{{index}}}}}')
    with pytest.raises(ModelError, match="has 524289 tensors; at most 524288"):
        SafetensorsStore(tmp_path)


def test_a_gguf_header_of_300_000_tensors_is_refused(tmp_path):
    row = text("t.0") + struct.pack("<IQIQ", 1, 8, 0, 0)
    path = gguf(tmp_path / "m.gguf", 300_000, 0, row * 300_000)
    with pytest.raises(ModelError, match="tensor count: 300000 are more than 131072"):
        GgufFile(path)


def test_a_gguf_header_of_100_000_values_is_refused(tmp_path):
    values = b"".join(text(f"k.{i}") + struct.pack("<II", UINT32, 0) for i in range(100_000))
    with pytest.raises(ModelError, match="metadata count: 100000 are more than 16384"):
        GgufFile(gguf(tmp_path / "m.gguf", 0, 100_000, values))


@pytest.mark.parametrize("element", [UINT32, STRING])
def test_a_gguf_array_of_5_million_elements_is_refused(element, tmp_path):
    array = text("k") + struct.pack("<IIQ", ARRAY, element, 5_000_000) + bytes(40_000_000)
    with pytest.raises(ModelError, match="k length: 5000000 elements are more than 4194304"):
        GgufFile(gguf(tmp_path / "m.gguf", 0, 1, array))


@pytest.mark.parametrize(
    ("content", "why"),
    [("[" * 100_000, "cannot be read"), (" " * 10_000_001, "10000001 bytes; at most 10000000")],
)
def test_settings_of_pictures_that_are_deep_or_large_are_refused(content, why, tmp_path):
    path = tmp_path / "preprocessor_config.json"
    path.write_text(content)
    with pytest.raises(ModelError, match=why):
        _read(path)
