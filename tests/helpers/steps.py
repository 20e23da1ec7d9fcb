"""Driving an executor or the Interpreter by hand: sequences, their blocks, and packed steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from cpuserve.core.kv.table import BlockTable
from cpuserve.core.step import LogitRow, SeqChunk, StepBatch
from cpuserve.runtime.executor import StepArrays
from cpuserve.runtime.pack import pack

BLOCK = 32


@dataclass
class Sequence:
    """The tokens of one sequence, how many of them have run (`done`), and its KV blocks.

    first_state: for models with recurrent layers, the number of KV blocks. Block i then has state
    slot i.
    """

    slot: int
    tokens: list[int]
    blocks: list[int]
    first_state: int = 0
    done: int = 0
    rows: list[LogitRow] = field(default_factory=list)

    def chunk(self, length: int | None = None, rows: list[LogitRow] | None = None) -> SeqChunk:
        """The next `length` tokens (default: all that are left); rows default to the last token."""
        length = len(self.tokens) - self.done if length is None else length
        start, self.done = self.done, self.done + length
        used = self.blocks[: -(-self.done // BLOCK)]
        rows = [LogitRow(length - 1)] if rows is None else rows
        tables = [BlockTable(used)]
        if self.first_state:
            tables.append(BlockTable(self.first_state + block for block in used))
        return SeqChunk(self.slot, self.tokens[start : self.done], start, tables, rows)


def step(*chunks: SeqChunk) -> StepArrays:
    """The packed step of these chunks."""
    return pack(StepBatch(list(chunks)))


def all_rows(length: int) -> list[LogitRow]:
    """A logit row for every token of a chunk."""
    return [LogitRow(i) for i in range(length)]
