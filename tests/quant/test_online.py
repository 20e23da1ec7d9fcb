"""Online quantization to int8 and int4: the packers give the same result as the numpy code."""

import numpy as np
import pytest

from cpuserve import _C
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.operations.columns import Columns, MixParts
from cpuserve.program.operations.dense import Embed, Linear, Logits
from cpuserve.program.operations.entries import PoolEntries
from cpuserve.program.operations.indexer import PoolIndexKeys, SelectKeys, StoreIndexKeys
from cpuserve.program.operations.mixture import Route
from cpuserve.program.operations.streams import SpreadStreams, StreamWeights
from cpuserve.program.operations.wkv import Lerp, Wkv6, Wkv7
from cpuserve.program.parts import parse
from cpuserve.quant.online import (
    BY_LAYER,
    ONE_SCALE,
    PER_TOKEN,
    ROUTERS,
    SENSITIVE,
    OnlineWeights,
    kind_of,
    quantize,
    quantize_int4,
    quantize_int8,
)
from cpuserve.quant.rows import int8_rows, int_rows
from tests.helpers.depth import deep_but
from tests.helpers.levels import each_level
from tests.helpers.tiny import ENCODERS, FAMILIES, tiny_config, tiny_model

KINDS = ["w8_g32", "w4m_g32", "w8_channel", "w8_channel_g128", "w4m_g128"]


def matrix(n, k, seed=3):
    w = np.random.default_rng(seed).standard_normal((n, k)).astype(np.float32)
    w[2, 5] = 9.0  # an outlier
    w[4] = 0.0
    return w


def product(isa, kind, source, rows, n, k, x):
    return _C.kernel_linear(isa, kind, source, rows, n, k, x)


def one_hot(k, at):
    """One-hot rows, which select columns; quantizing them is exact up to the rounding of 1."""
    x = np.zeros((len(at), k), np.float32)
    x[np.arange(len(at)), at] = 1.0
    return x


@each_level
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [128, 200])
def test_the_packer_quantizes_as_numpy_does(isa, kind, k):
    n, at = 19, [0, 5, 31, 64, 127, k - 1]
    w = matrix(n, k)
    got = product(isa, kind, "f32", w.view(np.uint8), n, k, one_hot(k, at))
    want = quantize(w, kind).values()[:, at].T
    assert np.allclose(got, want, rtol=1e-5, atol=1e-5)


def test_int8_is_off_by_at_most_half_a_step():
    w = matrix(7, 96)
    error = np.abs(quantize_int8(w).values() - w)
    assert (error <= np.abs(w).max(axis=1, keepdims=True) / 127 * 0.5001).all()


def test_int4_beats_the_plain_range_and_survives_a_short_last_group():
    w = matrix(7, 300)
    x = np.pad(w, ((0, 0), (0, 84)), mode="edge").reshape(7, 3, 128)
    low, high = x.min(axis=2, keepdims=True), x.max(axis=2, keepdims=True)
    step = np.where(high > low, (high - low) / 15, 1)
    plain = (np.rint((x - low) / step) * step + low).reshape(7, -1)[:, :300]
    error = np.square(quantize_int4(w).values() - w).sum()
    assert error < np.square(plain - w).sum() * 0.97


