"""torchao's types, by their definitions, and refusals."""

import json

import numpy as np
import pytest
import torch

from cpuserve.base.errors import ModelError
from cpuserve.quant import dequantize
from tests.helpers.quantized import (
    E2M1,
    HEADER,
    swizzled,
    torchao,
    torchao_fp8,
    torchao_int,
    torchao_int4,
    torchao_int4_tiles,
    torchao_int4_words,
    torchao_mx,
    torchao_nvfp4,
)
from tests.quant.checkpoints import DTYPES, NORM, STREAM, Store, check, opened

N, K = 160, 256  # two tiles of swizzled scales, the second one not whole
BYTES = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e8m0fnu: "F8_E8M0", torch.bfloat16: "BF16"}


class Described(Store):
    """Tensors of torch in memory, with the texts of a header."""

    def __init__(self, parts, **header):
        found = dict(parts)
        texts = {"q.weight": found.pop(HEADER)} if HEADER in found else {}
        self.texts = {"format": "pt", **texts, **header}
        self.types = {f"q.{name}": part.dtype for name, part in found.items()}
        raw = {
            f"q.{name}": part.view(torch.uint8 if part.itemsize == 1 else torch.int16).numpy()
            if part.dtype in BYTES
            else part.numpy()
            for name, part in found.items()
        }
        super().__init__(norm__weight=NORM, **raw)

    def metadata(self):
        return self.texts

    def dtype(self, name):
        plain = DTYPES.get(self.tensors[name].dtype.name)
        return BYTES.get(self.types.get(name), plain)

    def get(self, name):
        stored = super().get(name)
        return type(stored)(name, stored.shape, self.dtype(name), stored.data)


def random_weight(n=N, k=K):
    return torch.from_numpy(STREAM.normal(0, 0.02, (n, k)).astype(np.float32))


def spread(values, group):
    return values.float().repeat_interleave(group, dim=1)


def nibbles(packed):
    """Codes of 4 bits [n, k], the first of a byte in its low half."""
    packed = packed.view(torch.uint8)
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)


def plain_int4(parts, group):
    codes = nibbles(parts["_weight_qdata"]).to(torch.int8)
    codes = torch.where(codes > 7, codes - 16, codes).float()
    scale, middle = (spread(parts[f"_weight_{name}"].T, group) for name in ("scale", "zero_point"))
    return (codes * scale + middle).numpy()


def plain_int(parts, group):
    scale, zero = (spread(parts[f"_weight_{name}"], group) for name in ("scale", "zero_point"))
    return ((parts["_weight_qdata"].float() - zero) * scale).numpy()


@pytest.mark.parametrize(
    ("group", "kind"), [(32, "w4m_g32"), (64, "w4m_g32"), (128, "w4m_g128"), (256, "w4m_g128")]
)
def test_int4_keeps_its_codes(group, kind):
    parts = torchao_int4(random_weight(), group)
    weights = opened("torchao", Described(parts))
    check(weights, plain_int4(parts, group), kind, 1e-4)


@pytest.mark.parametrize(("group", "kind"), [(32, "w4z_g32"), (64, "w4z_g64"), (128, "w4m_g128")])
def test_int4_in_words_keeps_its_codes(group, kind):
    parts = torchao_int4_words(random_weight(), group)
    scale, zero = (spread(parts[f"_weight_{name}"].T, group) for name in ("scale", "zero_point"))
    values = ((nibbles(parts["_weight_qdata"]).float() - zero) * scale).numpy()
    check(opened("torchao", Described(parts)), values, kind, 1e-4)


