"""Quantized checkpoints other than GGUF, GPTQ and AWQ, packed by the formats' definitions."""

import json

import numpy as np
import pytest
import torch

from cpuserve.base.errors import ModelError
from cpuserve.quant import dequantize
from tests.helpers.quantized import FP4 as FP4_BITS
from tests.helpers.quantized import NF4
from tests.quant.checkpoints import (
    EIGHT,
    KINDS,
    NORM,
    STREAM,
    Fp8,
    K,
    N,
    Store,
    check,
    in_activation_order,
    opened,
    pack,
    random_codes,
)

FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]  # by code; the sign is bit 3
# Transforms of llm-compressor: those of weights are in the file, those of inputs are not.
TRANSFORMS = {
    "transform_config": {
        "config_groups": {
            "R1": {"type": "hadamard", "apply": [{"location": "weight_output"}]},
            "R4": {"type": "hadamard", "apply": [{"location": "input"}]},
        }
    }
}
STACK = "mlp.experts.down_proj"


def mxfp4_store(**more):
    """Return blocks and scales of gpt-oss' layout, and a store of them; more: other tensors."""
    blocks = STREAM.integers(0, 256, (3, N, 2, 16), np.uint8)
    scales = STREAM.integers(110, 140, (3, N, 2), np.uint8)
    tensors = {
        f"{STACK}_blocks": blocks,
        f"{STACK}_scales": scales,
        f"{STACK}_bias": np.ones((3, N), np.float16),
        "norm.weight": NORM,
    }
    return blocks, scales, Store(**{**tensors, **more})


def test_mxfp4_is_exact():
    blocks, scales, store = mxfp4_store()
    weights = opened("mxfp4", store, modules_to_not_convert=["norm"])
    matrices = {
        f"mlp.experts.{e}.down_proj.{kind}" for e in range(3) for kind in ("weight", "bias")
    }
    assert weights.names() == matrices | {"norm.weight"}
    assert weights.kind("mlp.experts.1.down_proj.weight", "bfloat16") == "mxfp4"
    assert weights.kind("norm.weight", "bfloat16") == "dense_bf16"
    table = np.array([*FP4, *(-v for v in FP4)])
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(3, N, 2, 32)
    values = (table[codes] * 2.0 ** (scales[..., None].astype(np.float64) - 127)).reshape(3, N, 64)
    for e in range(3):
        tensor = weights.get(f"mlp.experts.{e}.down_proj.weight")
        assert tensor.shape == (N, 64)
        assert tensor.nbytes == tensor.data.nbytes == N * 34
        assert dequantize(tensor).tolist() == values[e].tolist()
        tensor.release()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({f"{STACK}_scales": np.zeros((3, N, 3), np.uint8)}, "for each scale"),
        ({f"{STACK}_scales": np.zeros((3, N, 2), np.int8)}, "for each scale"),
        ({"mlp.experts.up_proj_blocks": np.zeros((3, N, 2, 16), np.uint8)}, "no mlp.experts.up_"),
    ],
)
def test_mxfp4_blocks_without_fitting_scales_are_refused(change, message):
    with pytest.raises(ModelError, match=message):
        opened("mxfp4", mxfp4_store(**change)[2])


def compressed(bits, **weights):
    scheme = {"num_bits": bits, "type": "int", "strategy": "group" if bits == 4 else "channel"}
    return {"config_groups": {"group_0": {"weights": {**scheme, **weights}}}}


def packed_store(codes, scales, bits=4, **more):
    parts = {
        "weight_packed": pack(codes, bits=bits),
        "weight_scale": scales,
        "weight_shape": np.array([N, K], np.int64),
        **more,
    }
    return Store(norm__weight=NORM, **{f"q__{name}": value for name, value in parts.items()})


