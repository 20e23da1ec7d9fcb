"""StepView finds the sections of a packed step; StepArrays (runtime/executor.py) has the layout.

KeptTables has the block tables that an executor received in earlier steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]

HEADER = 12  # int32 words of the header, as in runtime/executor.py
MORE_GROUPS = 6  # the header word with the number of cache groups - 1
EMPTY: Int32 = np.zeros(0, np.int32)


class HasWords(Protocol):
    """An object that holds a packed step, such as StepArrays."""

    @property
    def words(self) -> Int32:
        """Return the int32 words of the step."""


class KeptTables:
    """The block tables of each request slot, from the steps so far."""

    def __init__(self) -> None:
        self._tables: dict[int, list[Int32]] = {}

    def table(self, slot: int, group: int) -> Int32:
        """Return the table of a request slot for cache group `group`; empty if none was sent."""
        tables = self._tables.get(slot, [])
        return tables[group] if group < len(tables) else EMPTY

    def keep(self, step: StepView) -> None:
        """Apply the changed table entries of a step that has been checked."""
        for seq, slot in enumerate(step.seq_slot.tolist()):
            self._tables[slot] = [step.table(seq, group) for group in range(step.num_groups)]

    def release(self, slot: int) -> None:
        """Drop the block tables of request slot `slot`."""
        self._tables.pop(slot, None)


@dataclass(frozen=True, slots=True)
class StepView:
    """The sections of a packed step, as views of its words.

    StepArrays (runtime/executor.py) has the shapes of the sections.
    Sections that a step does not need (adapters, adapter_scales, media_rows, angles, row_draft,
    row_mask) are empty.
    Block table i belongs to sequence i // G and group i % G.
    Table i keeps its first table_first[i] entries;
    its new entries are table_entries[table_start[i] : table_start[i + 1]].

    kept: the block tables from earlier steps, by request slot.
    """

    token_ids: Int32
    positions: Int32
    query_start: Int32
    kv_len: Int32
    seq_slot: Int32
    table_first: Int32
    table_start: Int32
    table_entries: Int32
    adapters: Int32
    adapter_scales: Int32
    media_rows: Int32
    angles: Int32
    row_token: Int32
    row_slot: Int32
    row_target: Int32
    row_top: Int32
    row_draft: Int32
    row_mask: Int32
    kept: KeptTables = field(default_factory=KeptTables, kw_only=True)

    def draft(self, row: int) -> int:
        """Return the draft token of `row`, or -1.

        The next row is sampled only if `row` samples this token.
        """
        return int(self.row_draft[row]) if len(self.row_draft) else -1

    @property
    def num_tokens(self) -> int:
        """Return T, the number of tokens in the step."""
        return len(self.token_ids)

    @property
    def num_seqs(self) -> int:
        """Return S, the number of sequences in the step."""
        return len(self.kv_len)

    @property
    def num_groups(self) -> int:
        """Return G, the number of cache groups."""
        return len(self.table_first) // self.num_seqs if self.num_seqs else 1

    def table(self, seq: int, group: int = 0) -> Int32:
        """Return the block table of sequence `seq` in `group`, with the changes of the step."""
        at = seq * self.num_groups + group
        new = self.table_entries[self.table_start[at] : self.table_start[at + 1]]
        kept = self.kept.table(int(self.seq_slot[seq]), group)
        return np.concatenate((kept[: self.table_first[at]], new))

    def token_adapters(self) -> Int32:
        """Return the adapter of each token [T], or -1 for a token without an adapter."""
        adapters = self.adapters if len(self.adapters) else np.full(self.num_seqs, -1, np.int32)
        return np.repeat(adapters, np.diff(self.query_start))

    def token_adapter_scales(self) -> Float32:
        """Return the factor of each token's adapter [T]; 1 in a step without adapters."""
        scales = self.adapter_scales.view(np.float32)
        if not len(scales):
            scales = np.ones(self.num_seqs, np.float32)
        return np.repeat(scales, np.diff(self.query_start))

    @property
    def token_angles(self) -> Int32 | None:
        """Return the places of tokens on each axis [axes, T]; None: they are the positions."""
        return self.angles.reshape(-1, self.num_tokens) if len(self.angles) else None

    def queries(self, seq: int) -> slice:
        """Return the range of the tokens of sequence `seq` in this step."""
        return slice(int(self.query_start[seq]), int(self.query_start[seq + 1]))


