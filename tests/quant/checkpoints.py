"""Quantized checkpoints in memory with random values, and a check of what is read from them."""

from typing import ClassVar

import numpy as np
import torch

from cpuserve.quant import dequantize, open_weights
from cpuserve.quant.stored import StoredTensor

N, K = 32, 256
STREAM = np.random.default_rng(11)
DTYPES = {
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
    "uint32": "U32",
    "float16": "F16",
    "float32": "F32",
}
NORM = np.ones(K, np.float16)


class Fp8:
    """Values rounded to FP8 E4M3 by torch."""

    def __init__(self, values):
        rounded = torch.from_numpy(np.asarray(values, np.float32)).to(torch.float8_e4m3fn)
        self.bytes = rounded.view(torch.uint8).numpy()
        self.values = rounded.float().numpy()


class Store:
    """Tensors in memory."""

    types: ClassVar = {}  # those that numpy does not have, by the names of tensors

    def __init__(self, **tensors):
        self.tensors = {name.replace("__", ".", 1): t for name, t in tensors.items()}

    def names(self):
        return set(self.tensors)

    def dtype(self, name):
        tensor = self.tensors[name]
        plain = "F8_E4M3" if isinstance(tensor, Fp8) else DTYPES[tensor.dtype.name]
        return self.types.get(name, plain)

    def get(self, name):
        t = self.tensors[name]
        t = np.ascontiguousarray(t.bytes if isinstance(t, Fp8) else t)
        return StoredTensor(name, t.shape, self.dtype(name), t.reshape(-1).view(np.uint8))


def pack(codes, order=None, bits=4):
    """int32 words of codes along the last axis; slot i of eight holds element order[i]."""
    if order is not None:
        codes = codes.reshape(*codes.shape[:-1], -1, 8)[..., order].reshape(codes.shape)
    digits = (codes[..., None] >> np.arange(bits, dtype=np.uint8)) & 1
    stream = digits.reshape(*codes.shape[:-1], -1)
    return np.packbits(stream, axis=-1, bitorder="little").view(np.int32)


def random_codes(group=128, bits=4, zeros=None):
    """(codes [N, K], zero points [N, groups], scales [N, groups], values)."""
    codes = STREAM.integers(0, 1 << bits, (N, K), np.uint8)
    shape = (N, K // group)
    if zeros is None:
        zeros = STREAM.integers(1, 1 << bits, shape, np.uint8)
    zeros = np.broadcast_to(np.uint8(zeros), shape)
    scales = STREAM.uniform(0.01, 0.02, shape).astype(np.float16)
    spread = [np.repeat(x.astype(np.float32), group, axis=1) for x in (zeros, scales)]
    return codes, zeros, scales, (codes - spread[0]) * spread[1]


def opened(method, store, **settings):
    return open_weights(method, store, {"quantization_config": settings})


def check(weights, values, kind, tolerance=2e-4, packed=None):
    """packed: bytes that a weight of a converted matrix takes, 4 bytes wide here."""
    assert weights.names() == {"q.weight", "norm.weight"}
    assert weights.kind("q.weight", "bfloat16") == kind
    assert weights.kind("norm.weight", "bfloat16") == "dense_bf16"
    tensor = weights.get("q.weight")
    assert tensor.shape == values.shape
    assert tensor.nbytes == tensor.data.nbytes
    assert (tensor.source == "f32") == (packed is not None)
    # the minimum, scale times zero point, is kept in fp16
    assert np.abs(dequantize(tensor) - values).max() <= tolerance
    tensor.release()


# The kind of 4-bit matrices with groups of this size, and whether all zero points are 8.
KINDS = {
    (128, False): "w4m_g128",
    (128, True): "w4m_g128",
    (256, False): "w4m_g128",
    (64, False): "w4z_g64",
    (32, False): "w4z_g32",
    (64, True): "w4z_g64",
    (32, True): "w4_g32",
}


def in_activation_order(group, bits, zeros=None):
    """As random_codes, for inputs that belong to the groups [K], which are returned too."""
    codes, zeros, scales, _ = random_codes(group, bits, zeros)
    order = STREAM.permutation(np.repeat(np.arange(K // group, dtype=np.int32), group))
    values = (codes - zeros.astype(np.float32)[:, order]) * scales.astype(np.float32)[:, order]
    return codes, zeros, scales, values, order


# The kind of 8-bit matrices with zero points in groups of this size.
EIGHT = {256: "w8z_g128", 128: "w8z_g128", 64: "w8z_g32", 32: "w8z_g32"}