@pytest.mark.parametrize(("group", "symmetric"), KINDS)
def test_compressed_tensors_int4(group, symmetric):
    codes, zeros, scales, values = random_codes(group, zeros=8 if symmetric else None)
    more = {} if symmetric else {"weight_zero_point": pack(zeros.T).T}
    weights = opened("compressed-tensors", packed_store(codes, scales, **more), **compressed(4))
    check(weights, values, KINDS[group, symmetric], 0 if symmetric else 2e-4)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "kind"),
    [(1, "w2z_g64"), (2, "w2z_g64"), (3, "w3z_g64"), (5, "w8z_g32"), (6, "w8z_g32")],
)
def test_compressed_tensors_of_other_bits_keep_their_codes(bits, kind, symmetric):
    zeros = np.uint8(1 << (bits - 1)) if symmetric else None
    codes, zeros, scales, values = random_codes(64, bits, zeros)
    more = (
        {} if symmetric else {"weight_zero_point": pack(np.ascontiguousarray(zeros.T), bits=bits).T}
    )
    store = packed_store(codes, scales, bits, **more)
    check(opened("compressed-tensors", store, **compressed(bits)), values, kind, 1e-6)


def test_compressed_tensors_whose_words_have_unused_bits_are_refused():
    codes, _, scales, _ = random_codes(64, 8, zeros=64)
    store = packed_store(codes, scales, 8)  # four codes of 7 bits in a word, as in version 0.17
    with pytest.raises(ModelError, match="64 words for 256 inputs"):
        opened("compressed-tensors", store, **compressed(7)).get("q.weight")


@pytest.mark.parametrize("group", [128, 32])
def test_compressed_tensors_of_eight_bits_in_groups_keep_their_codes(group):
    codes, _, scales, values = random_codes(group, 8, zeros=128)
    weights = opened("compressed-tensors", packed_store(codes, scales, 8), **compressed(8))
    check(weights, values, "w8_g32", 0)


def test_compressed_tensors_of_eight_bits_with_a_scale_per_output_are_exact():
    codes, _, _, _ = random_codes(K, 8, zeros=128)
    scales = STREAM.uniform(0.01, 0.02, (N, 1)).astype(np.float32)
    weights = opened("compressed-tensors", packed_store(codes, scales, 8), **compressed(8))
    values = (codes - np.float32(128)) * scales
    check(weights, values, "w8_channel_g128", 0)


@pytest.mark.parametrize("bits", [4, 8])
def test_compressed_tensors_in_activation_order_keep_their_codes(bits):
    codes, _, scales, values, order = in_activation_order(64, bits, 1 << (bits - 1))
    store = packed_store(codes, scales, bits, weight_g_idx=order)
    weights = opened("compressed-tensors", store, **compressed(bits, actorder="group"))
    check(weights, values, "w8_g32" if bits == 8 else "w4z_g64", 0)
    columns = weights.get("q.weight").column_order
    assert np.array_equal(order[columns], np.sort(order))


def test_compressed_tensors_int8_is_exact():
    q = STREAM.integers(-128, 128, (N, K), np.int8)
    scale = STREAM.uniform(0.01, 0.02, (N, 1)).astype(np.float32)
    store = Store(q__weight=q, q__weight_scale=scale, norm__weight=NORM)
    weights = opened("compressed-tensors", store, **compressed(8))
    check(weights, q * scale, "w8_channel", 0)


@pytest.mark.parametrize("group", [K, 64])
def test_compressed_tensors_int8_with_zero_points_keeps_its_codes(group):
    codes, zeros, scales, values = random_codes(group, 8, 110)
    store = Store(
        q__weight=(codes ^ np.uint8(128)).view(np.int8),
        q__weight_scale=scales,
        q__weight_zero_point=(zeros ^ np.uint8(128)).view(np.int8),
        norm__weight=NORM,
    )
    check(opened("compressed-tensors", store, **compressed(8)), values, EIGHT[group], 0)