def section_lengths(
    tokens: int,
    seqs: int,
    rows: int,
    entries: int,
    masks: int,
    adapters: int,
    groups: int,
    drafts: int,
    media: int,
    axes: int,
) -> tuple[int, ...]:
    """Return the number of words of each section, in the order of StepView's fields."""
    tables = (seqs * groups, seqs * groups + 1, entries)
    by_seq = (seqs + 1, seqs, seqs, *tables, adapters, adapters, media, axes * tokens)
    # The four sections that each row is in: row_token, row_slot, row_target and row_top.
    by_row = (rows, rows, rows, rows, drafts, rows if masks else 0)
    return (tokens, tokens, *by_seq, *by_row)


def view(arrays: HasWords, kept: KeptTables | None = None) -> StepView:
    """Return the sections of `arrays`; ValueError if their length does not match the header.

    kept: the block tables that earlier steps have sent; without them `table` is not complete.
    """
    words = arrays.words
    tokens, seqs, rows, entries, masks = (int(n) for n in words[:5])
    adapters, more_groups, drafts, media, axes, *unused = (int(n) for n in words[5:HEADER])
    counts = adapters, more_groups + 1, drafts, media, axes
    lengths = section_lengths(tokens, seqs, rows, entries, masks, *counts)
    fits = min(tokens, seqs, rows, entries, masks, more_groups, axes) >= 0
    fits = fits and drafts in (0, rows) and adapters in (0, seqs) and media in (0, tokens)
    fits = fits and not any(unused)
    if not fits or HEADER + sum(lengths) != len(words):
        msg = f"a step of {len(words)} words does not match its header {words[:HEADER].tolist()}"
        raise ValueError(msg)
    ends = np.cumsum((HEADER, *lengths))
    sections = (words[a:b] for a, b in pairwise(ends))
    return StepView(*sections, kept=KeptTables() if kept is None else kept)


def check_step(
    step: StepView,
    *,
    vocab: int,
    num_blocks: int,
    block: int,
    groups: int = 1,
    num_states: int = 0,
    num_media: int = 0,
    axes: int = 0,
    max_position: int = 2**31 - 1,
    ids: int = 0,
) -> None:
    """Raise ValueError if an index in `step` is out of range; call it before the step runs.

    ids: the number of token ids, if there are more of them than the `vocab` logits.
    groups: number of cache groups; if num_states is not 0, the last group has state slots.
    num_media: number of rows of the media buffer.
    axes: number of axes of the program's ropes; max_position: places on an axis are below it.
    """
    if step.num_groups != groups:
        msg = f"the step has block tables for {step.num_groups} cache groups, not {groups}"
        raise ValueError(msg)
    _check_range("token id", step.token_ids, max(ids, vocab))
    _check_range("media row", step.media_rows + 1, num_media + 1)
    _check_range("angle", step.angles, max_position)
    if len(step.angles) not in (0, axes * step.num_tokens):
        msg = f"the step has angles of another number of axes than {axes}"
        raise ValueError(msg)
    _check_changes(step)
    for seq in range(step.num_seqs):
        for group in range(groups - bool(num_states)):
            _check_range("block id", step.table(seq, group), num_blocks)
    if num_states:
        _check_states(step, num_blocks, block, num_states)
    _check_range("row token", step.row_token, step.num_tokens)
    if len(step.row_target):
        _check_range("row target", np.maximum(step.row_target, 0), vocab)
    for row in np.flatnonzero(step.row_draft >= 0):
        _check_draft(step, int(row))
    for seq in range(step.num_seqs):
        positions = step.positions[step.queries(seq)]
        kv_len = int(step.kv_len[seq])
        if not len(positions):
            msg = f"sequence {seq} of the step has no tokens"
            raise ValueError(msg)
        start = kv_len - len(positions)
        if start < 0 or not np.array_equal(positions, np.arange(start, kv_len)):
            msg = f"positions of sequence {seq} do not end at its {kv_len} keys"
            raise ValueError(msg)
        held = min(len(step.table(seq, group)) for group in range(groups))
        if kv_len > held * block:
            msg = (
                f"sequence {seq} has {kv_len} keys and {held} blocks of {block}, "
                "which cannot hold them"
            )
            raise ValueError(msg)


