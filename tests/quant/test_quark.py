"""Quark's types, by their definitions, and refusals."""

import numpy as np
import pytest
import torch

from cpuserve.base.errors import ModelError
from cpuserve.quant import dequantize
from tests.helpers.quantized import fp6, mxfp6, mxfp8, quark_settings
from tests.quant.checkpoints import NORM, STREAM, Fp8, K, N, Store, check, opened, pack

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
TYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"}
ORDERS = {"reorder": [0, 2, 4, 6, 1, 3, 5, 7], "order": None}


def store_of(**parts):
    return Store(norm__weight=NORM, **{f"q__{name}": part for name, part in parts.items()})


def opened_as(store, dtype, scheme, **more):
    return opened("quark", store, **quark_settings(dtype, scheme, **more))


def integers(dtype, groups):
    """(stored codes, zero points, scales, values) of a type, in groups of inputs."""
    bits = int(dtype[-1])
    low = -(1 << (bits - 1)) if dtype.startswith("int") else 0
    codes = STREAM.integers(low, low + (1 << bits), (N, K))
    zeros = STREAM.integers(low + 1, low + (1 << bits), (N, groups))
    scales = STREAM.uniform(0.01, 0.02, (N, groups)).astype(np.float16)
    spread = [np.repeat(x.astype(np.float32), K // groups, axis=1) for x in (zeros, scales)]
    return codes, zeros, scales, (codes - spread[0]) * spread[1]


@pytest.mark.parametrize("method", ORDERS)
@pytest.mark.parametrize("dtype", ["int4", "uint4"])
@pytest.mark.parametrize(("group", "kind"), [(32, "w4z_g32"), (64, "w4z_g64"), (128, "w4m_g128")])
def test_four_bits_in_groups_are_stored_by_inputs(dtype, group, kind, method):
    codes, zeros, scales, values = integers(dtype, K // group)
    words = [pack((x & 15).astype(np.uint8).T, ORDERS[method]) for x in (codes, zeros)]
    store = store_of(weight=words[0], weight_zero_point=words[1], weight_scale=scales.T)
    settings = quark_settings(dtype, "per_group", group_size=group)
    settings["export"]["pack_method"] = method
    check(opened("quark", store, **settings), values, kind, 2e-4)


@pytest.mark.parametrize("dtype", ["int4", "uint4"])
def test_four_bits_with_a_scale_for_each_row(dtype):
    codes, zeros, scales, values = integers(dtype, 1)
    order = ORDERS["reorder"]
    words = [pack((x & 15).astype(np.uint8), order) for x in (codes, zeros[:, 0])]
    store = store_of(weight=words[0], weight_zero_point=words[1], weight_scale=scales[:, 0])
    check(opened_as(store, dtype, "per_channel", ch_axis=0), values, "w4m_g128", 2e-4)


@pytest.mark.parametrize(("dtype", "stored"), [("int8", np.int8), ("uint8", np.uint8)])
def test_eight_bits_in_groups_and_rows(dtype, stored):
    codes, zeros, scales, values = integers(dtype, K // 32)
    parts = {"weight": codes.T, "weight_zero_point": zeros.T}
    parts = {name: part.astype(stored) for name, part in parts.items()}
    store = store_of(**parts, weight_scale=scales.T)
    check(opened_as(store, dtype, "per_group", group_size=32), values, "w8z_g32", 1e-6)
    codes, zeros, scales, values = integers(dtype, 1)
    parts = {"weight": codes, "weight_zero_point": zeros[:, 0]}
    parts = {name: part.astype(stored) for name, part in parts.items()}
    store = store_of(**parts, weight_scale=scales[:, 0])
    check(opened_as(store, dtype, "per_channel", ch_axis=0), values, "w8z_g128", 1e-6)


@pytest.mark.parametrize("zeros", [{}, {"weight_zero_point": np.zeros((), np.int8)}])
def test_symmetric_eight_bits_keep_a_scale_for_each_row(zeros):
    codes = STREAM.integers(-128, 128, (N, K)).astype(np.int8)
    store = store_of(weight=codes, weight_scale=np.full((), 0.01, np.float32), **zeros)
    values = codes * np.float32(0.01)
    check(opened_as(store, "int8", "per_tensor", ch_axis=None), values, "w8_channel", 0)


def test_groups_that_no_kernel_reads_are_converted():
    codes, zeros, scales, values = integers("uint4", K // 16)
    words = [pack(x.astype(np.uint8).T, ORDERS["reorder"]) for x in (codes, zeros)]
    store = store_of(weight=words[0], weight_zero_point=words[1], weight_scale=scales.T)
    weights = opened_as(store, "uint4", "per_group", group_size=16)
    check(weights, values, "w8_g32", 1e-6, packed=1)


def test_mxfp4_and_fp8_keep_their_codes():
    codes = STREAM.integers(0, 16, (N, K), np.uint8)
    exponents = STREAM.integers(110, 130, (N, K // 32), np.uint8)
    store = store_of(weight=codes[:, ::2] | codes[:, 1::2] << 4, weight_scale=exponents)
    values = E2M1[codes] * np.repeat(2.0 ** (exponents.astype(np.float32) - 127), 32, axis=1)
    weights = opened_as(store, "fp4", "per_group", group_size=32, scale_format="e8m0")
    check(weights, values, "mxfp4", 0)
    weight, scale = Fp8(STREAM.uniform(-300, 300, (N, K))), np.full(N, 0.01, np.float32)
    store = store_of(weight=weight, weight_scale=scale)
    weights = opened_as(store, "fp8_e4m3", "per_channel", ch_axis=0)
    check(weights, weight.values * scale[:, None], "e4m3_g128", 0)


@pytest.mark.parametrize(
    ("dtype", "convert"),
    [
        ("fp6_e2m3", lambda w: mxfp6(w, 2)),
        ("fp6_e3m2", lambda w: mxfp6(w, 3)),
        ("fp8_e4m3", mxfp8),
        ("fp8_e5m2", lambda w: mxfp8(w, torch.float8_e5m2)),
    ],
)
def test_mxfp6_and_mxfp8_have_the_values_of_their_codes(dtype, convert):
    parts = convert(torch.from_numpy(STREAM.normal(0, 0.02, (N, K)).astype(np.float32)))
    codes, exponents = parts.values()
    values = codes.float()
    if dtype.startswith("fp6"):
        bits = np.unpackbits(codes.numpy(), axis=1, bitorder="little").reshape(N, K, 6)
        values = fp6(int(dtype[5]))[torch.from_numpy(bits << np.arange(6, dtype=np.uint8)).sum(-1)]
    values = values * torch.exp2(exponents.float() - 127).repeat_interleave(32, dim=1)
    store = store_of(weight=codes.view(torch.uint8).numpy(), weight_scale=exponents.numpy())
    store.types = {"q.weight": TYPES.get(codes.dtype, "U8")}
    weights = opened_as(store, dtype, "per_group", group_size=32, scale_format="e8m0")
    check(weights, values.numpy(), "w8_g32", 0, packed=1)


@pytest.mark.parametrize("at", ["model.", "model.language_model.", "language_model.model."])
def test_layers_may_have_settings_of_their_own(at):
    codes, zeros, scales, values = integers("int4", K // 32)
    order = ORDERS["reorder"]
    words = [pack((x & 15).astype(np.uint8).T, order) for x in (codes, zeros)]
    parts = {"weight": words[0], "weight_zero_point": words[1], "weight_scale": scales.T}
    store = Store(**{f"model.a.{name}": part for name, part in parts.items()})
    settings = quark_settings("int8", "per_channel", ch_axis=0)
    own = quark_settings("int4", "per_group", group_size=32)["global_quant_config"]
    settings["layer_quant_config"] = {"model.b*": {}, f"{at}a*": own}
    weights = opened("quark", store, **settings)
    np.testing.assert_allclose(dequantize(weights.get("model.a.weight")), values, atol=2e-4)


WORDS = np.zeros((K, N // 8), np.int32)
GROUPED = ("int4", "per_group", {"group_size": 32})


@pytest.mark.parametrize(
    ("parts", "spec", "message"),
    [
        ({"weight": WORDS}, ("int3", "per_group", {}), "quark's dtype int3"),
        ({"weight": WORDS}, ("int8", "per_group", {}), "stored as I32, with quark's dtype int8"),
        ({"weight": WORDS}, ("int4", "per_block", {}), "qscheme per_block"),
        ({"weight": WORDS}, ("int4", "per_channel", {"ch_axis": 1}), "ch_axis 1"),
        (
            {"weight": WORDS.view(np.uint8)},
            ("fp6_e2m3", "per_group", {"group_size": 32}),
            "scales None, which is not supported",
        ),
        (
            {"weight": WORDS.view(np.uint8), "weight_scale": np.ones((K, 7), np.uint8)},
            ("fp6_e3m2", "per_group", {"group_size": 32, "scale_format": "e8m0"}),
            "must be one for 32 inputs",
        ),
        (
            {"weight": WORDS.view(np.uint8)},
            ("fp4", "per_group", {"group_size": 16, "scale_format": "e4m3"}),
            "scales e4m3, which is not supported",
        ),
        ({"weight": WORDS, "weight_scale": np.ones((8, 99), np.float32)}, GROUPED, "do not fit"),
        ({"weight": WORDS, "weight_scale": np.ones((7, N), np.float32)}, GROUPED, "do not fit"),
        (
            {"weight": WORDS, "weight_scale": np.ones((8, N)), "weight_zero_point": WORDS[:3]},
            GROUPED,
            "do not fit",
        ),
        (
            {"weight": np.zeros((N, K), np.int8), "weight_scale": np.ones(3, np.float32)},
            ("int8", "per_channel", {"ch_axis": 0}),
            "do not fit",
        ),
        ({"weight": WORDS}, GROUPED, "has no tensor q.weight_scale"),
    ],
)
def test_matrices_that_do_not_fit_are_refused(parts, spec, message):
    dtype, scheme, more = spec
    parts = {n: p.astype(np.float32) if p.dtype == np.float64 else p for n, p in parts.items()}
    with pytest.raises(ModelError, match=message):
        opened_as(store_of(**parts), dtype, scheme, **more).get("q.weight").cut(slice(0, N), 0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"export": {"weight_format": "fake_quantized"}}, "weight_format = fake_quantized"),
        ({"export": {"pack_method": "tiles"}}, "pack_method = tiles"),
        ({"algo_config": [{"name": "rotation", "r3": True}]}, "rotated activations"),
    ],
)
def test_settings_of_another_kind_are_refused(settings, message):
    with pytest.raises(ModelError, match=message):
        opened("quark", Store(norm__weight=NORM), **settings)
