"""The safetensors reader: its results, and its errors for malformed or malicious directories."""

import contextlib
import json
import os
import shutil
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cpuserve.base.errors import ModelError
from cpuserve.loader.load import open_checkpoint, read_config
from cpuserve.loader.safetensors import INDEX, SafetensorsFile, SafetensorsStore
from cpuserve.quant import dequantize
from cpuserve.tokenizer.tokenizer import Tokenizer
from tests.helpers.tiny import tiny_model


def packed(header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype="F32", shape=(2, 2), offsets=(0, 16), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


GOOD = packed(
    {
        "__metadata__": {"format": "pt"},
        "a": entry(),
        "b": entry("BF16", (3,), (16, 22)),
        "c": entry("F16", (), (22, 24)),
    },
    bytes(range(24)),
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def test_tensors_are_the_files_bytes(path):
    path.write_bytes(GOOD)
    store = SafetensorsStore(path.parent)
    assert store.names() == {"a", "b", "c"}
    assert store.dtype("b") == "BF16"
    tensor = store.get("b")
    assert (tensor.shape, tensor.data.tobytes()) == ((3,), bytes(range(16, 22)))
    assert store.get("c").shape == ()
    tensor.release()
    assert tensor.data.tobytes() == bytes(range(16, 22))


def test_what_the_reference_library_writes_is_read_back(tmp_path):
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    arrays = {f"t{i}": rng.standard_normal((i + 1, 8)).astype("<f4") for i in range(5)}
    arrays["half"] = arrays["t3"].astype("<f2")
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    weights = open_checkpoint(tmp_path).weights
    for name, array in arrays.items():
        assert np.array_equal(dequantize(weights.get(name)), array.astype(np.float32))


BIG = 2**62
DUPLICATE = b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)
MALFORMED = {
    "empty": (b"", "0 bytes"),
    "short": (b"\1\0\0", "3 bytes"),
    "header size huge": (struct.pack("<Q", 2**63) + b"{}", "header size"),
    "header beyond file": (struct.pack("<Q", 1000) + b"{}", "beyond the end"),
    "header over 100 MB": (struct.pack("<Q", 100_000_001) + b"{}", "100000000"),
    "no object": (packed(b"[]"), "not a JSON object"),
    "no JSON": (packed(b"{nope}"), "header"),
    "not UTF-8": (packed(b'{"\xff":1}'), "header"),
    "deep": (packed(b'{"a":' + b"[" * 100_000), "header"),
    "huge number": (packed(b'{"a":' + b"9" * 5000 + b"}"), "header"),
    "duplicate": (packed(DUPLICATE, bytes(16)), "'a' occurs twice"),
    "duplicate in entry": (packed(b'{"a":{"dtype":"F32","dtype":"F16"}}'), "'dtype' occurs twice"),
    "metadata": (packed({"__metadata__": {"a": 1}}), "__metadata__"),
    "entry no object": (packed({"a": 1}), "dtype, shape"),
    "entry lacks shape": (packed({"a": {"dtype": "F32", "data_offsets": [0, 0]}}), "dtype, shape"),
    "entry has more": (packed({"a": entry(extra=1)}, bytes(16)), "dtype, shape"),
    "name with a line break": (packed({"a\nb": entry()}, bytes(16)), "unprintable"),
    "dtype unknown": (packed({"a": entry("F31")}, bytes(16)), "F31"),
    "dtype no string": (packed({"a": entry([])}, bytes(16)), "unknown dtype"),
    "shape negative": (packed({"a": entry(shape=(-2, -2))}, bytes(16)), "lists of sizes"),
    "shape float": (packed({"a": entry(shape=(2.0, 2))}, bytes(16)), "lists of sizes"),
    "shape bool": (packed({"a": entry(shape=(True, 4))}, bytes(16)), "lists of sizes"),
    "shape overflow": (packed({"a": entry(shape=(BIG, 4))}, bytes(16)), "is not 16 bytes"),
    "offsets three": (packed({"a": entry(offsets=(0, 8, 16))}, bytes(16)), "lists of sizes"),
    "offsets swapped": (packed({"a": entry(offsets=(16, 0))}, bytes(16)), "is not -16 bytes"),
    "offsets beyond": (packed({"a": entry(offsets=(16, 32))}, bytes(16)), "hole"),
    "wrong size": (packed({"a": entry(offsets=(0, 12))}, bytes(12)), "is not 12 bytes"),
    "hole": (packed({"a": entry(), "b": entry(offsets=(20, 36))}, bytes(36)), "hole"),
    "overlap": (packed({"a": entry(), "b": entry(offsets=(8, 24))}, bytes(24)), "overlaps"),
    "data cut": (packed({"a": entry()}, bytes(15)), "truncated"),
    "data beyond": (packed({"a": entry()}, bytes(17)), "the file at"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_file_is_refused_with_the_reason(path, case):
    data, reason = MALFORMED[case]
    path.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        SafetensorsFile(path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_truncation_at_every_byte_is_refused(path):
    for size in range(len(GOOD)):
        path.write_bytes(GOOD[:size])
        with pytest.raises(ModelError):
            SafetensorsFile(path)


@pytest.mark.deep
@settings(
    max_examples=600,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4
    )
)
def test_changed_bytes_raise_model_error_or_nothing(path, changes):
    data = bytearray(GOOD)
    for at, byte in changes:
        data[at] = byte
    path.write_bytes(bytes(data))
    with contextlib.suppress(ModelError):
        file = SafetensorsFile(path)
        for tensor in file.tensors.values():
            assert len(file.file.view(tensor.offset, tensor.size)) == tensor.size


def shard(directory, name, tensors):
    header, data = {}, b""
    for tensor in tensors:
        header[tensor] = entry(offsets=(len(data), len(data) + 16))
        data += bytes(16)
    (directory / name).write_bytes(packed(header, data))


S1, S2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def sharded(tmp_path):
    """Two shards and an index."""
    shard(tmp_path, S1, ["a", "b"])
    shard(tmp_path, S2, ["c"])
    write_index(tmp_path, {"a": S1, "b": S1, "c": S2})
    return tmp_path


def write_index(directory, names):
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


def test_shards_are_one_checkpoint(sharded):
    assert SafetensorsStore(sharded).names() == {"a", "b", "c"}


def test_shards_without_an_index_are_one_checkpoint(sharded):
    (sharded / INDEX).unlink()
    assert SafetensorsStore(sharded).names() == {"a", "b", "c"}


@pytest.mark.parametrize("indexed", [True, False], ids=["index", "no index"])
def test_missing_shard_is_named(sharded, indexed):
    (sharded / S2).unlink()
    if not indexed:
        (sharded / INDEX).unlink()
    with pytest.raises(ModelError, match=f"missing weight file {S2}"):
        SafetensorsStore(sharded)


def test_extra_shard_is_named(sharded):
    shard(sharded, "model-00003-of-00003.safetensors", ["d"])
    with pytest.raises(ModelError, match=r"model-00003-of-00003\.safetensors not part"):
        SafetensorsStore(sharded)


def test_other_weight_files_beside_an_index_are_ignored(sharded):
    shard(sharded, "consolidated.safetensors", ["x"])
    assert SafetensorsStore(sharded).names() == {"a", "b", "c"}


@pytest.mark.parametrize(
    "names",
    [{"a": S1, "b": S1}, {"a": S1, "b": S1, "c": S2, "d": S2}, {"a": S2, "b": S1, "c": S2}],
    ids=["tensor not in index", "tensor not in shard", "tensor in the other shard"],
)
def test_index_and_shards_must_agree(sharded, names):
    write_index(sharded, names)
    with pytest.raises(ModelError, match=r"disagree about|not part of"):
        SafetensorsStore(sharded)


@pytest.mark.parametrize(("repeated", "of"), [(["c", "a"], S1), (["b", "c"], S1)])
def test_a_tensor_that_the_index_assigns_to_another_shard_is_ignored(sharded, repeated, of):
    shard(sharded, S2, repeated)
    store = SafetensorsStore(sharded)
    assert store.names() == {"a", "b", "c"}
    files = {name: store._tensors[name][0].path.name for name in store.names()}
    assert files == {"a": of, "b": S1, "c": S2}


def test_a_tensor_in_two_shards_without_an_index_is_refused(sharded):
    shard(sharded, S2, ["c", "a"])
    (sharded / INDEX).unlink()
    with pytest.raises(ModelError, match="tensor a is in both"):
        SafetensorsStore(sharded)


def test_an_index_and_its_files_are_compared_without_ignored_tensors(sharded):
    """Tensors of Qwen-Omni that are ignored under the name without "thinker."."""
    shard(sharded, S2, ["c", "thinker.audio_tower.x"])
    write_index(sharded, {"a": S1, "b": S1, "c": S2, "thinker.audio_tower.x": S2})
    assert SafetensorsStore(sharded).names() == {"a", "b", "c"}


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin", "..", "", 3, None]
)
def test_index_may_only_name_files_beside_it(sharded, name):
    write_index(sharded, {"a": name})
    with pytest.raises(ModelError, match=r"only \.safetensors files in the same"):
        SafetensorsStore(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 100_000])
def test_broken_index_is_refused(sharded, text):
    (sharded / INDEX).write_text(text)
    with pytest.raises(ModelError, match=INDEX):
        SafetensorsStore(sharded)


def linked_copy(model, store):
    """A directory whose files are all links to files in `store`, under other names."""
    directory = store.parent / "linked"
    directory.mkdir()
    store.mkdir()
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, store / str(number))
        (directory / file.name).symlink_to(store / str(number))
    return directory


