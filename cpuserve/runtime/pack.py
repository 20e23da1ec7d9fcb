"""Convert a StepBatch to StepArrays, and StepOutputs to a StepResult. Every step does both."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from cpuserve.base.ids import BlockId
from cpuserve.core.step import RowResult, SeqChunk, StepBatch, StepResult, VectorResult
from cpuserve.runtime.executor import Int32, StepArrays, StepOutputs


def pack(batch: StepBatch, masks: Int32 | None = None) -> StepArrays:
    """Return the batch as one flat int32 array with the layout of StepArrays.

    The executor must run the step: later batches do not send these table entries again.

    masks: [slots, places, words], the bitmasks of each request slot; None if no row has one.

    All sections are joined to one list by loops in C, which is converted once.
    A numpy array for each section would take longer at batch 1, and an `array` grows slowly.
    """
    chunks = batch.chunks
    lengths = [len(c.token_ids) for c in chunks]
    starts = list(accumulate(lengths, initial=0))
    ends = [c.start + n for c, n in zip(chunks, lengths, strict=True)]
    groups = len(chunks[0].tables) if chunks else 1
    firsts, table_starts, entries = _changes(chunks)
    rows = [row for c in chunks for row in c.rows]
    slots = [c.slot for c in chunks for _ in c.rows]
    # Most steps have no draft tokens and no adapters. A step with one token for each sequence
    # cannot have draft tokens, so it is not searched for them.
    has_drafts = starts[-1] > len(chunks) and any(c.num_drafts for c in chunks)
    drafts = [row.draft for row in rows] if has_drafts else []
    adapters, scales = _adapters(chunks)
    places = 0 if masks is None else masks.shape[1]  # bitmasks of a slot
    num_masks = 0 if masks is None else places * len(masks)
    counts = (starts[-1], len(chunks), len(rows), len(entries))
    has_pictures = [c for c in chunks if c.media is not None or c.angles is not None]
    media = _media(chunks, lengths) if has_pictures else []
    axes, angles = _angles(chunks, lengths) if has_pictures else (0, [])
    words = [*counts, num_masks, len(adapters), groups - 1, len(drafts), len(media), axes, 0, 0]
    for c in chunks:
        words += c.token_ids
    for c, end in zip(chunks, ends, strict=True):
        words += range(c.start, end)
    words += starts
    words += ends
    words += [c.slot for c in chunks]
    words += firsts
    words += table_starts
    words += entries
    words += adapters
    words += scales
    words += media
    words += angles
    words += [start + r.index for start, c in zip(starts, chunks, strict=False) for r in c.rows]
    words += slots
    words += [row.target for row in rows]
    tops = [row.num_top for row in rows]
    words += tops
    words += drafts
    if masks is not None and num_masks:
        masks = masks.reshape(num_masks, -1)
        at = zip(slots, rows, strict=True)
        words += [-1 if row.mask < 0 else slot * places + row.mask for slot, row in at]
    return StepArrays(np.frombuffer(array("i", words), np.int32), masks, tops)


def _adapters(chunks: Sequence[SeqChunk]) -> tuple[list[int], list[int]]:
    """Return the adapter of each chunk and the bits of its scale; ([], []) if no chunk has one."""
    adapters = [c.adapter for c in chunks]
    if max(adapters, default=-1) < 0:
        return [], []
    scales = np.array([c.adapter_scale for c in chunks], np.float32)
    return adapters, scales.view(np.int32).tolist()


def _media(chunks: Sequence[SeqChunk], lengths: Sequence[int]) -> list[int]:
    """Return the row of the media buffer of each token, -1 = none; [] if no token has one."""
    if all(c.media is None for c in chunks):
        return []
    rows: list[int] = []
    for chunk, length in zip(chunks, lengths, strict=True):
        rows += [-1] * length if chunk.media is None else chunk.media
    return rows


def _angles(chunks: Sequence[SeqChunk], lengths: Sequence[int]) -> tuple[int, list[int]]:
    """Return the number of axes, and the places of all tokens on each axis; (0, []) if none."""
    axes = max((len(c.angles) for c in chunks if c.angles is not None), default=0)
    found: list[int] = []
    for axis in range(axes):
        for c, length in zip(chunks, lengths, strict=True):
            found += range(c.start, c.start + length) if c.angles is None else c.angles[axis]
    return axes, found


def _changes(chunks: Sequence[SeqChunk]) -> tuple[list[int], list[int], list[BlockId]]:
    """Return (table_first, table_start, table_entries): the new entries of all block tables."""
    firsts: list[int] = []
    entries: list[BlockId] = []
    starts = [0]
    for chunk in chunks:
        for table in chunk.tables:
            first = table.sent
            firsts.append(first)
            if first < len(table):
                entries += table[first:]
                table.sent = len(table)
            starts.append(len(entries))
    return firsts, starts, entries


def unpack(outputs: StepOutputs, tops: Sequence[int]) -> StepResult:
    """Return the results of the logit rows of a step, in order, as plain Python numbers.

    tops: from the StepArrays of the step. The batch itself is not read here, because the step
    has evicted it from the caches of the CPU: reading 32 rows of the batch took 20 us.
    """
    if outputs.vectors is not None:
        return [VectorResult(0, vector=row) for row in outputs.vectors[: len(tops)].copy()]
    tokens = outputs.tokens[: len(tops)].tolist()
    if not tops or max(tops) < 0:
        return [RowResult(token) for token in tokens]
    logprobs = outputs.logprobs[: len(tops)].tolist()
    ranks = outputs.ranks[: len(tops)].tolist()
    result = [
        RowResult(token) if top < 0 else RowResult(token, logprob, rank)
        for token, logprob, rank, top in zip(tokens, logprobs, ranks, tops, strict=True)
    ]
    for i, top in enumerate(tops):
        if top > 0:
            ids = outputs.top_ids[i, :top].tolist()
            if ids[-1] < 0:  # fewer tokens could be sampled than the number of alternatives
                ids = ids[: ids.index(-1)]
            scores = outputs.top_logprobs[i, : len(ids)].tolist()
            result[i].top = list(zip(ids, scores, strict=True))
    return result
