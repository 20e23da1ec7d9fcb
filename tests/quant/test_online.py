"""Online quantization to int8 and int4: the packers give the same result as the numpy code."""

import functools

import numpy as np
import pytest

from cpuserve import _C
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.builder import Builder
from cpuserve.program.operations.columns import Columns, MixParts
from cpuserve.program.operations.dense import Embed, Linear, Logits
from cpuserve.program.operations.entries import PoolEntries
from cpuserve.program.operations.indexer import PoolIndexKeys, SelectKeys, StoreIndexKeys
from cpuserve.program.operations.mixture import Route
from cpuserve.program.operations.streams import SpreadStreams, StreamWeights
from cpuserve.program.operations.wkv import Lerp, Wkv6, Wkv7
from cpuserve.program.program import WeightNeed
from cpuserve.quant.online import OnlineWeights, kind_of, quantize, quantize_int4, quantize_int8
from cpuserve.quant.rows import int8_rows, int_rows
from tests.helpers.levels import each_level
from tests.helpers.tiny import ENCODERS, FAMILIES, RELATIVES, tiny_config, tiny_model

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
    def kind(scheme, use, name="a.b.weight"):
        return OnlineWeights(Stored(), [WeightNeed(name, (), "matrix", use)], scheme).kind(
            name, "bfloat16"
        )

    assert kind("int8", "head") == kind("int4", "head") == "w8_channel_g128"
    assert kind("int8", "down") == "w8_channel_g128"
    assert kind("int8", "output") == "w8_channel"
    assert kind("w8a8", "down") == "w8_channel"
    assert kind("int8_fine", "linear") == kind("int8_fine", "output") == "w8_g32"
    assert kind("int4", "output") == "w4m_g128"
    assert kind("int4", "linear", "a.gguf.weight") == "w4_g32"
    assert kind("int4_fine", "embedding") == "w8_g32"
    assert kind("int4_mixed", "linear") == "w4m_g128"
    assert kind("int4_mixed", "values") == "w8_channel_g128"
    assert kind("int4_mixed", "down", "a.output_linear[3][0:64].weight") == "w8_channel_g128"
    assert kind("int4_mixed_fine", "linear") == "w4m_g32"
    assert kind("int4_mixed_fine", "exact") == kind("none", "down") == "dense_bf16"


def test_small_models_keep_more_matrices_in_8_bits():
    def in_8_bits(scheme, layer):
        name = f"model.layers.{layer}.a.weight"
        uses = ("linear", "values", "output", "down")
        return {use for use in uses if kind_of(name, use, scheme) == "w8_g32"}

    assert in_8_bits("int4_fine", 0) == in_8_bits("int4_fine", 1) == {"values", "down"}
    assert in_8_bits("int4_mixed_fine", 10) == {"values", "down"}
    assert len(in_8_bits("int4_mixed_fine", 11)) == 4
    # Experts are numbered, too; those of one layer have one kind.
    experts = {
        kind_of(f"model.layers.2.mlp.experts.{i}.up_proj.weight", "linear", "int4_mixed_fine")
        for i in range(2)
    }
    assert experts == {"w4m_g32"}


@functools.cache
def programs():
    families = (*FAMILIES, *RELATIVES, *ENCODERS)
    return [build_program(spec_from_config(tiny_config(family))) for family in families]


def kinds(scheme, wanted):
    """The kinds of the matrices of ops of a type in programs of all families."""
    return {
        OnlineWeights(Stored(), program.weights, scheme).kind(name, "bfloat16")
        for program in programs()
        for op in program.ops
        if isinstance(op, wanted)
        for name in (op.weights if isinstance(op, Linear) else (op.weight,))
    }


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4_mixed", "w8a8"])
def test_embeddings_and_heads_of_all_families_have_8_bits_in_every_scheme(scheme):
    assert "w8_g32" not in kinds(scheme, Linear)
    assert kinds(scheme, Logits) == {"w8_channel_g128"}
    assert kinds(scheme, Embed) == {"w8_channel_g128", "w8_g32"}  # w8_g32: of all layers
    if scheme != "w8a8":  # it has no form for small models
        assert kinds(f"{scheme}_fine", Embed | Logits) == {"w8_g32"}


def test_int4_keeps_no_linear_of_any_family_in_8_bits():
    assert kinds("int4", Linear) == {"w4m_g128", "dense_bf16"}  # dense_bf16: routers


def test_embeddings_of_all_layers_have_scales_of_their_own():
    names = {
        (need.name, kind_of(need.name, need.use, "int8"))
        for program in programs()
        for need in program.weights
        if need.use == "layers"
    }
    assert names == {("model.embed_tokens_per_layer.weight", "w8_g32")}


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


def _decays(program):
    """The values of the decays and steps of RWKV, and those that they are made of."""
    ends = {v for op in program.ops if isinstance(op, Wkv7) for v in (op.decay, op.rate)}
    ends |= {op.decay for op in program.ops if isinstance(op, Wkv6)}
    return ends | {op.x for op in program.ops if isinstance(op, Linear) and op.out in ends}


@pytest.mark.parametrize("scheme", ["int8", "int4_mixed_fine"])
def test_routers_of_all_families_keep_their_precision(scheme):
    routers, rest = set(), set()
    for program in programs():
        weights = OnlineWeights(Stored(), program.weights, scheme)
        exact = _gates(program) | _decays(program)
        for op in program.ops:
            if isinstance(op, Linear):
                routes = op.out in exact or any(_routes(r, op.out) for r in program.ops)
                names = {name for name in op.weights if weights.kind(name, "") == "dense_bf16"}
                assert not routes or names == {*op.weights}
                (routers if routes else rest).update(names)
    assert len(routers) > 100
    # The matrices that make factors of mixtures are exact as well (RWKV 6).
    assert all(".attn.x_proj." in name for name in rest)


def test_a_family_of_a_plug_in_gets_the_same_treatment_whatever_its_tensors_are_called():
    spec = spec_from_config(tiny_config("qwen3-moe"))
    b = Builder(spec)
    x = b.embed("words")
    h = b.linear(x, ["one", "two", "three"], features=spec.width, use="qkv")
    b.linear(b.columns(h, spec.width), "four", add_to=x, use="output")
    experts = [[f"mix.{e}.{part}" for part in "abc"] for e in range(4)]
    b.mixture(x, "choice", experts, features=32, chosen=2, to=x)
    b.logits(x, "last")
    uses = {need.name.removesuffix(".weight"): need.use for need in b.finish().weights}
    assert uses["words"] == "embedding"
    assert uses["last"] == "head"
    assert uses["choice"] == "exact"
    assert [uses[n] for n in ("one", "two", "three", "four")] == [
        *("linear", "linear", "values", "output")
    ]
    assert [uses[f"mix.1.{part}"] for part in "abc"] == ["linear", "linear", "down"]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_matrices_that_make_factors_of_mixtures_keep_their_precision(scheme):
    program = build_program(spec_from_config(tiny_config("rwkv6")))
    factors = {op.gates for op in program.ops if isinstance(op, Lerp) and op.plain}
    linears = [op for op in program.ops if isinstance(op, Linear)]
    factors |= {op.x for op in linears if op.out in factors}
    names = {name for op in linears if op.out in factors for name in op.weights}
    assert len(names) == 2 * 5 * 3
    path = tiny_model("rwkv6")
    weights = OnlineWeights(open_checkpoint(path).weights, program.weights, scheme)
    assert {weights.kind(name, "float32") for name in names} == {"dense_f32"}