def test_compressed_tensors_int8_in_groups_is_exact():
    q = STREAM.integers(-128, 128, (N, K), np.int8)
    scale = STREAM.uniform(0.01, 0.02, (N, K // 32)).astype(np.float16)
    store = Store(q__weight=q, q__weight_scale=scale, norm__weight=NORM)
    weights = opened("compressed-tensors", store, **compressed(8))
    check(weights, q * np.repeat(scale.astype(np.float32), 32, axis=1), "w8_g32", 0)


def test_zero_points_of_int8_weights_are_int8():
    q = STREAM.integers(-128, 128, (N, K), np.int8)
    scale, zeros = np.ones((N, 1), np.float16), np.zeros((N, 1), np.float32)
    parts = {"q__weight_scale": scale, "q__weight_zero_point": zeros}
    weights = opened("compressed-tensors", Store(q__weight=q, **parts), **compressed(8))
    with pytest.raises(ModelError, match="weight_zero_point has type F32; only I8"):
        weights.get("q.weight")
    parts["q__weight_zero_point"] = np.ones((N, 2), np.int8)
    weights = opened("compressed-tensors", Store(q__weight=q, **parts), **compressed(8))
    with pytest.raises(ModelError, match=r"64 scales or zero points for 32 rows in 1 groups"):
        weights.get("q.weight")


# The shape of the scales of FP8 matrices, and how they repeat.
FP8_SCALES = {
    "one": ((1,), (N, K)),
    "rows": ((N, 1), (1, K)),
    "blocks": ((3, 2), (12, 128)),  # the last ones have fewer rows
    "other blocks": ((3, 3), (12, 100)),  # whose last ones are smaller
}


def check_fp8(weights, values, form):
    kept = form != "other blocks"
    packed = None if kept else 34 / 32
    check(weights, values, "e4m3_g128" if kept else "w8_g32", 0 if kept else 1e-7, packed)


def random_fp8(form):
    """(values in FP8, scales, their product)."""
    weight = Fp8(STREAM.standard_normal((N, K)) * 30)
    shape, each = FP8_SCALES[form]
    scale = STREAM.uniform(0.01, 0.02, shape).astype(np.float32)
    spread = np.kron(scale.reshape(shape if len(shape) == 2 else (1, 1)), np.ones(each, np.float32))
    return weight, scale, weight.values * spread[:N, :K]


@pytest.mark.parametrize("form", ["one", "blocks", "other blocks"])
def test_fp8(form):
    weight, scale, values = random_fp8(form)
    part = "weight_scale" if form == "one" else "weight_scale_inv"
    store = Store(norm__weight=NORM, q__weight=weight, **{f"q__{part}": scale})
    block = {} if form == "one" else {"weight_block_size": list(FP8_SCALES[form][1])}
    check_fp8(opened("fp8", store, **block), values, form)


@pytest.mark.parametrize("form", FP8_SCALES)
def test_compressed_tensors_fp8(form):
    weight, scale, values = random_fp8(form)
    store = Store(norm__weight=NORM, q__weight=weight, q__weight_scale=scale)
    strategy = {"one": "tensor", "rows": "channel"}.get(form, "block")
    block = {"block_structure": list(FP8_SCALES[form][1])} if strategy == "block" else {}
    settings = compressed(8, type="float", strategy=strategy, **block)
    check_fp8(opened("compressed-tensors", store, **settings), values, form)


def test_every_fp8_value_is_that_of_torch():
    from cpuserve.quant.float_rows import e4m3

    codes = np.arange(256, dtype=np.uint8)
    values = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(e4m3(codes), values, equal_nan=True)


def test_parts_of_latent_attention_in_fp8_stay_dense():
    """kv_b_proj multiplies columns of rows, which have no scales."""
    weight, scale, _ = random_fp8("one")
    name = "model.layers.0.self_attn.kv_b_proj."
    weights = opened("fp8", Store(**{f"{name}weight": weight, f"{name}weight_scale": scale}))
    assert weights.kind(f"{name}weight", "bfloat16") == "dense_bf16"


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def random_fp4():
    """(bytes of two codes [N, K / 2], the values of the codes)."""
    codes = STREAM.integers(0, 16, (N, K), np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, E2M1[codes]


def test_compressed_tensors_nvfp4():
    pairs, values = random_fp4()
    scale = Fp8(STREAM.uniform(1, 400, (N, K // 16)))
    total = np.array([300.0], np.float32)
    store = Store(
        q__weight_packed=pairs,
        q__weight_scale=scale,
        q__weight_global_scale=total,
        q__input_global_scale=total,
        norm__weight=NORM,
    )
    settings = compressed(4, type="float", strategy="tensor_group", group_size=16)
    weights = opened("compressed-tensors", store, format="nvfp4-pack-quantized", **settings)
    values = values * np.repeat(scale.values / total, 16, axis=1)
    check(weights, values, "nvfp4", 1e-6)


def test_compressed_tensors_mxfp4_keep_their_codes():
    pairs, values = random_fp4()
    exponents = STREAM.integers(110, 130, (N, K // 32), np.uint8)
    store = Store(q__weight_packed=pairs, q__weight_scale=exponents, norm__weight=NORM)
    settings = compressed(4, type="float", group_size=32)
    weights = opened("compressed-tensors", store, format="mxfp4-pack-quantized", **settings)
    scale = np.ldexp(np.float32(1), exponents.astype(np.int32) - 127)
    check(weights, values * np.repeat(scale, 32, axis=1), "mxfp4", 0)


def test_one_checkpoint_may_mix_the_forms_of_compressed_tensors():
    weight, scale, values = random_fp8("one")
    pairs, _ = random_fp4()
    exponents = np.full((N, K // 32), 127, np.uint8)
    store = Store(
        q__weight=weight, q__weight_scale=scale, k__weight_packed=pairs, k__weight_scale=exponents
    )
    weights = opened("compressed-tensors", store, format="mixed-precision", **compressed(8))
    assert weights.kind("q.weight", "bfloat16") == "e4m3_g128"
    assert weights.kind("k.weight", "bfloat16") == "mxfp4"
    assert np.abs(dequantize(weights.get("q.weight")) - values).max() < 1e-7


def test_bitsandbytes_int8_is_exact():
    q = STREAM.integers(-127, 128, (N, K), np.int8)
    largest = STREAM.uniform(1, 2, N).astype(np.float32)
    store = Store(
        q__weight=q, q__SCB=largest, q__weight_format=np.zeros((), np.uint8), norm__weight=NORM
    )
    values = q * (largest / np.float32(127))[:, None]
    check(opened("bitsandbytes", store, load_in_8bit=True), values, "w8_channel", 0)


def four_bits_store(nested, state=None, table=None, size=64):
    """A matrix in bitsandbytes' 4 bits, with blocks of `size` weights, and its values."""
    if table is None:
        table = np.sort(STREAM.uniform(-1, 1, 16)).astype(np.float32)
    codes = STREAM.integers(0, 16, (N, K), np.uint8)
    about = {"quant_type": "nf4", "blocksize": size, "shape": [N, K], "dtype": "bfloat16"}
    parts = {"weight": (codes[:, ::2] << 4 | codes[:, 1::2]).reshape(-1, 1)}
    if nested:
        absmax = STREAM.integers(0, 256, N * K // size, np.uint8)
        nested_map = np.linspace(-1, 1, 256, dtype=np.float32)
        outer = STREAM.uniform(0.1, 0.2, 8).astype(np.float32)
        about |= {"nested_blocksize": 16, "nested_offset": 0.5, "nested_dtype": "float32"}
        largest = nested_map[absmax] * np.repeat(outer, 16)[: absmax.size] + np.float32(0.5)
        parts |= {"weight.nested_absmax": outer, "weight.nested_quant_map": nested_map}
    else:
        absmax = largest = STREAM.uniform(0.1, 0.2, N * K // size).astype(np.float32)
    text = (json.dumps(about) if state is None else state).encode()
    parts |= {
        "weight.absmax": absmax,
        "weight.quant_map": table,
        "weight.quant_state.bitsandbytes__nf4": np.frombuffer(text, np.uint8),
    }
    store = Store(norm__weight=NORM, **{f"q__{name}": value for name, value in parts.items()})
    return store, table[codes] * np.repeat(largest, size).reshape(N, K)


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("size", [64, 4096])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes_of_four_bits_keeps_its_codes(kind, size, nested):
    table = {"nf4": NF4, "fp4": FP4_BITS}[kind].numpy()
    store, values = four_bits_store(nested, table=table, size=size)
    # Scales, of up to 0.7, are rounded to fp16.
    check(opened("bitsandbytes", store), values, f"{kind}_g64", 0.7 / 2048)


@pytest.mark.parametrize("nested", [True, False])
def test_bitsandbytes_of_other_values_is_converted(nested):
    store, values = four_bits_store(nested)
    weights = opened("bitsandbytes", store, load_in_4bit=True)
    check(weights, values, "w8_g32", 1e-7, packed=34 / 32)


@pytest.mark.parametrize(
    "state", ["{", "[]", '{"shape": [16, 256]}', '{"blocksize": 64}', "[" * 9999]
)
def test_a_broken_state_of_bitsandbytes_is_named(state):
    store, _ = four_bits_store(nested=False, state=state)
    with pytest.raises(ModelError, match="bitsandbytes__nf4 is not JSON with a shape"):
        opened("bitsandbytes", store).get("q.weight")


@pytest.mark.parametrize(
    ("method", "settings", "needle"),
    [
        ("compressed-tensors", {"config_groups": {"a": 1}}, "with 1 instead of settings"),
        ("compressed-tensors", {"config_groups": {"a": {"weights": 4}}}, "with 4 instead of"),
        ("awq", {"bits": 8}, "bits = 8"),
        ("awq", {"bits": 4, "version": "marlin"}, "version = marlin"),
        ("gptq", {"bits": 5}, "bits = 5"),
        ("compressed-tensors", {"format": "marlin-24", **compressed(4)}, "marlin-24"),
        ("compressed-tensors", {"config_groups": {}}, "without config_groups"),
        (
            "compressed-tensors",
            {"sparsity_config": {"format": "sparse-24-bitmask"}, **compressed(4)},
            "sparse-24-bitmask",
        ),
        (
            "compressed-tensors",
            {**TRANSFORMS, **compressed(4)},
            "transform 'R4' of activations .location input.",
        ),
    ],
)
def test_what_is_not_read_is_refused_by_its_setting(method, settings, needle):
    with pytest.raises(ModelError, match=needle) as error:
        opened(method, Store(), **settings)
    assert "unquantized" in str(error.value)


@pytest.mark.parametrize("block", [[128], [0, 128], "128", [1.5, 2], [True, 2]])
def test_blocks_of_fp8_that_are_none_are_refused(block):
    with pytest.raises(ModelError, match="weight_block_size"):
        opened("fp8", Store(), weight_block_size=block)


def test_scales_that_do_not_fit_their_matrix_are_refused():
    weight, _, _ = random_fp8("one")
    store = Store(q__weight=weight, q__weight_scale_inv=np.ones((3, 4), np.float32))
    tensor = opened("fp8", store, weight_block_size=[12, 100]).get("q.weight")
    with pytest.raises(ModelError, match=r"its scales are \[3, 4\]"):
        dequantize(tensor)
    pairs, _ = random_fp4()
    store = Store(q__weight_packed=pairs, q__weight_scale=np.ones((N, 7), np.uint8))
    with pytest.raises(ModelError, match="must be one for 32 inputs of an output"):
        opened("compressed-tensors", store, **compressed(4)).get("q.weight")


def test_a_missing_part_is_named():
    codes, zeros, _, _ = random_codes()
    store = Store(q__qweight=pack(codes).T, q__qzeros=pack(zeros.T))
    with pytest.raises(ModelError, match=r"no tensor q\.scales"):
        opened("gptq", store, bits=4).get("q.weight")