@pytest.mark.parametrize(
    ("n", "k", "group", "kind"),
    [
        (N, K, 32, "w4m_g32"),
        (N, K, 128, "w4m_g128"),
        (N + 5, 1024 + 128, 256, "w4m_g128"),
        (36, 96, 64, "w4m_g32"),  # the last group is not whole
    ],
)
def test_int4_in_tiles_keeps_its_codes(n, k, group, kind):
    weight = random_weight(n, k)
    parts = torchao_int4_tiles(weight, group)
    both = parts["_weight_scale_and_zero"].float()
    scale, middle = (spread(x.T, group)[:n, :k] for x in both.unbind(-1))
    codes = ((weight - middle) / scale + 8).round().clamp(0, 15)
    check(opened("torchao", Described(parts)), ((codes - 8) * scale + middle).numpy(), kind, 1e-4)


@pytest.mark.parametrize(
    ("bits", "group", "kind", "packed"),
    [
        (8, K, "w8_channel", None),
        (8, 32, "w8_g32", None),
        (4, 32, "w4z_g32", None),
        (4, K, "w4m_g128", None),
        (3, 64, "w3z_g64", None),
        (2, 128, "w2z_g128", None),
        (5, 64, "w8z_g32", None),
        (1, 64, "w2z_g64", None),
        (4, 16, "w8_g32", 1),
        (3, 16, "w8_g32", 1),
    ],
)
def test_integers_keep_codes_that_kernels_read(bits, group, kind, packed):
    name = "Int8Tensor" if bits == 8 else "IntxUnpackedToInt8Tensor"
    parts = torchao_int(random_weight(), bits, group, name)
    weights = opened("torchao", Described(parts))
    check(weights, plain_int(parts, group), kind, 1e-4, packed=packed)


@pytest.mark.parametrize("block", [[1, K], [N, K], [32, 128]])
def test_fp8_keeps_its_codes(block):
    weight = random_weight()
    down, across = N // block[0], K // block[1]
    scale = torch.from_numpy(STREAM.uniform(0.01, 0.02, (down, across)).astype(np.float32))
    codes = torchao_fp8(weight)["_weight_qdata"]
    values = codes.float() * scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    parts = {
        "_weight_qdata": codes,
        "_weight_scale": scale,
        HEADER: torchao("Float8Tensor", block_size=block),
    }
    check(opened("torchao", Described(parts)), values.numpy(), "e4m3_g128", 0)


