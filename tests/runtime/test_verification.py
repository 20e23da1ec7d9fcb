"""Rows that verify drafts give what steps of one token give, in the executors that run on torch.

tests/cpp/test_executor.cpp shows it for the native executor, and tests/llm/test_speculation.py
for whole engines.
"""

from __future__ import annotations

import numpy as np
import pytest

from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import LogitRow, SeqChunk, StepBatch
from cpuserve.loader.load import open_checkpoint
from cpuserve.models import build_program, spec_from_config
from cpuserve.program.view import check_step, view
from cpuserve.runtime.executor import StepArrays
from cpuserve.runtime.pack import pack, unpack
from cpuserve.runtime.torch_executor import TorchExecutor
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest
from tests.helpers.depth import deep_but
from tests.helpers.fake_executor import fake_config
from tests.helpers.oracle import precise_torch
from tests.helpers.rounding import UNIT32
from tests.helpers.tiny import tiny_model

PROMPT = [(i * 31 + 11) % 509 for i in range(40)]
STOPS = list(range(100, 400))
PARAMS = [
    SamplingParams(temperature=0, presence_penalty=1.0, repetition_penalty=1.3),
    SamplingParams(temperature=0.8, top_k=40, frequency_penalty=0.5, min_tokens=9, logprobs=2),
]


def verifying(ids, drafts, blocks=(3, 1, 2)):
    """The chunk of the last of `ids`, and drafts behind it."""
    rows = [LogitRow(i, num_top=2, draft=draft) for i, draft in enumerate([*drafts, -1])]
    tables = [BlockTable(blocks)]
    return SeqChunk(0, [ids[-1], *drafts], len(ids) - 1, tables, rows, len(drafts))


@pytest.fixture(scope="module")
def executor():
    config = fake_config(max_num_batched_tokens=64, block_size=32, kv_blocks=16)
    checkpoint = open_checkpoint(tiny_model("llama"))
    program = build_program(spec_from_config(checkpoint.config))
    with precise_torch():
        made = TorchExecutor(config, program, checkpoint.weights, None)
    yield made
    made.close()


def answer(executor, params, truth, drafts, wrong):
    """20 tokens and their alternatives, with `drafts` of `truth` a step, some of them wrong."""
    executor.admit(0, SlotRequest(params, 5, PROMPT, [], STOPS))
    executor.step(pack(StepBatch([SeqChunk(0, PROMPT[:-1], 0, [BlockTable([3, 1, 2])], [])])))
    ids, found = list(PROMPT), []
    while len(found) < 20:
        guess = [row.token for row in truth[len(found) : len(found) + drafts]]
        if wrong:
            guess = [t ^ (i % wrong == 0) for i, t in enumerate(guess, len(found))]
        batch = StepBatch([verifying(ids, guess)])
        arrays = pack(batch)
        rows = unpack(executor.step(arrays), arrays.tops)
        right = sum(row.token >= 0 for row in rows)
        assert all(row.token == -1 for row in rows[right:])
        assert [row.token for row in rows[: right - 1]] == guess[: right - 1]
        assert right == len(rows) or rows[right - 1].token != guess[right - 1]
        found += rows[:right]
        ids += [row.token for row in rows[:right]]
    executor.release(0)
    return found[:20]


@pytest.mark.parametrize("params", deep_but(PARAMS[1:], PARAMS), ids=["greedy", "sampled"])
def test_torch_verifies_with_the_state_that_single_tokens_would_have(executor, params):
    truth = answer(executor, params, [], 0, 0)
    for drafts, wrong in ((1, 0), (6, 0), (6, 4), (5, 1)):
        rows = answer(executor, params, truth, drafts, wrong)
        assert [row.token for row in rows] == [row.token for row in truth]
        found, expected = ([row.logprob for row in of] for of in (rows, truth))
        # Logits in fp64, and of their logprobs one rounding to fp32.
        np.testing.assert_allclose(found, expected, rtol=4 * UNIT32, atol=0)


def test_drafts_are_a_section_of_their_own_only_where_there_are_any():
    ids = [5, 6, 7]
    chunks = [SeqChunk(1, [9], 4, [BlockTable([0])], [LogitRow(0)]), verifying(ids, [8, 4])]
    words = pack(StepBatch(chunks)).words
    assert words[:8].tolist() == [4, 2, 4, 4, 0, 0, 0, 4]
    step = view(StepArrays(words))
    assert step.row_token.tolist() == [0, 1, 2, 3]
    assert step.row_draft.tolist() == [-1, 8, 4, -1]
    assert [step.draft(row) for row in range(4)] == [-1, 8, 4, -1]
    plain = view(pack(StepBatch(chunks[:1])))
    assert len(plain.row_draft) == 0
    assert plain.draft(0) == -1


@pytest.mark.parametrize(
    ("field", "index", "value"),
    [
        ("row_draft", 0, 9),
        ("row_draft", 2, 4),
        ("row_slot", 1, 3),
        ("row_target", 1, 3),
        ("row_target", 0, 3),
        ("row_token", 1, 2),
        ("token_ids", 1, 3),
        ("query_start", 1, 1),
    ],
)
def test_a_draft_that_the_next_row_does_not_follow_is_refused(field, index, value):
    other = SeqChunk(1, [9], 4, [BlockTable([0])], [])
    step = view(StepArrays(pack(StepBatch([verifying([5, 6, 7], [8, 4]), other])).words.copy()))
    check_step(step, vocab=10, num_blocks=9, block=32)
    getattr(step, field)[index] = value
    if field == "query_start":  # the drafts belong to the next sequence
        step.kv_len[:] = 3, 3
        step.positions[:] = 2, 0, 1, 2
    with pytest.raises(ValueError, match=r"has a draft that the next row does not follow"):
        check_step(step, vocab=10, num_blocks=9, block=32)


def test_a_draft_count_other_than_all_rows_or_none_does_not_match_the_header():
    words = pack(StepBatch([verifying([5, 6, 7], [8, 4])])).words.copy()
    words[7] = 2
    with pytest.raises(ValueError, match="does not match its header"):
        view(StepArrays(words[:-1]))
