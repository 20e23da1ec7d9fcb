"""The Builder refuses ops whose shapes do not match, and lists the weights that its ops read."""

from __future__ import annotations

import dataclasses

import pytest

from cpuserve.base.errors import ModelError
from cpuserve.models import spec_from_config
from cpuserve.program.builder import Builder
from cpuserve.program.dataflow import last_uses
from cpuserve.program.operations.dense import Linear, Logits
from cpuserve.program.ops import Rope
from cpuserve.program.program import WeightNeed
from tests.helpers.tiny import tiny_config

SPEC = spec_from_config(tiny_config("llama"))  # width 64, 4 heads of 16, 2 kv heads


@pytest.fixture
def b():
    return Builder(SPEC)


def _qkv(b, x):
    return b.linear(x, ["q", "k", "v"], features=[64, 32, 32])


def _layer(b, x, layer=0):
    qkv = _qkv(b, x)
    b.rope_store_kv(qkv, layer=layer, rope=SPEC.rope)
    return b.attention(qkv, layer=layer)


def _mamba2(b, x, **sizes):
    given = {"heads": 4, "groups": 2, "key_width": 8, "value_width": 8, **sizes}
    return b.mamba2(x, x, "m", **given)


def test_linear_lists_its_matrices_and_only_the_biases_asked_for(b):
    x = b.embed("e")
    b.linear(x, ["gate", "up"], features=40, bias=[False, True], then="silu_mul")
    b.logits(x, "head")
    program = b.finish()
    assert program.weights == (
        WeightNeed("e.weight", (512, 64), "matrix", "embedding"),
        WeightNeed("gate.weight", (40, 64), "matrix"),
        WeightNeed("up.weight", (40, 64), "matrix"),
        WeightNeed("up.bias", (40,), "vector"),
        WeightNeed("head.weight", (512, 64), "matrix", "head"),
    )
    assert program.ops[1].biases == (None, "up.bias")
    assert program.values[program.ops[1].out].width == 40


def test_a_tied_head_shares_the_embedding_matrix(b):
    b.logits(b.embed("e"), "head", tied_to="e")
    program = b.finish()
    assert [need.name for need in program.weights] == ["e.weight"]
    assert program.ops[-1].weight == "e.weight"


def test_add_to_takes_its_features_from_the_value_and_returns_it(b):
    x = b.embed("e")
    assert b.linear(b.rms_norm(x, "n"), "o", add_to=x) == x
    b.logits(x, "head")
    op = b.finish().ops[2]
    assert isinstance(op, Linear)
    assert op.add
    assert op.features == (64,)


