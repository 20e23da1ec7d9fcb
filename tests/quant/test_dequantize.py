"""Dequantization compared with the gguf package, and kinds by dtype."""

import gguf
import numpy as np
import pytest

from cpuserve.base.errors import ConfigError, ModelError
from cpuserve.loader.gguf.file import TENSOR_TYPES
from cpuserve.quant import FORMATS, dequantize, open_weights, weight_format
from cpuserve.quant.base import QuantTensor
from cpuserve.quant.gguf.blocks import BLOCKS, QUANTIZED, SOURCES
from cpuserve.quant.gguf.converted import CONVERTED
from cpuserve.quant.stored import StoredTensor, StoredWeights
from tests.helpers.gguf_blocks import (
    HALVES,
    UNKNOWN,
    put_half,
    q1_0_values,
    random_rows,
    ternary_values,
)

RNG = np.random.default_rng(7)


def random_blocks(source, rows, blocks):
    """Blocks of random bytes, except that fp16 factors and exponents are usual numbers."""
    block = BLOCKS[source]
    data = RNG.integers(0, 256, (rows, blocks, block.nbytes), dtype=np.uint8)
    for at in HALVES.get(source, (0,)):
        halves = RNG.standard_normal((rows, blocks, 1)).astype("<f2")
        put_half(source, data, at, halves)
    if source == "gguf_mxfp4":
        data[:, :, 0] = RNG.integers(0, 253, (rows, blocks))  # 6 * 2 ** (253 - 127) overflows
    return data.reshape(rows, blocks * block.nbytes)


def values_of(dtype, data):
    """By the definition of the type, or else by the gguf package."""
    if dtype in UNKNOWN:
        return ternary_values(dtype, data)
    if dtype == "Q1_0":
        return q1_0_values(data)
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[dtype])


@pytest.mark.parametrize("order", [None, np.array([2, 0, 1], np.int32)], ids=["stored", "ordered"])
@pytest.mark.parametrize("dtype", [t for t in QUANTIZED if QUANTIZED[t] in BLOCKS])
def test_blocks_are_read_bit_for_bit_as_their_definition_says(dtype, order):
    source = QUANTIZED[dtype]
    data = random_blocks(source, 3, 4)
    wanted = values_of(dtype, data)
    wanted = wanted[[0, 1, 2] if order is None else order]
    shape = (3, 4 * BLOCKS[source].weights)
    got = dequantize(QuantTensor("w", shape, source, data, order))
    assert (got.dtype, got.shape) == (np.float32, shape)
    assert got.tobytes() == wanted.tobytes()


ORDERS = pytest.mark.parametrize(
    "order", [None, np.array([2, 0, 1, 3], np.int32)], ids=["stored", "ordered"]
)


def converted_rows(dtype):
    """Rows [4, bytes] of 512 weights, whose blocks differ in their factors."""
    if dtype in UNKNOWN:
        return random_rows(dtype, 4, 512, RNG)
    values = RNG.integers(-1, 2, (4, 2, 256)) * RNG.uniform(0.5, 2, (4, 2, 1))
    kind = gguf.GGMLQuantizationType[dtype]
    return gguf.quants.quantize(values.reshape(4, 512).astype(np.float32), kind)


# What is said of types that are converted, and the weight kind.
SAID = {"TQ1_0": ("TQ2_0", "tq2_0"), "PTQ1_0": ("PQ2_0", "pq2_0")}


@ORDERS
@pytest.mark.parametrize("dtype", CONVERTED)
def test_types_that_are_converted_keep_every_value(dtype, order, caplog):
    data, (to, kind) = converted_rows(dtype), SAID[dtype]
    store = Store({"w": dtype})
    store.get = lambda name: StoredTensor(name, (4, 512), dtype, data.reshape(-1), order)
    with caplog.at_level("INFO", "cpuserve"):
        weights = open_weights("gguf", store, {})
    assert f"{dtype} weights are converted to {to}, with the same values" in caplog.text
    assert weights.kind("w", "bfloat16") == kind
    tensor, wanted = weights.get("w"), values_of(dtype, data)
    wanted = wanted if order is None else wanted[order]
    assert dequantize(tensor).tobytes() == wanted.tobytes()
    assert np.array_equal(dequantize(weights.get("w[1:4:2]")), wanted[1:4:2])
    assert tensor.nbytes == tensor.data.nbytes


def test_sizes_of_blocks_are_those_of_the_file_reader():
    table = {name: (weights, size) for name, weights, size in TENSOR_TYPES.values()}
    for dtype, source in QUANTIZED.items():
        if source in BLOCKS:
            assert (BLOCKS[source].weights, BLOCKS[source].nbytes) == table[dtype]
    for dtype, how in CONVERTED.items():
        assert (how.weights, how.nbytes) == table[dtype]
    known = {dtype.name: shape for dtype, shape in gguf.GGML_QUANT_SIZES.items()}
    assert {name: shape for name, shape in table.items() if name not in UNKNOWN} == known


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
        ("Q4_K", "bfloat16", "q4_k"),
        ("MXFP4", "float32", "mxfp4"),
        ("NVFP4", "bfloat16", "nvfp4"),
    ],
)
def test_kind_follows_the_tensor_and_the_dtype(stored, dtype, kind):
    assert open_weights("gguf", Store({"w": stored}), {}).kind("w", dtype) == kind


def test_dense_format_refuses_other_types_by_name():
    with pytest.raises(ModelError, match=r"F8_E4M3 in a \(F8_E4M3\); supported: F32, F16, BF16"):
        open_weights("dense", Store({"a": "F8_E4M3", "b": "F32"}), {})


def test_a_file_with_an_unknown_type_is_refused():
    with pytest.raises(ModelError, match=r"type I8 in a \(I8\); supported: [^(]*$"):
        open_weights("gguf", Store({"a": "I8"}), {})


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
