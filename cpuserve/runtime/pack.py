"""Convert StepBatch to StepArrays and StepOutputs to StepResult, fast, since each step does it."""

from __future__ import annotations

from array import array
from itertools import accumulate

import numpy as np

from cpuserve.core.step import RowResult, StepBatch, StepResult, VectorResult
from cpuserve.runtime.executor import Int32, StepArrays, StepOutputs


def pack(batch: StepBatch, masks: Int32 | None = None) -> StepArrays:
    """Return the batch as one flat block of int32 (layout: StepArrays).

    masks: one by slot, for the rows that are masked; None if no row is.

    One `array` is filled by loops in C; a numpy array per section would take longer at batch 1.
    """
    chunks = batch.chunks
    lengths = [len(c.token_ids) for c in chunks]
    groups = len(chunks[0].tables) if chunks else 1
    if groups == 1:
        tables = [c.tables[0] for c in chunks]
    else:  # the tables of windows may end earlier than others, but behind the step's tokens
        ends = [min(map(len, c.tables)) for c in chunks]
        each = range(groups)
        tables = [c.tables[g][:n] for g in each for c, n in zip(chunks, ends, strict=True)]
    sizes = [len(table) for table in tables[: len(chunks)]]
    starts = list(accumulate(lengths, initial=0))
    rows = [(starts[i] + row.index, c.slot, row) for i, c in enumerate(chunks) for row in c.rows]
    # A step of one token a sequence has no drafts; it should not pay for the search.
    drafts = starts[-1] > len(chunks) and any(c.num_drafts for c in chunks)
    adapters = [c.adapter for c in chunks]
    num_adapters = len(adapters) if max(adapters, default=-1) >= 0 else 0
    num_drafts = len(rows) if drafts else 0
    num_masks = 0 if masks is None else len(masks)
    counts = (starts[-1], len(chunks), len(rows), sum(sizes))
    words = array("i", (*counts, num_masks, num_adapters, groups - 1, num_drafts))
    for c in chunks:
        words.extend(c.token_ids)
    for c, n in zip(chunks, lengths, strict=True):
        words.extend(range(c.start, c.start + n))
    words.extend(starts)
    words.extend([c.start + n for c, n in zip(chunks, lengths, strict=True)])
    words.extend(accumulate(sizes, initial=0))
    for table in tables:
        words.extend(table)
    if num_adapters:
        words.extend(adapters)
    words.extend([token for token, _, _ in rows])
    words.extend([slot for _, slot, _ in rows])
    words.extend([row.target for _, _, row in rows])
    words.extend([row.num_top for _, _, row in rows])
    if drafts:
        words.extend([row.draft for _, _, row in rows])
    if num_masks:
        words.extend([slot if row.masked else -1 for _, slot, row in rows])
    return StepArrays(np.frombuffer(words, np.int32), masks)


def unpack(outputs: StepOutputs, batch: StepBatch) -> StepResult:
    """Return the results of the batch's logit rows, in order, as plain Python numbers."""
    wanted = [row.num_top for c in batch.chunks for row in c.rows]
    if outputs.vectors is not None:
        return [VectorResult(0, vector=row) for row in outputs.vectors[: len(wanted)].copy()]
    tokens = outputs.tokens[: len(wanted)].tolist()
    if not wanted or max(wanted) < 0:
        return [RowResult(token) for token in tokens]
    logprobs = outputs.logprobs[: len(wanted)].tolist()
    ranks = outputs.ranks[: len(wanted)].tolist()
    result = [
        RowResult(token) if top < 0 else RowResult(token, logprob, rank)
        for token, logprob, rank, top in zip(tokens, logprobs, ranks, wanted, strict=True)
    ]
    for i, top in enumerate(wanted):
        if top > 0:
            ids = outputs.top_ids[i, :top].tolist()
            result[i].top = list(zip(ids, outputs.top_logprobs[i, :top].tolist(), strict=True))
    return result
