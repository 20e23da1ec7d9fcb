"""The native and the torch executor sample the same tokens from the same seeds."""

from __future__ import annotations

import pytest

from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.runtime.torch_executor import TorchExecutor
from cpuserve.sampling.params import SamplingParams
from tests.helpers.fake_executor import fake_config
from tests.helpers.steps import Sequence, step
from tests.helpers.tiny import tiny_model

_C = pytest.importorskip("cpuserve._C")

PROMPTS = [[(i * 37 + i * i * 5) % 509 for i in range(length)] for length in (1, 33, 70)]
SEEDS = [7, 7, 1 << 40]
TOKENS = 24


def config(executor):
    return fake_config(
        max_num_batched_tokens=128,
        block_size=32,
        kv_blocks=16,
        max_model_len=128,
        dtype="float32",
        kv_dtype="f32",
        isa=_C.isa_levels()[-1],
        executor=executor,
    )


def drawn(executor):
    """Tokens of three sequences that decode together, after prompts in two chunks."""
    sequences = []
    for slot, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        executor.admit(slot, SamplingParams(temperature=1.0), seed, prompt, [], [])
        sequences.append(Sequence(slot, list(prompt), list(range(4 * slot, 4 * slot + 4))))
        if len(prompt) > 20:
            executor.step(step(sequences[-1].chunk(20, rows=[])))
    found = []
    for _ in range(TOKENS):
        tokens = executor.step(step(*[s.chunk() for s in sequences])).tokens[: len(sequences)]
        for sequence, token in zip(sequences, tokens.tolist(), strict=True):
            sequence.tokens.append(token)
        found.append(tokens.tolist())
    executor.close()
    return found


def test_a_seed_draws_the_same_tokens_from_both_executors():
    from cpuserve.runtime.native import NativeExecutor

    checkpoint = open_checkpoint(tiny_model("llama"))
    program = build_program(spec_from_config(checkpoint.config))
    native = NativeExecutor(config("native"), program, checkpoint.weights, _C.Team(1, None))
    got = drawn(native)
    assert got == drawn(TorchExecutor(config("torch"), program, checkpoint.weights))
    assert len({token for step_tokens in got for token in step_tokens}) > TOKENS, (
        "the sequences are not random"
    )
