"""Logits of a checkpoint: by the native executor, and by the interpreter in fp32."""

from __future__ import annotations

import numpy as np
import torch

from cpuserve import _C
from cpuserve.core.step import LogitRow
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.interpret import Interpreter
from cpuserve.program.lower import Lowering
from cpuserve.quant import dequantize
from cpuserve.runtime.mapped_files import MappedFiles
from cpuserve.runtime.native import fill_vectors, is_mapped, pack_matrices
from tests.helpers.steps import Sequence, all_rows, step

TOKENS = [(i * 37 + i * i * 5) % 96 for i in range(70)]


def program_of(checkpoint):
    return build_program(spec_from_config(checkpoint.config))


def native_logits(
    checkpoint, isa, sizes, bits=16, ranks=(), dtype="float32", mapped=False, threads=2
):
    """Logits of every token, which come in steps of `sizes`, and the lowered program.

    ranks: the number of threads of each; one rank by default. mapped: rows of tables are looked up
    in their files.
    """
    program = program_of(checkpoint)
    lowered = Lowering(
        program,
        lambda name: checkpoint.weights.kind(name, dtype),
        isa=isa,
        max_tokens=128,
        max_seqs=2,
        max_position=256,
        kv_type="f32",
        activation_bits=bits,
        order_of=lambda name: checkpoint.weights.get(name).column_order,
        is_mapped=lambda name: mapped and is_mapped(checkpoint.weights.get(name)),
    ).run()
    team, out = _C.Team(threads, ranks=ranks), []

    def main():
        executor = _C.Executor(team, lowered.native, 8, "f32", 2)
        pack_matrices(executor, lowered, checkpoint.weights, None)
        MappedFiles(None).load_tables(executor, lowered, checkpoint.weights)
        fill_vectors(executor, lowered, checkpoint.weights)
        sequence = Sequence(0, TOKENS, [5, 2, 7])
        for size in sizes:
            rows = [LogitRow(i, target=1) for i in range(size)]
            out.append(executor.step_logits(step(sequence.chunk(size, rows)).words))

    team.run(main)
    return np.concatenate(out), lowered


def exact_logits(checkpoint):
    """Logits of every token of the same weights in fp32."""
    program, weights = program_of(checkpoint), checkpoint.weights
    tensors = {
        need.name: torch.from_numpy(dequantize(weights.get(need.name)).reshape(need.shape))
        for need in program.weights
    }
    interpreter = Interpreter(program, tensors, num_blocks=8)
    arrays = step(Sequence(0, TOKENS, [5, 2, 7]).chunk(None, all_rows(len(TOKENS))))
    with torch.inference_mode():
        return interpreter.logits(interpreter.hidden(arrays)).numpy()
