"""Checkpoints of GPTQ and AWQ, which the tests pack by the formats' definitions."""

import numpy as np
import pytest

from cpuserve.base.errors import ModelError
from cpuserve.quant import dequantize
from cpuserve.quant.gptq import gptq_weights
from tests.quant.checkpoints import (
    EIGHT,
    KINDS,
    NORM,
    STREAM,
    K,
    N,
    Store,
    check,
    in_activation_order,
    opened,
    pack,
    random_codes,
)


@pytest.mark.parametrize(("group", "symmetric"), KINDS)
def test_awq(group, symmetric):
    codes, zeros, scales, values = random_codes(group, zeros=8 if symmetric else None)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    store = Store(
        q__qweight=pack(codes.T, order),
        q__qzeros=pack(zeros.T, order),
        q__scales=scales.T,
        norm__weight=NORM,
    )
    check(opened("awq", store, bits=4, version="gemm"), values, KINDS[group, symmetric])


@pytest.mark.parametrize("group", [256, 128, 64, 32, -1])
def test_awq_in_the_packing_gemv_keeps_its_codes(group):
    """Zero points fill whole words, and there are as many scales as zero points."""
    each = K if group == -1 else group
    codes, zeros, scales, values = random_codes(each)
    fill = ((0, 0), (0, -zeros.shape[1] % 8 + 8))
    store = Store(
        q__qweight=pack(codes),
        q__qzeros=pack(np.pad(zeros, fill)),
        q__scales=np.pad(scales, fill),
        norm__weight=NORM,
    )
    weights = opened("awq", store, bits=4, version="GEMV", group_size=group)
    check(weights, values, KINDS[each, False])
    with pytest.raises(ModelError, match="do not fit groups of 96"):
        opened("awq", store, bits=4, version="gemv", group_size=96).get("q.weight")
    if each < K:  # scales of groups that the settings do not have
        with pytest.raises(ModelError, match=f"scales are of {K // each} groups, but group_size"):
            opened("awq", store, bits=4, version="gemv", group_size=-1).get("q.weight")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"version": "gemv_fast"}, "version = gemv_fast is not supported"),
        ({"version": "gemv", "group_size": 0}, "group_size = 0 is not supported"),
        ({"version": "gemv", "bits": 8}, "bits = 8 is not supported"),
        ({"pack_method": "order"}, "pack_method = order is not supported"),
    ],
)
def test_other_packings_of_awq_are_refused(settings, message):
    with pytest.raises(ModelError, match=message):
        opened("awq", Store(norm__weight=NORM), **settings)


def gptq_store(codes, zeros, scales, bits=4, **more):
    parts = {"qweight": pack(codes, bits=bits).T, "qzeros": pack(zeros.T, bits=bits)}
    parts = {**parts, "scales": scales.T, **more}
    return Store(norm__weight=NORM, **{f"q__{name}": value for name, value in parts.items()})


@pytest.mark.parametrize("checkpoint_format", ["gptq", "gptq_v2", None])
def test_gptq(checkpoint_format):
    """Configs from before checkpoint format 2 have no checkpoint_format."""
    codes, zeros, scales, values = random_codes()
    stored = zeros if checkpoint_format == "gptq_v2" else zeros - 1
    in_order = np.repeat(np.arange(2, dtype=np.int32), 128)
    store = gptq_store(codes, stored, scales, g_idx=in_order)
    named = {} if checkpoint_format is None else {"checkpoint_format": checkpoint_format}
    weights = opened("gptq", store, bits=4, **named)
    check(weights, values, "w4m_g128")


@pytest.mark.parametrize("key", ["format", "checkpoint_format"])
def test_plain_zero_points_are_told_by_either_key(key):
    codes, zeros, scales, values = random_codes()
    named = {"checkpoint_format": "gptq", key: "gptq_v2"}
    weights = opened("gptq", gptq_store(codes, zeros, scales), bits=4, **named)
    check(weights, values, "w4m_g128")


RULES = {
    "gptq": {
        "dynamic": {
            "-:.*k_proj": {},
            "+:model\\.layers\\.0\\.up": {"bits": 8, "group_size": 64},
            "model.*v_proj": {"bits": 2},
        }
    },
    "auto-round": {
        "extra_config": {
            "k_proj": {"bits": 16, "data_type": "float"},
            "o_proj": {"bits": 32},
            "gate_proj": {"bits": None},
            "up_proj": {"bits": 8, "group_size": 64},
            "v_proj": {"bits": 2},
        }
    },
}