def test_links_to_a_store_are_followed(tmp_path):
    """Links as in DVC, Nix and shared model stores; the user trusts the directory by naming it."""
    model = tiny_model("llama")
    linked = open_checkpoint(linked_copy(model, tmp_path / "store"))
    plain = open_checkpoint(model)
    assert linked.config == plain.config
    assert linked.weights.names() == plain.weights.names()
    for name in plain.weights.names():
        assert np.array_equal(linked.weights.get(name).data, plain.weights.get(name).data)
    assert Tokenizer.load(linked.path).encode("hello") == Tokenizer.load(model).encode("hello")


def test_an_index_that_is_a_link_is_followed(sharded, tmp_path_factory):
    names = SafetensorsStore(sharded).names()
    outside = tmp_path_factory.mktemp("outside")
    for file in sorted(sharded.iterdir()):
        file.rename(outside / file.name)
        file.symlink_to(outside / file.name)
    assert SafetensorsStore(sharded).names() == names


@pytest.fixture
def snapshot(tmp_path):
    """The hub's cache of one model, whose file is a link to a blob."""
    home = tmp_path / "models--owner--model"
    found, blobs = home / "snapshots" / "abc", home / "blobs"
    found.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "deadbeef").write_bytes(GOOD)
    (found / "model.safetensors").symlink_to("../../blobs/deadbeef")
    return found


