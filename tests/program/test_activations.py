"""Every activation of the type `Then` is computed by both executors, in each kind of operation."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from cpuserve import _C
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.interpret import Interpreter
from cpuserve.program.ops import Then, split_then
from cpuserve.runtime.native import NativeExecutor
from cpuserve.runtime.torch_executor import load_tensors
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest
from tests.helpers.fake_executor import fake_config
from tests.helpers.op_compare import compare
from tests.helpers.oracle import first_state
from tests.helpers.tiny import tiny_model
from tests.program.test_native_ops import mixed_steps

SOURCES = Path(__file__).parents[2] / "csrc"
ACTIVATIONS = get_args(Then)
# (family, whether its activations have a gate, the kind of operation that computes them)
CASES = [
    ("llama", True, "Linear"),
    ("mixtral", True, "ExpertLinear"),
    ("falcon-h1", True, "ActivationOp"),
    ("arcee", False, "Linear"),
    ("nemotron-h-moe", False, "ExpertLinear"),
]


def with_activation(program, then):
    """Return `program` with this activation in place of the model's, and the kinds of its ops."""
    changed = []

    def other(op):
        own = getattr(op, "then", "none")
        if own == "none" or split_then(own)[1] != split_then(then)[1]:
            return op
        changed.append(type(op).__name__)
        return msgspec.structs.replace(op, then=then)

    return dataclasses.replace(program, ops=tuple(map(other, program.ops))), changed


def outputs(program, weights):
    """Return (the first difference of both executors, or None; the bytes before the head)."""
    config = fake_config(
        max_num_batched_tokens=300,
        block_size=32,
        kv_blocks=16,
        max_model_len=400,
        kv_dtype="f32",
        isa=_C.isa_levels()[-1],
        executor="native",
        state_slots=16,
    )
    native = NativeExecutor(config, program, weights, _C.Team(1, None))
    for slot in (0, 1):
        native.admit(slot, SlotRequest(SamplingParams(temperature=0), 0, [], [], []))
    matrices = [need.name for need in program.weights if need.role == "matrix"]
    oracle = Interpreter(
        program,
        load_tensors(program, weights),
        mode="emulated",
        kinds={name: weights.kind(name, "float32") for name in matrices},
        kv_dtype="f32",
        num_blocks=16,
        num_states=16 if program.states else 0,
    )
    arrays = next(mixed_steps(20, first_state(oracle)))
    difference = compare(native, oracle, arrays, native.lowered.source_op)
    _, rows = native.tap(arrays, len(native.lowered.source_op) - 2)
    vectors = rows.tobytes()
    native.close()
    return difference, vectors


@pytest.mark.parametrize(("family", "gated", "kind"), CASES, ids=[case[0] for case in CASES])
def test_each_activation_is_computed_by_both_executors(family, gated, kind):
    checkpoint = open_checkpoint(tiny_model(family, dtype="float32"))
    program = build_program(spec_from_config(checkpoint.config))
    found = {}
    for then in ACTIVATIONS:
        if split_then(then)[1] == gated:
            changed, kinds = with_activation(program, then)
            assert kind in kinds
            difference, found[then] = outputs(changed, checkpoint.weights)
            assert difference is None, f"{then}: {difference}"
    assert len(set(found.values())) == len(found), "each gives other results"


def test_the_executors_have_the_same_activations():
    header = (SOURCES / "kernels" / "table" / "linear.h").read_text()
    table = re.search(r"define CPUSERVE_ACTIVATIONS\(X\)(.*?)enum", header, re.DOTALL)[1]
    assert {split_then(then)[0] for then in ACTIVATIONS} == {*re.findall(r"X\((\w+), \w+\)", table)}
