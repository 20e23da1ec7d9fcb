"""AWQ, GPTQ and compressed-tensors checkpoints that the tests pack by the formats' definitions."""

import numpy as np
import pytest

from cpuserve.errors import ModelError
from cpuserve.quant import dequantize, open_weights
from cpuserve.quant.stored import StoredTensor

N, K, GROUPS = 16, 256, 2
STREAM = np.random.default_rng(11)
DTYPES = {"int8": "I8", "int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32"}


class Store:
    """Tensors in memory."""

    def __init__(self, **tensors):
        self._tensors = {name.replace("__", "."): t for name, t in tensors.items()}

    def names(self):
        return set(self._tensors)

    def dtype(self, name):
        return DTYPES[self._tensors[name].dtype.name]

    def get(self, name):
        t = np.ascontiguousarray(self._tensors[name])
        return StoredTensor(name, t.shape, self.dtype(name), t.reshape(-1).view(np.uint8))


def pack(codes, order=(0, 1, 2, 3, 4, 5, 6, 7)):
    """int32 words of eight 4-bit codes along the last axis; slot i holds element order[i]."""
    eights = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    words = sum(eights[..., e] << np.uint32(4 * slot) for slot, e in enumerate(order))
    return words.view(np.int32)


def random_4bit():
    """(codes [N, K], zero points [N, GROUPS], scales [N, GROUPS], values)."""
    codes = STREAM.integers(0, 16, (N, K), np.uint8)
    zeros = STREAM.integers(1, 16, (N, GROUPS), np.uint8)
    scales = STREAM.uniform(0.01, 0.02, (N, GROUPS)).astype(np.float16)
    spread = [np.repeat(x.astype(np.float32), K // GROUPS, axis=1) for x in (zeros, scales)]
    return codes, zeros, scales, (codes - spread[0]) * spread[1]


def opened(method, store, **settings):
    return open_weights(method, store, {"quantization_config": settings})


def check(weights, values, kind, tolerance=2e-4):
    assert weights.names() == {"q.weight", "norm.weight"}
    assert weights.kind("q.weight", "bfloat16") == kind
    assert weights.kind("norm.weight", "bfloat16") == "dense_bf16"
    tensor = weights.get("q.weight")
    assert tensor.shape == values.shape
    assert tensor.nbytes == tensor.data.nbytes
    # the minimum, scale times zero point, is kept in fp16
    assert np.abs(dequantize(tensor) - values).max() <= tolerance
    tensor.release()


def test_awq():
    codes, zeros, scales, values = random_4bit()
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    store = Store(
        q__qweight=pack(codes.T, order),
        q__qzeros=pack(zeros.T, order),
        q__scales=scales.T,
        norm__weight=np.ones(K, np.float16),
    )
    check(opened("awq", store, bits=4, version="gemm"), values, "w4m_g128")


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2", None])
def test_gptq(checkpoint_format):
    """Configs from before checkpoint format 2 have no checkpoint_format."""
    codes, zeros, scales, values = random_4bit()
    stored = zeros if checkpoint_format == "gptq_v2" else zeros - 1
    store = Store(
        q__qweight=pack(codes).T,
        q__qzeros=pack(stored.T),
        q__scales=scales.T,
        q__g_idx=np.repeat(np.arange(GROUPS, dtype=np.int32), K // GROUPS),
        norm__weight=np.ones(K, np.float16),
    )
    named = {} if checkpoint_format is None else {"checkpoint_format": checkpoint_format}
    weights = opened("gptq", store, bits=4, **named)
    check(weights, values, "w4m_g128")


def compressed(bits, **weights):
    scheme = {"num_bits": bits, "type": "int", "strategy": "group" if bits == 4 else "channel"}
    return {"config_groups": {"group_0": {"weights": {**scheme, **weights}}}}


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_int4(symmetric):
    codes, zeros, scales, values = random_4bit()
    store = {
        "q__weight_packed": pack(codes),
        "q__weight_scale": scales,
        "q__weight_shape": np.array([N, K], np.int64),
        "norm__weight": np.ones(K, np.float16),
    }
    if symmetric:
        scale = np.repeat(scales.astype(np.float32), K // GROUPS, axis=1)
        values = (codes.astype(np.float32) - 8) * scale
    else:
        store["q__weight_zero_point"] = pack(zeros.T).T
    weights = opened("compressed-tensors", Store(**store), **compressed(4))
    check(weights, values, "w4m_g128", 0 if symmetric else 2e-4)


def test_compressed_tensors_int8_is_exact():
    q = STREAM.integers(-128, 128, (N, K), np.int8)
    scale = STREAM.uniform(0.01, 0.02, (N, 1)).astype(np.float32)
    store = Store(q__weight=q, q__weight_scale=scale, norm__weight=np.ones(K, np.float16))
    weights = opened("compressed-tensors", store, **compressed(8))
    check(weights, q * scale, "w8_channel", 0)


@pytest.mark.parametrize(
    ("method", "settings", "needle"),
    [
        ("awq", {"bits": 8}, "bits = 8"),
        ("awq", {"bits": 4, "version": "gemv"}, "version = gemv"),
        ("gptq", {"bits": 3}, "bits = 3"),
        ("compressed-tensors", compressed(8, type="float"), "type = float"),
        ("compressed-tensors", compressed(4, actorder="group"), "actorder = group"),
        ("compressed-tensors", {"config_groups": {}}, "0 groups"),
    ],
)
def test_what_is_not_read_is_refused_by_its_setting(method, settings, needle):
    with pytest.raises(ModelError, match=needle) as error:
        opened(method, Store(), **settings)
    assert "unquantized" in str(error.value)


def test_activation_order_is_refused():
    codes, zeros, scales, _ = random_4bit()
    store = Store(
        q__qweight=pack(codes).T,
        q__qzeros=pack(zeros.T),
        q__scales=scales.T,
        q__g_idx=np.arange(K, dtype=np.int32)[::-1] // (K // GROUPS),
    )
    tensor = opened("gptq", store, bits=4, desc_act=True).get("q.weight")
    with pytest.raises(ModelError, match="activation order"):
        dequantize(tensor)


def test_other_groups_than_multiples_of_128_are_refused():
    codes, zeros, scales, _ = random_4bit()
    narrow = Store(
        q__qweight=pack(codes).T,
        q__qzeros=pack(np.repeat(zeros, 4, axis=1).T),
        q__scales=np.repeat(scales, 4, axis=1).T,
    )
    with pytest.raises(ModelError, match="multiples of 128"):
        dequantize(opened("gptq", narrow, bits=4).get("q.weight"))


def test_a_missing_part_is_named():
    codes, zeros, _, _ = random_4bit()
    store = Store(q__qweight=pack(codes).T, q__qzeros=pack(zeros.T))
    with pytest.raises(ModelError, match=r"no tensor q\.scales"):
        dequantize(opened("gptq", store, bits=4).get("q.weight"))
