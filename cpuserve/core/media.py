"""The media of a prompt: their placeholder tokens, and their part in the keys of blocks.

An encoded item has several rows. The prompt has a placeholder token for each of them, which is the
same token for all items of a kind.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

DIGEST_BYTES = 32
# A key of a block depends on this, for each run of placeholders: the digest of the item,
# the run's place in the block, its length, the row of the item for its first token,
# and the place of the whole item, which may begin before the block.
MARK = struct.Struct(f"<{DIGEST_BYTES}s4i")


class MediaItem(msgspec.Struct, array_like=True, frozen=True):
    """An item of a prompt that is not text, such as an image.

    kind: its name in the table of kinds (media/kinds.py). A tower encodes the items of one kind.
    digest: the SHA-256 of the file's bytes and of the parameters of the preprocessing.
    spans: (position, number of tokens) of each run of placeholders in the prompt, in order.
    work: how much the tower has to compute, in the units of its kind.
    parts: of how many parts a client hears that they were read.
    form: what the payload is; only the readers and the tower of the kind understand it.
    payload: the input of the tower; None = the engine asks for it.
    """

    kind: str
    digest: bytes
    spans: list[tuple[int, int]]
    work: int = 0
    parts: int = 1
    form: bytes = b""
    payload: bytes | None = None

    @property
    def num_rows(self) -> int:
        """The number of rows of the encoded item, which is the number of placeholders."""
        return sum(count for _, count in self.spans)


# Returns (rows, columns) of the tokens of an item that have places on a grid; None = they have
# positions, like those of a text.
GridOf = Callable[[MediaItem], tuple[int, int] | None]


def without_payload(items: Sequence[MediaItem]) -> list[MediaItem]:
    """Return the items without the input of their towers."""
    return [msgspec.structs.replace(item, payload=None) for item in items]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive placeholders of one item: tokens begin .. end - 1 of the prompt.

    index: the number of the item in the prompt.
    row: the row of the encoded item for the first of these tokens.
    """

    begin: int
    end: int
    index: int
    row: int


class Placeholders:
    """The placeholders of a prompt with these items, in order."""

    def __init__(self, items: Sequence[MediaItem]) -> None:
        self.items = items
        self._runs: list[Stretch] = []
        for index, item in enumerate(items):
            row = 0
            for begin, count in item.spans:
                self._runs.append(Stretch(begin, begin + count, index, row))
                row += count
        self._begins = [run.begin for run in self._runs]
        self._joined: list[tuple[int, int]] = []  # runs, joined to one where no token is between
        for run in self._runs:
            begin = self._joined.pop()[0] if self._ends_at(run.begin) else run.begin
            self._joined.append((begin, run.end))

    def _ends_at(self, position: int) -> bool:
        return bool(self._joined) and self._joined[-1][1] == position

    def __contains__(self, position: int) -> bool:
        return any(True for _ in self.runs(position, position + 1))

    def runs(self, begin: int, end: int) -> Iterator[Stretch]:
        """Yield the parts of the runs that are in begin .. end - 1."""
        first_run = max(0, bisect_right(self._begins, begin) - 1)
        for index in range(first_run, len(self._runs)):
            run = self._runs[index]
            if run.begin >= end:
                return
            start, stop = max(run.begin, begin), min(run.end, end)
            if start < stop:
                yield Stretch(start, stop, run.index, run.row + start - run.begin)

    def cut_by(self, position: int) -> tuple[int, int] | None:
        """Return (begin, end) of the placeholders without a gap that an end at `position` cuts.

        None: it cuts none.
        """
        index = bisect_right(self._joined, (position, 0)) - 1
        if index < 0:
            return None
        begin, end = self._joined[index]
        return (begin, end) if begin < position < end else None

    def mark(self, begin: int, end: int) -> bytes:
        """Return a mark that no other item has; b"" without placeholders."""
        return b"".join(
            MARK.pack(
                self.items[run.index].digest,
                run.begin - begin,
                run.end - run.begin,
                run.row,
                self.items[run.index].spans[0][0] - begin,
            )
            for run in self.runs(begin, end)
        )

    def angles(self, begin: int, end: int, grid_of: GridOf) -> list[list[int]] | None:
        """Return the places of tokens begin .. end - 1 on three axes; None: they are the positions.

        The tokens of an item may be a grid. All have the same place on the first axis, as a text at
        the item's begin would have; their rows and columns are added to it on the other axes. The
        text after a grid of r x c goes on with the place max(r, c) later, as in Qwen2-VL, so it has
        the same place on all axes, earlier than its position.
        """
        if not self._runs or end <= self._begins[0]:
            return None
        axes: list[list[int]] = [[], [], []]
        shift, position = 0, begin
        for item in self.items:
            first, count = item.spans[0]
            if first >= end:
                break
            if (grid := grid_of(item)) is None:
                continue
            assert len(item.spans) == 1, "an item with angles is one grid"
            rows, columns = grid
            for axis in axes:
                axis += range(position + shift, max(position, first) + shift)
            numbers = range(max(begin - first, 0), min(end - first, count))
            axes[0] += [first + shift] * len(numbers)
            axes[1] += [first + shift + number // columns for number in numbers]
            axes[2] += [first + shift + number % columns for number in numbers]
            shift += max(rows, columns) - count
            position = max(position, first + count)
        for axis in axes:
            axis += range(position + shift, end + shift)
        return axes

    def without(self, ids: Sequence[int]) -> list[int]:
        """Return `ids`, the tokens of the prompt and later ones, without the placeholders."""
        text_ids: list[int] = []
        position = 0
        for run in self._runs:
            text_ids += ids[position : run.begin]
            position = run.end
        return [*text_ids, *ids[position:]]


def extra_keys(content: bytes, num_tokens: int) -> list[tuple[str, int]]:
    """Return (digest as hex, place in the block) of each item in the content of a block.

    num_tokens: the number of tokens of the block; their ids come first in `content`.
    """
    marks = content[4 * num_tokens :]
    keys = ((digest, place) for digest, *_, place in MARK.iter_unpack(marks))
    return [(digest.hex(), place) for digest, place in dict.fromkeys(keys)]