@pytest.mark.parametrize("method", RULES)
def test_rules_give_matrices_other_numbers_of_bits_and_groups(method):
    wanted, tensors = {}, {"norm.weight": NORM, "k.weight": np.ones((N, K), np.float16)}
    for name, bits, group in (("q", 4, 128), ("u", 8, 64), ("v", 2, 128)):
        codes, zeros, scales, wanted[name] = random_codes(group, bits)
        tensors |= {
            f"{name}{each[1:]}": values
            for each, values in gptq_store(codes, zeros - 1, scales, bits).tensors.items()
            if each != "norm.weight"
        }
    store = Store()
    store.tensors = tensors
    weights = opened(method, store, bits=4, **RULES[method])
    for name, values in wanted.items():
        assert np.abs(dequantize(weights.get(f"{name}.weight")) - values).max() <= 2e-4
    assert np.array_equal(dequantize(weights.get("k.weight")), np.ones((N, K)))
    with pytest.raises(ModelError, match=r"u\.scales and u\.qzeros are .* convert the checkpoint"):
        opened(method, store, bits=4).get("u.weight")


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("group", [256, 128, 64, 32])
def test_gptq_of_two_and_three_bits_keeps_its_codes(bits, group):
    """Also with zero points that are more than the largest code, which format 1 can store."""
    zeros = STREAM.integers(1, (1 << bits) + 1, (N, K // group))
    zeros[0, 0], zeros[1, 0] = 1, 1 << bits
    codes, zeros, scales, values = random_codes(group, bits, zeros)
    weights = opened("gptq", gptq_store(codes, zeros - 1, scales, bits), bits=bits)
    check(weights, values, f"w{bits}z_g{group}", 0)


@pytest.mark.parametrize("group", [128, 32])
def test_gptq_of_eight_bits_keeps_its_codes(group):
    codes, zeros, scales, values = random_codes(group, 8, zeros=128)
    weights = opened("gptq", gptq_store(codes, zeros - 1, scales, 8), bits=8)
    check(weights, values, "w8_g32", 0)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [128, 64])
def test_gptq_in_activation_order_keeps_its_codes(bits, group):
    eight = bits == 8
    codes, zeros, scales, values, order = in_activation_order(group, bits, 128 if eight else None)
    store = gptq_store(codes, zeros - 1, scales, bits, g_idx=order)
    weights = opened("gptq", store, bits=bits, desc_act=True)
    kind = KINDS[group, False] if bits == 4 else "w8_g32" if eight else f"w{bits}z_g{group}"
    check(weights, values, kind, 2e-4 if bits == 4 else 0)
    columns = weights.get("q.weight").column_order
    assert np.array_equal(order[columns], np.sort(order))
    part = weights.get("q[8:16].weight")
    assert np.abs(dequantize(part) - values[8:16]).max() <= 2e-4


@pytest.mark.parametrize("groups", [np.arange(K) % 16, np.arange(K) % 5 // 3])
def test_activation_order_in_groups_that_no_block_holds_is_converted(groups, caplog):
    """Groups of 16 inputs, and groups of different sizes."""
    order = groups.astype(np.int32)
    codes = STREAM.integers(0, 16, (N, K), np.uint8)
    shape = (N, order.max() + 1)
    zeros = STREAM.integers(1, 16, shape, np.uint8)
    scales = STREAM.uniform(0.01, 0.02, shape).astype(np.float16)
    values = (codes - zeros.astype(np.float32)[:, order]) * scales.astype(np.float32)[:, order]
    store = gptq_store(codes, zeros - 1, scales, g_idx=order)
    with caplog.at_level("INFO", "cpuserve"):
        check(opened("gptq", store, bits=4), values, "w8_g32", 0, packed=34 / 32)
    assert "not equal multiples of 32 inputs are converted" in caplog.text


@pytest.mark.parametrize("group", EIGHT)
def test_gptq_of_eight_bits_with_zero_points_keeps_its_codes(group):
    zeros = STREAM.integers(0, 256, (N, K // group))
    zeros[0, 0], zeros[1, 0] = 0, 255
    codes, zeros, scales, values = random_codes(group, 8, zeros)
    store = gptq_store(codes, zeros, scales, 8)
    check(opened("gptq", store, bits=8, checkpoint_format="gptq_v2"), values, EIGHT[group], 0)


@pytest.mark.parametrize("group", [128, 64])
def test_gptq_of_eight_bits_with_zero_points_in_activation_order(group):
    codes, zeros, scales, values, order = in_activation_order(group, 8)
    weights = opened("gptq", gptq_store(codes, zeros - 1, scales, 8, g_idx=order), bits=8)
    check(weights, values, EIGHT[group], 0)
    assert weights.get("q.weight").column_order is not None


def test_a_zero_point_of_256_is_converted(caplog):
    """Which is what a stored 255 stands for in checkpoint format 1."""
    codes, zeros, scales, _ = random_codes(128, 8, zeros=255)
    spread = np.repeat(scales.astype(np.float32), 128, axis=1)
    with caplog.at_level("INFO", "cpuserve"):
        weights = opened("gptq", gptq_store(codes, zeros, scales, 8), bits=8)
        check(weights, (codes - np.float32(256)) * spread, "w8_g32", 0, packed=34 / 32)
    assert "zero points above 255 are converted" in caplog.text


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [False, True])
def test_packed_bytes_are_at_most_a_twentieth_more_than_the_files(bits, group, symmetric):
    zeros = 1 << (bits - 1) if symmetric else None
    codes, zeros, scales, _ = random_codes(group, bits, zeros)
    store = gptq_store(codes, zeros - 1, scales, bits)
    file = sum(store.get(name).data.nbytes for name in store.names())
    weights = gptq_weights(store, {"quantization_config": {"bits": bits}})
    assert weights.packed_bytes() <= 1.05 * file


def test_groups_of_different_sizes_need_an_order():
    codes, zeros, scales, _ = random_codes(128, 8)
    zeros, scales = (np.repeat(x, 2, axis=1)[:, :3] for x in (zeros, scales))
    weights = opened("gptq", gptq_store(codes, zeros, scales, 8), bits=8)
    with pytest.raises(ModelError, match="256 inputs cannot form 3 groups of one size"):
        weights.get("q.weight")


@pytest.mark.parametrize(
    "order", [np.full(K, 2, np.int32), np.full(K, -1, np.int32), np.zeros(7, np.int32)]
)
def test_an_order_of_groups_that_do_not_exist_is_refused(order):
    codes, zeros, scales, _ = random_codes()
    with pytest.raises(ModelError, match=r"q\.g_idx must have 256 numbers below 2"):
        opened("gptq", gptq_store(codes, zeros, scales, g_idx=order), bits=4).get("q.weight")


def test_groups_of_other_sizes_than_multiples_of_32_are_refused():
    codes, zeros, scales, _ = random_codes(16)
    with pytest.raises(ModelError, match="multiples of 32"):
        opened("gptq", gptq_store(codes, zeros, scales), bits=4).get("q.weight")