def _check_changes(step: StepView) -> None:
    """Raise ValueError unless every changed table continues the kept table of its request slot."""
    slots = step.seq_slot.tolist()
    starts = step.table_start
    if len(set(slots)) < len(slots):
        msg = f"two sequences of the step have the same slot: {slots}"
        raise ValueError(msg)
    if starts[0] != 0 or starts[-1] != len(step.table_entries) or np.any(np.diff(starts) < 0):
        msg = "the new entries of the step's tables are not in their order"
        raise ValueError(msg)
    for at, first in enumerate(step.table_first.tolist()):
        seq, group = divmod(at, step.num_groups)
        has = len(step.kept.table(slots[seq], group))
        if not 0 <= first <= has:
            msg = (
                f"table {group} of sequence {seq} goes on after {first} entries, but slot "
                f"{slots[seq]} has {has}"
            )
            raise ValueError(msg)


def _check_states(step: StepView, num_blocks: int, block: int, num_states: int) -> None:
    """Raise ValueError unless every sequence has a state slot for its last token."""
    for seq in range(step.num_seqs):
        table = step.table(seq, step.num_groups - 1)
        known = table[table != num_blocks - 1] - num_blocks
        _check_range("state slot", known, num_states)
        last = (int(step.kv_len[seq]) - 1) // block
        if np.all(table[last:] == num_blocks - 1):
            msg = (
                f"sequence {seq} of the step has no state slot for its block {last} or a later one"
            )
            raise ValueError(msg)


def _check_draft(step: StepView, row: int) -> None:
    """Raise ValueError unless the row after `row` belongs to the draft token of `row`."""
    token = int(step.row_token[row]) + 1
    rows = slice(row, row + 2)
    follows = (
        np.array_equal(step.row_token[rows], (token - 1, token))
        and step.row_slot[row] == step.row_slot[row + 1]
        and max(step.row_target[rows]) < 0
        and token not in step.query_start
    )
    if not follows or step.token_ids[token] != step.row_draft[row]:
        msg = f"row {row} of the step has a draft that the next row does not follow"
        raise ValueError(msg)


def _check_range(what: str, values: Int32, end: int) -> None:
    if len(values) and (int(values.min()) < 0 or int(values.max()) >= end):
        msg = f"a {what} of the step is outside [0, {end})"
        raise ValueError(msg)


def token_slots(step: StepView, block: int, group: int = 0) -> Int32:
    """Return the KV slot of every token [T]: (block id) * block + (offset in the block)."""
    slots = np.empty(step.num_tokens, np.int32)
    for seq in range(step.num_seqs):
        at = step.queries(seq)
        positions = step.positions[at]
        slots[at] = step.table(seq, group)[positions // block] * block + positions % block
    return slots


def key_slots(step: StepView, seq: int, block: int, group: int = 0) -> Int32:
    """Return the KV slots of keys 0 to kv_len - 1 of sequence `seq`, in order of position."""
    table = step.table(seq, group)
    slots: Int32 = np.add.outer(table * np.int32(block), np.arange(block, dtype=np.int32))
    return slots.reshape(-1)[: int(step.kv_len[seq])]


def state_slot(table: Int32, block: int, gone: int) -> int:
    """Return the state slot for block `block` of a sequence: the first one from this block on.

    table: an entry for each block of tokens. The entry for state slot s is gone + 1 + s.
      The entry `gone`, the number of the last KV block, means that the block has no slot.
    """
    while table[block] == gone:
        block += 1
    return int(table[block]) - gone - 1