WKV_6 = {"bonus": True, "norm": True, "eps": 1e-5, "scale": 1.0}
WRONG = {
    "features-missing": (lambda b, x: b.linear(x, "w"), "features are not given"),
    "features-count": (lambda b, x: b.linear(x, ["a", "c"], features=[3]), "2 matrices, 1 feat"),
    "gate-and-up-differ": (
        lambda b, x: b.linear(x, ["g", "u"], features=[8, 16], then="silu_mul"),
        "two matrices of equal features",
    ),
    "add-to-other-width": (
        lambda b, x: b.linear(x, "w", features=32, add_to=x),
        "e is 64 wide, not 32",
    ),
    "add-other-width": (
        lambda b, x: b.add(b.linear(x, "w", features=32), to=x),
        "e is 64 wide, not 32",
    ),
    "qkv-width": (lambda b, x: b.rope_store_kv(x, layer=0, rope=None), "needs 128"),
    "layer-skipped": (
        lambda b, x: b.rope_store_kv(_qkv(b, x), layer=1, rope=None),
        "rope_store_kv of layer 0 is next",
    ),
    "attention-first": (lambda b, x: b.attention(_qkv(b, x), layer=0), "before rope_store_kv"),
    "rope-too-wide": (
        lambda b, x: b.rope_store_kv(_qkv(b, x), layer=0, rope=Rope(32, (1.0,) * 16)),
        "head_dim 16",
    ),
    "weight-two-shapes": (
        lambda b, x: (b.linear(x, "w", features=8), b.linear(x, "w", features=9)),
        r"two ops need w\.weight in different forms",
    ),
    "part-norm-beyond-the-end": (
        lambda b, x: b.part_norm(x, "n", width=16, column=32, parts=3),
        "e is 64 wide, so it has no 48 columns from column 32 on",
    ),
    "part-layer-norm-beyond-the-end": (
        lambda b, x: b.part_layer_norm(x, "n", width=16, column=32, parts=3),
        "e is 64 wide, so it has no 48 columns from column 32 on",
    ),
    "part-layer-norm-names": (
        lambda b, x: b.part_layer_norm(x, ("n", "m"), width=16, parts=3),
        "n: there are 2 weights for 3 parts",
    ),
    "multiply-too-few": (
        lambda b, x: b.multiply(x, to=b.linear(x, "w", features=32), column=33),
        "e is 64 wide, so it has no 32 columns from column 33 on",
    ),
    "convolution-too-wide": (
        lambda b, x: b.short_conv(x, "c", taps=3, column=60, channels=5),
        "no 5 columns from column 60 on",
    ),
    "mamba2-width": (lambda b, x: _mamba2(b, x, key_width=9), "e is 64 wide, not 68"),
    "decayed-sums": (
        lambda b, x: b.decayed_sums(x, "m", width=9, slopes=(0.5, 0.25)),
        "e is 64 wide, not 54",
    ),
    "mamba2-groups": (lambda b, x: _mamba2(b, x, groups=3), "4 heads cannot form 3 equal groups"),
    "mamba2-steps": (lambda b, x: _mamba2(b, x, column=61), "no 4 columns from column 61 on"),
    "lerp-width": (
        lambda b, x: b.lerp(x, b.linear(x, "w", features=32), "s"),
        "is 32 wide, not 64",
    ),
    "lerp-nothing": (lambda b, x: b.lerp(x, x), "either a weight or gates"),
    "lerp-gates": (
        lambda b, x: b.lerp(x, x, gates=b.linear(x, "w", features=32)),
        "is 32 wide, not 64",
    ),
    "wkv7-heads": (
        lambda b, x: b.wkv7((x,) * 5, "m", heads=5, norm=True, eps=1e-5),
        "64 and 64 columns cannot form 5 equal heads",
    ),
    "wkv7-width": (
        lambda b, x: b.wkv7(
            (x, b.linear(x, "w", features=32), x, x, x), "m", heads=4, norm=True, eps=1e-5
        ),
        "is 32 wide, not 64",
    ),
    "wkv6-heads": (
        lambda b, x: b.wkv6((x,) * 4, "m", heads=4, kv_heads=3, **WKV_6),
        "64 and 64 columns cannot form 4 and 3 heads",
    ),
    "wkv6-width": (
        lambda b, x: b.wkv6((x,) * 4, "m", heads=4, kv_heads=2, **WKV_6),
        "is 64 wide, not 32",
    ),
    "gated-norm-groups": (lambda b, x: b.gated_norm(x, x, "n", groups=5), "5 equal groups"),
    "gated-norm-gates": (lambda b, x: b.gated_norm(x, x, "n", column=1), "no 64 columns"),
    "odd-halves": (
        lambda b, x: b.activation(b.linear(x, "w", features=9), "silu_mul"),
        "width 9 is odd",
    ),
}


@pytest.mark.parametrize(("write", "message"), WRONG.values(), ids=WRONG.keys())
def test_an_op_that_does_not_fit_is_refused(b, write, message):
    x = b.embed("e")
    with pytest.raises(ModelError, match=message):
        write(b, x)


def test_a_program_without_logits_is_refused(b):
    b.embed("e")
    with pytest.raises(ModelError, match="must have one logits or hidden op"):
        b.finish()


def test_ops_after_the_logits_are_refused(b):
    x = b.embed("e")
    b.logits(x, "head")
    b.rms_norm(x, "n")
    with pytest.raises(ModelError, match="must have one logits or hidden op"):
        b.finish()


def test_a_layer_that_is_stored_and_not_read_is_refused(b):
    x = b.embed("e")
    b.rope_store_kv(_qkv(b, x), layer=0, rope=None)
    b.logits(x, "head")
    with pytest.raises(ModelError, match="1 layers are stored"):
        b.finish()


def test_values_live_until_their_last_reader(b):
    x = b.embed("e")
    a = _layer(b, x)
    b.linear(a, "o", add_to=x)
    b.logits(b.rms_norm(x, "n"), "head")
    program = b.finish()
    last = last_uses(program)
    assert last[x] == len(program.ops) - 2
    assert last[a] == len(program.ops) - 3
    assert isinstance(program.ops[-1], Logits)
    assert program.ops[-1].written() is None
    assert program.ops[-3].reads() == (a, x)


def test_head_scale_and_eps_default_to_the_spec():
    b = Builder(dataclasses.replace(SPEC, norm_eps=0.5))
    x = b.embed("e")
    b.rms_norm(x, "n")
    _layer(b, x)
    b.logits(x, "head")
    ops = b.finish().ops
    assert ops[1].eps == 0.5
    assert ops[3].eps == 0.5
    assert ops[4].scale == 0.25
