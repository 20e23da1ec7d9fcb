"""TorchExecutor: the Executor protocol on the Interpreter."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from cpuserve.core.step import LogitRow
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.quant import dequantize
from cpuserve.quant.base import QuantTensor
from cpuserve.runtime.executor import StepArrays
from cpuserve.runtime.torch_executor import TorchExecutor, as_torch
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest
from tests.helpers.fake_executor import fake_config
from tests.helpers.op_compare import compare
from tests.helpers.oracle import interpreter_of, precise_torch, transformers_logits
from tests.helpers.rounding import assert_likeliest, largest, model_bound
from tests.helpers.steps import Sequence, all_rows, step
from tests.helpers.tiny import tiny_model

TOKENS = [(i * 31 + 11) % 509 for i in range(40)]


def torch_executor(path, **changes):
    config = fake_config(max_num_batched_tokens=64, block_size=32, kv_blocks=16, **changes)
    checkpoint = open_checkpoint(path)
    seen = []
    executor = TorchExecutor(
        config,
        build_program(spec_from_config(checkpoint.config)),
        checkpoint.weights,
        lambda *progress: seen.append(progress),
    )
    size = (path / "model.safetensors").stat().st_size
    assert seen[-1] == ("load", size - _header_bytes(path), size - _header_bytes(path))
    return executor


def _header_bytes(path):
    with (path / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@pytest.mark.parametrize("family", ["qwen2", "opt-350m"])
def test_greedy_generation_is_that_of_transformers(family):
    path = tiny_model(family)
    executor, sequence = torch_executor(path), Sequence(3, list(TOKENS), [4, 9])
    executor.admit(3, SlotRequest(SamplingParams(temperature=0), 0, TOKENS, [], []))
    for _ in range(8):
        out = executor.step(step(sequence.chunk()))
        sequence.tokens.append(int(out.tokens[0]))
    logits = transformers_logits(path, sequence.tokens)[len(TOKENS) - 1 : -1]
    assert_likeliest(sequence.tokens[len(TOKENS) :], logits, model_bound(path, 48))
    executor.close()


def test_targets_are_scored_and_alternatives_listed():
    path = tiny_model("llama")
    executor = torch_executor(path)
    rows = [LogitRow(i, target=TOKENS[i + 1], num_top=3) for i in range(39)]
    out = executor.step(step(Sequence(0, list(TOKENS), [1, 2]).chunk(None, rows)))
    logits = transformers_logits(path, TOKENS)[:39]
    room = 2 * model_bound(path, 40) * largest(logits)  # of a logit, less that of all
    logprobs = logits.log_softmax(dim=1)
    assert out.tokens.tolist() == TOKENS[1:]
    expected = logprobs[torch.arange(39), torch.tensor(TOKENS[1:])]
    np.testing.assert_allclose(out.logprobs, expected, rtol=0, atol=room)
    top = logprobs.gather(1, torch.from_numpy(out.top_ids[:, :3]).long())
    torch.testing.assert_close(top, logprobs.topk(3).values, atol=room, rtol=0)
    assert all(len(set(ids)) == 3 for ids in out.top_ids[:, :3].tolist())
    least, most = ((logprobs > (expected + off)[:, None]).sum(dim=1) + 1 for off in (room, -room))
    ranks = torch.from_numpy(out.ranks)
    assert bool(((least <= ranks) & (ranks <= most)).all())


def test_a_slot_that_comes_back_after_preemption_continues_as_before():
    path = tiny_model("qwen3")
    params = SamplingParams(temperature=0.9, top_k=20, presence_penalty=1.0, min_tokens=6)

    def run(preempt_after):
        with precise_torch():
            executor, sequence = torch_executor(path), Sequence(0, list(TOKENS), [0, 1])
        executor.admit(0, SlotRequest(params, 77, TOKENS, [], [5, 6]))
        for i in range(8):
            if i == preempt_after:
                executor.release(0)
                executor.admit(2, SlotRequest(params, 77, TOKENS, sequence.tokens[40:], [5, 6]))
                sequence = Sequence(2, sequence.tokens, [7, 3])
            sequence.tokens.append(int(executor.step(step(sequence.chunk())).tokens[0]))
        return sequence.tokens

    assert run(4) == run(None)


def test_a_step_that_cannot_be_is_refused_before_it_runs():
    executor = torch_executor(tiny_model("llama"))
    executor.admit(0, SlotRequest(SamplingParams(), 0, [], [], []))
    good = step(Sequence(0, [1, 2], [0]).chunk())
    cases = {
        "not admitted": step(Sequence(1, [1, 2], [0]).chunk()),
        "too large": step(Sequence(0, [1] * 65, [0, 1, 2]).chunk()),
        "alternatives": step(Sequence(0, [1], [0]).chunk(None, [LogitRow(0, num_top=21)])),
        "block id": step(Sequence(0, [1], [16]).chunk()),
        "header": StepArrays(good.words[:-1]),
    }
    for message, arrays in cases.items():
        with pytest.raises(ValueError, match=message):
            executor.step(arrays)
    assert len(executor.step(good).tokens) == 1


def test_its_taps_agree_with_the_interpreter():
    path = tiny_model("mistral")
    arrays = step(Sequence(0, list(TOKENS), [1, 2]).chunk(None, all_rows(40)))
    assert compare(torch_executor(path), interpreter_of(path), arrays) is None


def test_sixteen_bit_weights_stay_sixteen_bit_and_compute_in_fp32():
    path = tiny_model("llama", dtype="bfloat16")
    executor = torch_executor(path)
    stored = executor._interpreter._tensors["lm_head.weight"]
    assert stored.dtype == torch.bfloat16
    arrays = step(Sequence(0, list(TOKENS), [1, 2]).chunk())
    got = executor._interpreter.run(arrays)[0]
    expected = transformers_logits(path, TOKENS)[-1]
    bound = model_bound(path, len(TOKENS)) * largest(expected)
    torch.testing.assert_close(got, expected, atol=bound, rtol=0)


BLOCKS = {"gguf_q8_0": 34, "gguf_q4_0": 18, "gguf_q4_1": 20}


@pytest.mark.parametrize("source", BLOCKS)
@pytest.mark.parametrize("permuted", [False, True], ids=["plain", "row-order"])
def test_quantized_tensors_become_the_weights_the_format_says(source, permuted):
    stream = np.random.default_rng(0)
    data = stream.integers(0, 256, (6, 3 * BLOCKS[source]), np.uint8)
    blocks = data.reshape(6, 3, -1)
    blocks[:, :, 1] &= 0x3F  # finite scales
    blocks[:, :, 3] &= 0x3F
    order = np.array([3, 1, 0, 5, 4, 2], np.int32) if permuted else None
    tensor = QuantTensor("w", (6, 96), source, data, order)
    got = as_torch(tensor).rows(slice(None)).numpy()
    np.testing.assert_allclose(got, dequantize(tensor), rtol=1e-6, atol=1e-6)
    if permuted:
        plain = dataclasses.replace(tensor, row_order=None)
        assert np.array_equal(as_torch(plain).rows(slice(None)).numpy()[order], got)


def test_blocks_moved_by_their_bytes_and_a_cancelled_step():
    path = tiny_model("llama")
    executor = torch_executor(path)
    executor.admit(0, SlotRequest(SamplingParams(temperature=0), 0, TOKENS, [], []))
    want = executor.step(step(Sequence(0, list(TOKENS), [4, 9]).chunk())).tokens.tolist()
    data = executor.read_blocks(np.array([4, 9], np.int32))
    assert data.shape == (2, executor.kv_block_bytes)
    other = torch_executor(path)
    other.admit(0, SlotRequest(SamplingParams(temperature=0), 0, TOKENS, [], []))
    other.write_blocks(np.array([7, 3], np.int32), data)
    last = Sequence(0, list(TOKENS), [7, 3], done=len(TOKENS) - 1)
    assert other.step(step(last.chunk())).tokens.tolist() == want
    with pytest.raises(ValueError, match="there is no KV block 16"):
        other.read_blocks(np.array([16], np.int32))
    with pytest.raises(ValueError, match="are wanted"):
        other.write_blocks(np.array([1], np.int32), data)
    other.cancel()
    with pytest.raises(RuntimeError, match="cancelled"):
        other.step(step(Sequence(0, list(TOKENS), [1, 2]).chunk()))
    other.cancel(on=False)
    assert other.step(step(Sequence(0, list(TOKENS), [1, 2]).chunk())).tokens.tolist() == want
