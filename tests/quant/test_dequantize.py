"""Dequantization compared with a scalar reader of ggml's block layouts, and kinds by dtype."""

import struct

import numpy as np
import pytest

from cpuserve.errors import ConfigError, ModelError
from cpuserve.quant import FORMATS, dequantize, open_weights, weight_format
from cpuserve.quant.base import QuantTensor
from cpuserve.quant.gguf import BLOCK_BYTES, SOURCES
from cpuserve.quant.stored import StoredTensor, StoredWeights

RNG = np.random.default_rng(7)


def f16(data):
    return np.float32(struct.unpack("<e", data)[0])


def one_block(source, block):
    """32 values, one at a time, in fp32, as ggml's dequantize_row_* loops do."""
    d = f16(block[:2])
    if source == "gguf_q8_0":
        return [d * np.float32(q) for q in struct.unpack("<32b", block[2:])]
    nibbles = [b & 15 for b in block[-16:]] + [b >> 4 for b in block[-16:]]
    if source == "gguf_q4_0":
        return [d * np.float32(q - 8) for q in nibbles]
    return [d * np.float32(q) + f16(block[2:4]) for q in nibbles]


def random_blocks(source, rows, blocks):
    size = BLOCK_BYTES[source]
    data = RNG.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    halves = RNG.standard_normal((rows, blocks, 2)).astype("<f2").view(np.uint8)
    data[:, :, : 4 if source == "gguf_q4_1" else 2] = halves[
        :, :, : 4 if source == "gguf_q4_1" else 2
    ]
    return data.reshape(rows, blocks * size)


@pytest.mark.parametrize("order", [None, np.array([2, 0, 1], np.int32)], ids=["stored", "ordered"])
@pytest.mark.parametrize("source", BLOCK_BYTES)
def test_blocks_equal_the_scalar_reading_bit_for_bit(source, order):
    data = random_blocks(source, 3, 4)
    size = BLOCK_BYTES[source]
    wanted = [
        [v for i in range(4) for v in one_block(source, row[i * size : (i + 1) * size].tobytes())]
        for row in data
    ]
    wanted = np.array(wanted, np.float32)[[0, 1, 2] if order is None else order]
    got = dequantize(QuantTensor("w", (3, 128), source, data, order))
    assert got.dtype == np.float32
    assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("source", ["f32", "f16", "bf16"])
def test_dense_types_are_exact(source):
    values = np.array([[0.0, -1.5, 3.140625], [65280.0, 2.0**-14, -0.0]], np.float32)
    raw = {
        "f32": values.astype("<f4").tobytes(),
        "f16": values.astype("<f2").tobytes(),
        "bf16": (values.view(np.uint32) >> 16).astype("<u2").tobytes(),
    }[source]
    data = np.frombuffer(raw, np.uint8).reshape(2, -1)
    got = dequantize(QuantTensor("w", (2, 3), source, data))
    assert got.tobytes() == values.tobytes()


class Store:
    def __init__(self, dtypes):
        self.dtypes = dtypes

    def names(self):
        return set(self.dtypes)

    def dtype(self, name):
        return self.dtypes[name]

    def get(self, name):
        return StoredTensor(name, (4, 32), self.dtypes[name], np.zeros(4 * 64, np.uint8))


@pytest.mark.parametrize(
    ("stored", "dtype", "kind"),
    [
        ("F32", "bfloat16", "dense_bf16"),
        ("BF16", "float16", "dense_f16"),
        ("F16", "float32", "dense_f32"),
        ("Q8_0", "bfloat16", "w8_g32"),
        ("Q4_0", "float32", "w4_g32"),
        ("Q4_1", "float16", "w4m_g32"),
    ],
)
def test_kind_follows_the_tensor_and_the_dtype(stored, dtype, kind):
    assert open_weights("gguf", Store({"w": stored}), {}).kind("w", dtype) == kind


def test_dense_format_refuses_other_types_by_name():
    with pytest.raises(ModelError, match=r"F8_E4M3 in a \(F8_E4M3\); supported: F32, F16, BF16"):
        open_weights("dense", Store({"a": "F8_E4M3", "b": "F32"}), {})


def test_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match="'int8' is not one of"):
        open_weights("dense", Store({"a": "F32"}), {}).kind("a", "int8")


def test_unknown_format_names_the_known_ones():
    with pytest.raises(ModelError, match=r"'exl2' is not supported; supported: .*dense, .*gguf"):
        open_weights("exl2", Store({}), {})


def test_a_format_is_one_registration():
    name = "only-in-this-test"

    @weight_format(name)
    def fake(store, config):
        return StoredWeights(store, SOURCES)

    try:
        weights = open_weights(name, Store({"w": "Q8_0"}), {})
        assert weights.get("w").data.shape == (4, 64)
    finally:
        del FORMATS._values[name]
