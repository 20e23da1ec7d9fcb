"""A model without weights: the next token is a hash of the tokens found in the KV cache.

It keeps a token id per KV position, as a real executor keeps keys and values, and reads the history
back through the block table. So any mistake in scheduling (a wrong block, position, slot, chunk, or
sampler state after a preemption) changes the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from cpuserve.core.step import LogitRow, RowResult, SeqChunk, StepBatch, StepResult
from cpuserve.sampling.params import SamplingParams

VOCAB = 1000
NOTHING = -1


def next_token(history: Sequence[int], seed: int, banned: Sequence[int] = ()) -> int:
    """What the model says after `history`."""
    digest = hashlib.blake2b(repr((seed, list(history))).encode(), digest_size=8).digest()
    token = int.from_bytes(digest, "little") % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def score(history: Sequence[int], token: int) -> float:
    """The logprob of `token` after `history`."""
    return -next_token([*history, token], 7) / VOCAB


def top(history: Sequence[int], num_top: int) -> list[tuple[int, float]]:
    """`num_top` alternatives after `history`."""
    ids = [next_token(history, 100 + i) for i in range(max(num_top, 0))]
    return [(i, score(history, i)) for i in ids]


def reference(
    prompt: list[int], params: SamplingParams, seed: int, limit: int, eos: Sequence[int] = ()
) -> list[int]:
    """The output of a request that has the model to itself."""
    stop = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos))
    ids, output = list(prompt), []
    while len(output) < limit:
        token = next_token(ids, seed, sorted(stop) if len(output) < params.min_tokens else ())
        ids.append(token)
        output.append(token)
        if token in stop and len(output) > params.min_tokens:
            break
    return output


class FakeModel:
    """Runs StepBatches; also the scheduler's SlotHost. Asserts all an executor would check."""

    def __init__(self, num_blocks: int, block_size: int, num_slots: int, max_tokens: int) -> None:
        self.block_size = block_size
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.kv = [[NOTHING] * block_size for _ in range(num_blocks)]
        self.slots: dict[int, tuple[SamplingParams, int, list[int], list[int], list[int]]] = {}
        self.steps = 0
        self.largest_step = 0

    def admit(self, slot, params, seed, prompt, output, stop_ids) -> None:
        assert 0 <= slot < self.num_slots
        assert slot not in self.slots, "slot admitted twice"
        self.slots[slot] = (params, seed, list(prompt), list(output), list(stop_ids))

    def release(self, slot) -> None:
        del self.slots[slot]

    def run(self, batch: StepBatch) -> StepResult:
        assert 0 < batch.num_tokens <= self.max_tokens, "token budget exceeded"
        slots = [chunk.slot for chunk in batch.chunks]
        assert len(set(slots)) == len(slots), "a slot runs twice"
        self.steps += 1
        self.largest_step = max(self.largest_step, batch.num_tokens)
        for chunk in batch.chunks:
            self._store(chunk)
        return [self._row(chunk, row) for chunk in batch.chunks for row in chunk.rows]

    def _store(self, chunk: SeqChunk) -> None:
        for position, token in enumerate(chunk.token_ids, chunk.start):
            block = chunk.block_table[position // self.block_size]
            self.kv[block][position % self.block_size] = token

    def _history(self, chunk: SeqChunk, end: int) -> list[int]:
        size = self.block_size
        return [self.kv[chunk.block_table[p // size]][p % size] for p in range(end)]

    def _row(self, chunk: SeqChunk, row: LogitRow) -> RowResult:
        history = self._history(chunk, chunk.start + row.index + 1)
        assert NOTHING not in history, "a position was never computed"
        params, seed, prompt, output, stop_ids = self.slots[chunk.slot]
        token = row.target
        if token < 0:
            assert prompt + output == history, "sampler state and KV cache disagree"
            banned = stop_ids if len(output) < params.min_tokens else ()
            token = next_token(history, seed, banned)
            output.append(token)
        if row.num_top < 0:
            return RowResult(token)
        return RowResult(token, score(history, token), 1, top(history, row.num_top))