@pytest.mark.parametrize("swizzle", [True, False])
@pytest.mark.parametrize(("k", "packed"), [(K, None), (272, 1)])
def test_nvfp4_reads_plain_and_swizzled_scales(swizzle, k, packed):
    parts = torchao_nvfp4(random_weight(k=k))
    small = torch.from_numpy(STREAM.uniform(0.5, 3, (N, k // 16)).astype(np.float32))
    small = small.to(torch.float8_e4m3fn)
    stored = swizzled(small.view(torch.uint8)).contiguous().view(small.dtype) if swizzle else small
    about = torchao("NVFP4Tensor", block_size=16, is_swizzled_scales=swizzle)
    store = Described({**parts, "_weight_scale": stored, HEADER: about})
    values = E2M1[nibbles(parts["_weight_qdata"]).long()] * spread(small, 16)
    values = (values * parts["_weight_per_tensor_scale"]).numpy()
    kind = "w8_g32" if packed else "nvfp4"
    check(opened("torchao", store), values, kind, 1e-6, packed=packed)


def test_mx_keeps_e2m1_and_converts_fp8():
    exponents = torch.from_numpy(STREAM.integers(110, 125, (N, K // 32), np.uint8))
    power = spread(torch.exp2(exponents.float() - 127), 32)
    scale = swizzled(exponents).contiguous().view(torch.float8_e8m0fnu)
    packed = torchao_nvfp4(random_weight())["_weight_qdata"]
    about = {"block_size": 32, "is_swizzled_scales": True}
    text = torchao("MXTensor", elem_dtype="float4_e2m1fn_x2", **about)
    parts = {"_weight_qdata": packed, "_weight_scale": scale, HEADER: text}
    values = (E2M1[nibbles(packed).long()] * power).numpy()
    check(opened("torchao", Described(parts)), values, "mxfp4", 0)
    codes = torchao_mx(random_weight())["_weight_qdata"]
    text = torchao("MXTensor", elem_dtype="float8_e4m3fn", **about)
    parts = {"_weight_qdata": codes, "_weight_scale": scale, HEADER: text}
    check(opened("torchao", Described(parts)), (codes.float() * power).numpy(), "w8_g32", 0, 1)


def test_matrices_that_are_not_described_as_quantized_are_dense():
    parts = torchao_int4(random_weight())
    store = Described(parts, **{"norm.weight": json.dumps({"_type": "Tensor"})})
    weights = opened("torchao", store, modules_to_not_convert=["norm"])
    np.testing.assert_array_equal(dequantize(weights.get("norm.weight"))[0], NORM)


def described(kind, **data):
    return {HEADER: torchao(kind, **data)}


INT4 = torchao_int4(random_weight())
INT4_WORDS = torchao_int4_words(random_weight())
INT4_TILES = torchao_int4_tiles(random_weight())
INT8 = torchao_int(random_weight())
BF16 = torch.zeros(N, K // 16, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({**INT4, **described("Int4PreshuffledTensor")}, "of type Int4PreshuffledTensor is not"),
        ({**INT4_WORDS, "_weight_zero_point": BF16}, "with zero points BF16, as for NPUs"),
        ({**INT4_WORDS, "_weight_scale": BF16}, "does not fit its scales"),
        ({**INT4_TILES, "_weight_scale_and_zero": BF16}, "does not fit its scales"),
        ({**INT4_TILES, **described("Int4TilePackedTo4dTensor")}, "of shape and block_size"),
        (
            {
                **INT4_TILES,
                **described("Int4TilePackedTo4dTensor", shape=[N, 2048], block_size=[1, 32]),
            },
            "does not fit its scales",
        ),
        ({**INT4, **described("SparseTensor")}, "of type SparseTensor is not supported"),
        ({**INT4, HEADER: json.dumps({"_type": "Int4Tensor"})}, "supported are linear weights"),
        ({**INT4, HEADER: "no json"}, "describe no quantized tensors"),
        ({k: v for k, v in INT4.items() if k != HEADER}, "describe no quantized tensors"),
        ({**INT4, "_weight_act_pre_scale": BF16[0]}, "act_pre_scale: scaled activations"),
        ({**INT4, "_weight_scale": BF16}, "does not fit its scales"),
        ({**INT8, "_weight_scale": torch.ones(N, 3)}, "does not fit its scales"),
        ({**INT8, "_weight_scale": torch.ones(0)}, "does not fit its scales"),
        ({**INT8, "_weight_zero_point": torch.zeros(N, 1)}, "with zero points F32"),
        ({**INT8, "_weight_zero_point": torch.zeros(7, dtype=torch.int8)}, "zero points I8"),
        (
            {**INT8, **described("IntxUnpackedToInt8Tensor", target_dtype="int4")},
            "codes of more than 4 bits",
        ),
        ({**INT8, **described("Int8Tensor", target_dtype="int9")}, "of target_dtype int9"),
        ({**INT8, **described("Float8Tensor", block_size=[1, K])}, "must be F8_E4M3"),
        ({**INT8, **described("Float8Tensor", block_size=[0, K])}, "in blocks of"),
        ({**INT8, **described("NVFP4Tensor")}, "does not fit its scales"),
        ({**INT8, **described("MXTensor", block_size=16)}, "with scales F32 for 16 inputs"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(parts, message):
    with pytest.raises(ModelError, match=message):
        opened("torchao", Described(parts)).get("q.weight").cut(slice(0, N), 0)


def test_a_matrix_without_a_description_is_refused():
    stray = {"r._weight_qdata": np.zeros((N, K), np.int8)}
    store = Described(INT4)
    store.tensors |= stray
    with pytest.raises(ModelError, match="no header describes the type of r"):
        opened("torchao", store)
