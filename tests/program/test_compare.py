"""Op-by-op comparison: no difference for a correct executor, else the first op that is wrong."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cpuserve.program.operations.attention import Attention, RopeStoreKV
from cpuserve.program.operations.dense import Linear, Logits
from cpuserve.program.operations.experts import Combine
from cpuserve.program.operations.norms import RmsNorm
from cpuserve.program.reference.quantized import GROUP, quantize_rows
from tests.helpers.op_compare import compare, stored_format
from tests.helpers.oracle import interpreter_of, program_of
from tests.helpers.steps import Sequence, all_rows, step
from tests.helpers.tiny import tiny_model

TOKENS = [(i * 31 + 11) % 509 for i in range(45)]


class Lowered:
    """A fake native executor: it has a convert op, stores values in row formats and pads q."""

    def __init__(self, interpreter, damage=None):
        self.interpreter = interpreter
        self.damage = damage or {}
        ops = interpreter.program.ops
        # A convert op precedes the first linear, as for a value whose readers need two formats.
        self.source_op = sorted([*range(len(ops)), 2])
        assert isinstance(ops[2], Linear)

    def tap(self, arrays, index):
        origin = self.source_op[index]
        values = self._values_before(arrays, origin)
        if index == 2:  # the convert
            return [_numpy(values[0])], _numpy(self._stored(values[0], "bf16"))
        op = self.interpreter.program.ops[origin]
        out = self._run(origin, values)
        if isinstance(op, RopeStoreKV):
            return [_numpy(values[0])], _padded_q(out, op)
        if isinstance(op, Attention):
            return [_padded_q(values[0], op)], _numpy(out)
        return [_numpy(v) for v in values], _numpy(out)

    def _values_before(self, arrays, origin):
        """Like Interpreter.run_to, with the rounding of this executor and its injected fault."""
        self.interpreter.begin(arrays)
        values = {}
        for i, op in enumerate(self.interpreter.program.ops[:origin]):
            values[op.written()] = self._run(i, [values[v] for v in op.reads()])
        return [values[v] for v in self.interpreter.program.ops[origin].reads()]

    def _run(self, index, inputs):
        program, kinds = self.interpreter.program, self.interpreter.kinds
        out = self.interpreter.run_op(index, inputs)
        out = self.damage.get(index, lambda x: x)(out.clone())
        target = program.ops[index].written()
        if target is None or isinstance(program.ops[index], RopeStoreKV):
            return out
        return self._stored(out, stored_format(program, kinds, target))

    @staticmethod
    def _stored(x, fmt):
        if fmt == "q8g32":
            q, scale, _ = quantize_rows(x, GROUP)
            return (q * scale[..., None]).reshape(len(x), -1)[:, : x.shape[1]]
        return x.bfloat16().float() if fmt == "bf16" else x


def _numpy(x):
    return x.float().numpy().copy()


def _padded_q(x, op):
    q = _numpy(x[:, : op.q_heads * op.head_dim]).reshape(len(x), op.q_heads, op.head_dim)
    padding = (0, -op.head_dim % 16)
    return np.pad(q, ((0, 0), (0, 0), padding)).reshape(len(x), -1)


def emulated(kind, kv):
    path = tiny_model("llama", head_dim=24)
    matrices = [need.name for need in program_of(path).weights if need.role == "matrix"]
    kinds = dict.fromkeys(matrices, kind)
    return interpreter_of(path, mode="emulated", kinds=kinds, kv_dtype=kv)


def steps():
    sequence = Sequence(0, list(TOKENS), [2, 5])
    return [step(sequence.chunk(40, all_rows(40))), step(sequence.chunk())]


@pytest.mark.parametrize(("kind", "kv"), [("dense_f32", "f32"), ("dense_bf16", "bf16")])
def test_an_honest_executor_does_not_differ_in_any_step(kind, kv):
    executor, interpreter = Lowered(emulated(kind, kv)), emulated(kind, kv)
    for arrays in steps():
        assert compare(executor, interpreter, arrays, executor.source_op) is None


def spoil_one(x):
    x[7, 3] += 0.02 * x.abs().max()
    return x


def indices(kind_of_op):
    ops = program_of(tiny_model("llama", head_dim=24)).ops
    return [i for i, op in enumerate(ops) if isinstance(op, kind_of_op)]


@pytest.mark.parametrize("kind", [RmsNorm, Linear, RopeStoreKV, Attention, Logits])
def test_the_first_wrong_op_is_named_though_all_later_ones_suffer(kind):
    wrong = indices(kind)[-1]
    executor = Lowered(emulated("dense_bf16", "bf16"), {wrong: spoil_one})
    found = compare(executor, emulated("dense_bf16", "bf16"), steps()[0], executor.source_op)
    assert found is not None
    assert (found.op_index, found.row, found.column) == (wrong, 7, 3)
    assert kind.__name__ in str(found)
    assert "differs at [7, 3]" in str(found)


def test_a_nan_is_a_difference():
    def poison(x):
        x[0, 0] = torch.nan
        return x

    executor = Lowered(emulated("dense_f32", "f32"), {1: poison})
    found = compare(executor, emulated("dense_f32", "f32"), steps()[0], executor.source_op)
    assert found is not None
    assert found.op_index == 1


def test_a_program_op_that_lowering_lost_is_an_error():
    executor = Lowered(emulated("dense_f32", "f32"))
    with pytest.raises(ValueError, match=r"op 18 \(Logits\) has no op in the executor"):
        compare(executor, executor.interpreter, steps()[0], executor.source_op[:-1])


@pytest.mark.parametrize(
    ("kind", "bits", "rows"),
    [
        ("dense_bf16", 8, "bf16"),
        ("w8_g32", 8, "bf16"),
        ("w8_g32", 16, "f32"),
        ("dense_f32", 8, "f32"),
    ],
)
def test_results_of_experts_are_added_from_bf16_unless_their_activations_are_more_precise(
    kind, bits, rows
):
    program = program_of(tiny_model("qwen3-moe"))
    kinds = {n.name: kind for n in program.weights if n.role == "matrix"}
    combine = next(op for op in program.ops if isinstance(op, Combine))
    assert stored_format(program, kinds, combine.x, bits) == rows


def test_stored_formats_follow_the_readers():
    program = program_of(tiny_model("llama"))
    kinds = {n.name: "w4_g32" for n in program.weights if n.role == "matrix"}
    kinds["model.layers.1.self_attn.k_proj.weight"] = "w8_g32"  # the same row format
    kinds["model.layers.1.mlp.gate_proj.weight"] = "dense_bf16"  # and another one
    norms = [op for op in program.ops if isinstance(op, RmsNorm)]
    formats = [stored_format(program, kinds, op.out) for op in norms]
    assert formats == ["q8g32", "q8g32", "q8g32", "f32", "q8g32"]
    assert stored_format(program, kinds, program.ops[0].out) == "f32"
