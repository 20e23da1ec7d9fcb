"""StepBatch: the work of one forward step, from scheduler to executor.

The objects that a step makes for each sequence are msgspec.Structs,
because creating one takes less than half the time of a dataclass.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import msgspec

from cpuserve.base.ids import SlotId
from cpuserve.core.kv.table import BlockTable

SAMPLE, HIDDEN = -1, -2  # values of LogitRow.target for rows that do not score a token id


class LogitRow(msgspec.Struct):
    """A token of a step that the executor has to return a result for.

    index: index into the `token_ids` of the sequence's chunk.
    target: SAMPLE = sample a token with the slot's parameters;
      HIDDEN (embedding models) = return the hidden vector; another value = the token id to score.
    num_top: number of alternatives to report, -1 = no logprobs.
    draft: the draft token after this token, -1 = none.
      The next row belongs to the draft token, and is sampled only if this row samples `draft`.
    mask: which of the slot's bitmasks says what ids may be sampled, -1 = all ids may be.
    """

    index: int
    target: int = SAMPLE
    num_top: int = -1
    draft: int = -1
    mask: int = -1


class SeqChunk(msgspec.Struct):
    """The tokens of one sequence in this step: positions start .. start + len(token_ids) - 1.

    tables: the block table of the sequence in each cache group.
    num_drafts: how many of the last tokens are draft tokens; the rows before them verify them.
    adapter: the slot of the sequence's LoRA adapter, -1 = none.
    adapter_scale: the factor of the adapter's output.
    media: for each token, the row of the media buffer that replaces its embedding, -1 = none;
      None = no token has one.
    angles: the places of the tokens on every axis of the RoPE; None = their positions.
    """

    slot: SlotId
    token_ids: list[int]
    start: int
    tables: list[BlockTable]
    rows: list[LogitRow] = []
    num_drafts: int = 0
    adapter: int = -1
    adapter_scale: float = 1.0
    media: list[int] | None = None
    angles: list[list[int]] | None = None


@dataclass(slots=True)
class StepBatch:
    """The chunks of a step: decode rows first, then prompt chunks."""

    chunks: list[SeqChunk]

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the step."""
        return sum(len(c.token_ids) for c in self.chunks)


class RowResult(msgspec.Struct):
    """The result of one LogitRow; results are in the order of the batch's rows.

    token -1: no token could be sampled, or the row before this one rejected its draft token.
    """

    token: int
    logprob: float = 0.0
    rank: int = 0
    top: list[tuple[int, float]] = []


class VectorResult(RowResult):
    """The result of a HIDDEN row: the hidden vector, which request.pooler reads."""

    vector: object = None


StepResult = list[RowResult]


def rows_of(chunks: list[SeqChunk], results: StepResult, kept: list[int]) -> StepResult:
    """Return the results of the rows of the chunks with the numbers `kept`."""
    ends = list(accumulate((len(chunk.rows) for chunk in chunks), initial=0))
    return [row for i in kept for row in results[ends[i] : ends[i + 1]]]
