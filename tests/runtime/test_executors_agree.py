"""The native and the torch executor sample the same tokens from the same seeds."""

from __future__ import annotations

import numpy as np
import pytest

from cpuserve.core.step import LogitRow, StepBatch
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.runtime.executor import mask_words
from cpuserve.runtime.pack import pack
from cpuserve.runtime.torch_executor import TorchExecutor
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest
from tests.helpers.fake_executor import fake_config
from tests.helpers.steps import Sequence, step
from tests.helpers.tiny import tiny_model

_C = pytest.importorskip("cpuserve._C")

PROMPTS = [[(i * 37 + i * i * 5) % 509 for i in range(length)] for length in (1, 33, 70)]
SEEDS = [7, 7, 1 << 40]
TOKENS = 24
# Rounding moves the 512 borders between the tokens of a draw by some 1e-7 each, so one draw in 10^4
# is on the other side of a border. Of the 72 here, two are so once in 10^5 CPUs.
AT_A_BORDER = 1
VOCAB = 512


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


def drawn(executor, masks=None, texts=None):
    """Tokens of three sequences that decode together, after prompts in two chunks.

    masks: by slot; the sequence in slot 0 has none. texts: what the sequences go on with instead of
    what was drawn.
    """
    sequences = []
    for slot, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        executor.admit(slot, SlotRequest(SamplingParams(temperature=1.0), seed, prompt, [], []))
        sequences.append(Sequence(slot, list(prompt), list(range(4 * slot, 4 * slot + 4))))
        if len(prompt) > 20:
            executor.step(step(sequences[-1].chunk(20, rows=[])))
    found = []
    for at in range(TOKENS):
        rows = [LogitRow(len(s.tokens) - s.done - 1, mask=0 if s.slot else -1) for s in sequences]
        chunks = [s.chunk(rows=[row]) for s, row in zip(sequences, rows, strict=True)]
        tokens = executor.step(pack(StepBatch(chunks), masks)).tokens[: len(sequences)]
        going_on = tokens.tolist() if texts is None else texts[at]
        for sequence, token in zip(sequences, going_on, strict=True):
            sequence.tokens.append(token)
        found.append(tokens.tolist())
    executor.close()
    return found


def of_both(masks=None):
    """The tokens that the native executor draws, after a check that both draw the same."""
    from cpuserve.runtime.native import NativeExecutor

    checkpoint = open_checkpoint(tiny_model("llama"))
    program = build_program(spec_from_config(checkpoint.config))
    if masks is not None:
        masks = masks(program.vocab)[:, None]
    native = NativeExecutor(config("native"), program, checkpoint.weights, _C.Team(1, None))
    got = drawn(native, masks)
    other = drawn(TorchExecutor(config("torch"), program, checkpoint.weights), masks, got)
    pairs = zip(np.ravel(got), np.ravel(other), strict=True)
    assert sum(a != b for a, b in pairs) <= AT_A_BORDER
    return got


def test_masked_rows_draw_the_same_allowed_tokens_from_both_executors():
    rng = np.random.default_rng(5)
    few = rng.integers(-(2**31), 2**31, 3 * 4096).astype(np.int32)

    def masks(vocab):
        return few[: 3 * mask_words(vocab)].reshape(3, -1)

    got, free = of_both(masks), of_both()
    assert [tokens[0] for tokens in got] == [tokens[0] for tokens in free], "slot 0 has no mask"
    for tokens in got:
        for slot in (1, 2):
            word = few[slot * mask_words(VOCAB) + tokens[slot] // 32]
            assert int(word) >> tokens[slot] % 32 & 1
    assert any(tokens[1:] != other[1:] for tokens, other in zip(got, free, strict=True))


def test_a_seed_draws_the_same_tokens_from_both_executors():
    got = of_both()
    assert len({token for step_tokens in got for token in step_tokens}) > TOKENS, (
        "the sequences are not random"
    )