def test_hub_cache_links_are_followed(snapshot):
    assert SafetensorsStore(snapshot).names() == {"a", "b", "c"}


def test_a_download_that_links_to_other_files_is_refused(snapshot, tmp_path):
    (tmp_path / "secret").write_bytes(GOOD)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="link out of the downloaded model"):
        SafetensorsStore(snapshot)
    (tmp_path / "link").symlink_to(snapshot)
    with pytest.raises(ModelError, match="link out of the downloaded model"):
        SafetensorsStore(tmp_path / "link")


def test_dangling_link_is_refused(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("nowhere")
    with pytest.raises(ModelError, match="missing weight file"):
        SafetensorsStore(tmp_path)


def test_fifo_and_device_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="FIFO"):
        SafetensorsStore(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").symlink_to("/dev/zero")
    with pytest.raises(ModelError, match="character device"):
        SafetensorsStore(tmp_path)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match="FIFO"):
        read_config(tmp_path)


class Payload:
    """Unpickling an instance creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_pickles_are_refused_and_never_run(tmp_path, name):
    import pickle

    evil = tmp_path / "evil"
    (tmp_path / name).write_bytes(pickle.dumps(Payload(evil)))
    (tmp_path / "config.json").write_text('{"auto_map": {"AutoConfig": "evil.Evil"}}')
    (tmp_path / "evil.py").write_text(f"open({str(evil)!r}, 'w')")
    with pytest.raises(ModelError, match="pickle"):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="pickle"):
        open_checkpoint(tmp_path / name)
    assert read_config(tmp_path)["auto_map"] == {"AutoConfig": "evil.Evil"}
    assert not evil.exists()


def test_unsupported_dtype_is_refused_by_name(tmp_path):
    data = packed({"w": entry("I32"), "x.rotary_emb.inv_freq": entry("F64", (2,), (16, 32))})
    (tmp_path / "model.safetensors").write_bytes(data + bytes(32))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"I32 in w \(I32\); supported: F32, F16, BF16"):
        open_checkpoint(tmp_path)
