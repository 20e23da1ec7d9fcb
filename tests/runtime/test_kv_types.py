"""Every data type of the KV cache: the native executor compared with the Interpreter.

A prompt in uneven chunks, a second sequence that begins in the first one's blocks (a prefix hit),
and both decoding together; each token's log-probability, from whole forward steps.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cpuserve import _C
from cpuserve.core.step import LogitRow
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.interpret import Interpreter
from cpuserve.program.view import view
from cpuserve.runtime.torch_executor import TorchExecutor, load_tensors
from tests.helpers.depth import deep_but
from tests.helpers.fake_executor import fake_config
from tests.helpers.rounding import model_bound
from tests.helpers.steps import Sequence, step
from tests.helpers.tiny import tiny_model

# Nats a token, root mean square, between two ways to compute the same thing / that 8 bits cost.
SAME = {"f32": 5e-6, "f16": 1e-4, "bf16": 1e-3, "int8": 1.5e-3, "fp8_e4m3": 2e-3, "int8_v4": 5e-3}
COST = {"f32": 2e-5, "f16": 1e-3, "bf16": 8e-3, "int8": 2.5e-2, "fp8_e4m3": 0.1, "int8_v4": 0.15}
CASES = [("llama", {}), ("mistral", {}), ("qwen3", {}), ("opt", {})]
# Without experts, because rounding may change which ones are chosen.
CASES += [
    ("deepseek-v2", {"first_k_dense_replace": 3}),
    ("deepseek-v3", {"first_k_dense_replace": 3, "kv_lora_rank": 512, "qk_rope_head_dim": 64}),
]
CASES += [("qwen3", {"head_dim": size}) for size in (64, 80, 96, 128)]
TOKENS = [(i * 37 + i * i * 5) % 509 for i in range(330)]


def config_of(kv_type, executor="native"):
    return fake_config(
        max_num_batched_tokens=300,
        block_size=32,
        kv_blocks=32,
        max_model_len=400,
        dtype="float32",
        kv_dtype=kv_type,
        isa=_C.isa_levels()[-1],
        executor=executor,
    )


def steps():
    """Return the packed steps, with a logit row for every token that is predicted."""
    first = Sequence(0, TOKENS, list(range(1, 12)))
    second = Sequence(1, TOKENS[:64] + TOKENS[200:250], [1, 2, 20, 21], done=64)

    def scored(sequence, length):
        ids = [*sequence.tokens, 0][sequence.done + 1 : sequence.done + 1 + length]
        return sequence.chunk(length, [LogitRow(i, target=t, num_top=0) for i, t in enumerate(ids)])

    for length in (33, 64, 170, 7):
        yield step(scored(first, length))
    yield step(scored(second, 9), scored(first, 40))
    for _ in range(3):
        yield step(scored(first, 1), scored(second, 1))


def logprobs(run):
    """Return the log-probabilities of all targets; `run` returns those of one step."""
    return np.concatenate([run(arrays) for arrays in steps()])


def interpreted(program, weights, kv_type, mode):
    oracle = Interpreter(
        program, load_tensors(program, weights), mode=mode, kv_dtype=kv_type, num_blocks=32
    )

    def run(arrays):
        targets = torch.from_numpy(view(arrays).row_target).long()
        return torch.log_softmax(oracle.run(arrays), 1).gather(1, targets[:, None])[:, 0].numpy()

    return logprobs(run)


def executed(executor):
    def run(arrays):
        return executor.step(arrays).logprobs[: len(view(arrays).row_target)].copy()

    found = logprobs(run)
    executor.close()
    return found


def rms(x):
    return float(np.sqrt(np.mean(np.square(x))))


@pytest.mark.matrix
@pytest.mark.parametrize("kv_type", SAME)
@pytest.mark.parametrize(("family", "shape"), CASES, ids=str)
def test_chunks_and_prefix_hits_agree_with_the_interpreter(family, shape, kv_type):
    from cpuserve.runtime.native import NativeExecutor

    checkpoint = open_checkpoint(tiny_model(family, **shape))
    program = build_program(spec_from_config(checkpoint.config))
    native = NativeExecutor(config_of(kv_type), program, checkpoint.weights, _C.Team(1, None))
    got = executed(native)
    emulated = interpreted(program, checkpoint.weights, kv_type, "emulated")
    exact = interpreted(program, checkpoint.weights, "f32", "reference")
    assert np.isfinite(got).all()
    assert rms(got - emulated) <= SAME[kv_type]
    assert rms(got - exact) <= COST[kv_type]


@pytest.mark.parametrize("kv_type", deep_but(["bf16", "int8", "int8_v4"], SAME))
def test_the_torch_executor_keeps_the_type_asked(kv_type):
    checkpoint = open_checkpoint(tiny_model("qwen3"))
    program = build_program(spec_from_config(checkpoint.config))
    on_torch = TorchExecutor(config_of(kv_type, "torch"), program, checkpoint.weights)
    element = {"f32": 4, "f16": 2, "bf16": 2}.get(kv_type, 1)
    layers, heads, width = len(program.cache), program.cache[0].heads, 32
    scales = 4 if element == 1 else 0
    assert on_torch.kv_block_bytes == 2 * 32 * layers * heads * (width * element + scales)
    got = executed(on_torch)
    exact = interpreted(program, checkpoint.weights, "f32", "reference")
    assert rms(got - exact) <= COST[kv_type]
    assert (rms(got - exact) < 1e-5) == (kv_type == "f32")


@pytest.mark.parametrize("kv_type", SAME)
def test_blocks_of_the_torch_executor_move_with_all_they_hold(kv_type):
    checkpoint = open_checkpoint(tiny_model("qwen3"))
    program = build_program(spec_from_config(checkpoint.config))
    on_torch = TorchExecutor(config_of(kv_type, "torch"), program, checkpoint.weights)
    start = Sequence(0, TOKENS[:65], [3, 4, 5])
    on_torch.step(step(start.chunk(64, [LogitRow(0, target=1, num_top=0)])))
    on_torch.write_blocks(
        np.array([8, 9], np.int32), on_torch.read_blocks(np.array([3, 4], np.int32))
    )
    moved = Sequence(0, TOKENS[:65], [8, 9, 10], done=64)
    row = [LogitRow(0, target=1, num_top=0)]
    want, got = (float(on_torch.step(step(s.chunk(1, row))).logprobs[0]) for s in (start, moved))
    room = 2 * model_bound(tiny_model("qwen3"), 65) * abs(want)
    assert got == pytest.approx(want, abs=room)  # torch promises no bits