@each_level
def test_rows_with_codes_keep_every_value(isa):
    stream = np.random.default_rng(1)
    n, k, at = 18, 256, [0, 1, 127, 128, 255]
    q = stream.integers(-127, 128, (n, k), np.int8)
    scale = stream.uniform(0.5, 1, n).astype(np.float32)
    got = product(isa, "w8_channel", "s8_channel", int8_rows(q, scale), n, k, one_hot(k, at))
    assert np.allclose(got, (q * scale[:, None])[:, at].T, rtol=1e-6)
    nibbles = stream.integers(0, 256, (n, k // 2), np.uint8)
    scale, minimum = stream.uniform(0.5, 1, (2, n, 2)).astype(np.float16).astype(np.float32)
    rows = int_rows(nibbles, scale, minimum / scale, "u4m_g128")
    got = product(isa, "w4m_g128", "u4m_g128", rows, n, k, one_hot(k, at))
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(n, k)
    values = codes * np.repeat(scale, 128, axis=1) - np.repeat(minimum, 128, axis=1)
    assert np.allclose(got, values[:, at].T, rtol=1e-5, atol=1e-5)


class Stored:
    """A checkpoint that is dense except for one quantized tensor."""

    def kind(self, name, dtype):
        del dtype
        return "w4_g32" if name == "a.gguf.weight" else "dense_bf16"


def test_each_matrix_gets_its_kind():
    int8, int4 = OnlineWeights(Stored(), "int8"), OnlineWeights(Stored(), "int4")
    head = "lm_head.weight"
    assert int8.kind(head, "bfloat16") == int4.kind(head, "bfloat16") == "w8_channel_g128"
    assert int8.kind("a.down_proj.weight", "bfloat16") == "w8_channel_g128"
    assert int8.kind("a.o_proj.weight", "bfloat16") == "w8_channel"
    assert OnlineWeights(Stored(), "w8a8").kind("a.down_proj.weight", "bfloat16") == "w8_channel"
    fine = OnlineWeights(Stored(), "int8_fine")
    assert fine.kind("a.up_proj.weight", "bfloat16") == "w8_g32"
    assert fine.kind("a.o_proj.weight", "bfloat16") == "w8_g32"
    assert int4.kind("a.o_proj.weight", "bfloat16") == "w4m_g128"
    assert int4.kind("a.gguf.weight", "bfloat16") == "w4_g32"
    assert kind_of("model.embed_tokens.weight", "int4_fine") == "w8_g32"
    mixed = OnlineWeights(Stored(), "int4_mixed")
    assert mixed.kind("a.q_proj.weight", "bfloat16") == "w4m_g128"
    assert mixed.kind("a.v_proj.weight", "bfloat16") == "w8_channel_g128"
    assert mixed.kind("a.output_linear[3][0:64].weight", "bfloat16") == "w8_channel_g128"
    assert kind_of("a.up_proj.weight", "int4_mixed_fine") == "w4m_g32"


def test_small_models_keep_more_matrices_in_8_bits():
    def in_8_bits(scheme, layer):
        every = ("q", "k", "v", "o", "gate", "up", "down")
        name = f"model.layers.{layer}.a.%s_proj.weight"
        return {n for n in every if kind_of(name % n, scheme) == "w8_g32"}

    assert in_8_bits("int4_fine", 0) == in_8_bits("int4_fine", 1) == {"v", "down"}
    assert in_8_bits("int4_mixed_fine", 10) == {"v", "down"}
    assert len(in_8_bits("int4_mixed_fine", 11)) == 7
    # Experts are numbered, too; those of one layer have one kind.
    experts = {
        kind_of(f"model.layers.2.mlp.experts.{i}.up_proj.weight", "int4_mixed_fine")
        for i in range(2)
    }
    assert experts == {"w4m_g32"}


def matrices():
    """(names of embeddings and output heads, names of linears) in programs of all families."""
    programs = [
        build_program(spec_from_config(tiny_config(family))) for family in (*FAMILIES, *ENCODERS)
    ]
    found = [op for program in programs for op in program.ops]
    ends = {op.weight for op in found if isinstance(op, Embed | Logits)}
    return ends, {name for op in found if isinstance(op, Linear) for name in op.weights}


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4_mixed", "w8a8"])
def test_embeddings_and_heads_of_all_families_have_8_bits_in_every_scheme(scheme):
    ends, linears = matrices()
    assert "w8_g32" not in {kind_of(name, scheme) for name in linears}
    by_layer = {name for name in ends if name.endswith(BY_LAYER)}
    assert by_layer
    assert {kind_of(name, scheme) for name in ends - by_layer} == {"w8_channel_g128"}
    assert {kind_of(name, scheme) for name in by_layer} == {"w8_g32"}
    if scheme != "w8a8":  # it has no form for small models
        assert {kind_of(name, f"{scheme}_fine") for name in ends} == {"w8_g32"}


def test_int4_keeps_no_linear_of_any_family_in_8_bits():
    _, linears = matrices()
    assert {kind_of(name, "int4") for name in linears} == {"w4m_g128"}


def _routes(op, value):
    """Whether the op makes a choice of experts or keys, or coefficients, of this value."""
    if isinstance(op, Route):
        return op.x == value
    if isinstance(op, StreamWeights | SpreadStreams | SelectKeys):
        return op.weights == value
    return isinstance(op, MixParts) and op.gates == value


def _gates(program):
    """The values with the gates of the index keys, or of the entries, of pools."""
    pooled = {op.x for op in program.ops if isinstance(op, PoolIndexKeys)}
    joined = [op for op in program.ops if isinstance(op, Columns) and op.out in pooled]
    entries = [op for op in program.ops if isinstance(op, PoolEntries)]
    layers = {layer for op in entries for layer in op.reads_layers[op.series :]}
    stored = {op.x for op in program.ops if isinstance(op, StoreIndexKeys) and op.layer in layers}
    return stored | {op.more for op in joined if op.more is not None}


def _tensor_of(name):
    """The stored tensor that a weight is, or is a part of."""
    part = parse(name)
    return name if part is None else part.tensor


def _decays(program):
    """The values of the decays and steps of RWKV, and those that they are made of."""
    ends = {v for op in program.ops if isinstance(op, Wkv7) for v in (op.decay, op.rate)}
    ends |= {op.decay for op in program.ops if isinstance(op, Wkv6)}
    return ends | {op.x for op in program.ops if isinstance(op, Linear) and op.out in ends}


def test_routers_of_all_families_keep_their_precision():
    programs = [
        build_program(spec_from_config(tiny_config(family))) for family in (*FAMILIES, *ENCODERS)
    ]
    names = {
        name
        for program in programs
        for op in program.ops
        if isinstance(op, Linear)
        and (
            op.out in _gates(program) | _decays(program)
            or any(_routes(r, op.out) for r in program.ops)
        )
        for name in map(_tensor_of, op.weights)
    }
    assert len(names) >= len(ROUTERS)
    assert all(name.endswith(ROUTERS) for name in names)
    assert all(any(name.endswith(router) for name in names) for router in ROUTERS)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_matrices_that_make_factors_of_mixtures_keep_their_precision(scheme):
    program = build_program(spec_from_config(tiny_config("rwkv6")))
    factors = {op.gates for op in program.ops if isinstance(op, Lerp) and op.plain}
    linears = [op for op in program.ops if isinstance(op, Linear)]
    factors |= {op.x for op in linears if op.out in factors}
    names = {name for op in linears if op.out in factors for name in op.weights}
    assert len(names) == 2 * 5 * 3
    path = tiny_model("rwkv6")
    weights = OnlineWeights(open_checkpoint(path).weights, scheme)
    assert {weights.kind(name, "float32") for name in names} == {"dense_f32"}


@pytest.mark.parametrize("entry", deep_but([*SENSITIVE], [*PER_TOKEN, *ONE_SCALE, *SENSITIVE]))
def test_every_name_with_a_rule_of_its_own_is_that_of_some_model(entry):
    ends, linears = matrices()
    assert any(name.endswith(entry) for name in ends | linears)
