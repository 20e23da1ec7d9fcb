"""The pictures of a prompt: their placeholder tokens, and their part in the keys of blocks.

An encoded picture has several rows. The prompt has a placeholder token for each of them,
which is the same token for all pictures.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

DIGEST_BYTES = 32
# The most patches of a picture for a tower that reads pictures of any size; larger pictures are
# scaled. A page of 1275 x 1650 pixels has 8,320 patches of 16 x 16.
MOST_PATCHES = 8448
# The numbers that the most rows of a picture of Gemma 4 (`max_soft_tokens`) can be.
GEMMA4_BUDGETS = (70, 140, 280, 560, 1120)
# A key of a block depends on this, for each run of placeholders: the digest of the picture,
# the run's place in the block, its length, the row of the picture for its first token,
# and the place of the whole picture, which may begin before the block.
MARK = struct.Struct(f"<{DIGEST_BYTES}s4i")


class Picture(msgspec.Struct, array_like=True, frozen=True):
    """A picture of a prompt.

    digest: the SHA-256 of the file's bytes and of the parameters of the preprocessing.
    spans: (position, number of tokens) of each run of placeholders in the prompt, in order.
    tiles: (rows, columns) of each tile, counted in patches.
    patches: the pixels, one row of bytes for each patch; None = the engine asks for them.
    lines: how the rows of tiles become lines of a canvas, each with a row for its end: the tiles
      down and across, the first line and the end of the lines that are kept, and the same for the
      columns; then perhaps the lines and columns after scaling. The first tile, which
      is the whole picture, comes before. Each patch has a row.
      [] = the rows follow each other as the tower makes them.
    """

    digest: bytes
    spans: list[tuple[int, int]]
    tiles: list[tuple[int, int]]
    patches: bytes | None = None
    lines: list[int] = []

    @property
    def num_rows(self) -> int:
        """The number of rows of the encoded picture, which is the number of placeholders."""
        return sum(count for _, count in self.spans)

    @property
    def num_patches(self) -> int:
        """The number of patches of all tiles."""
        return sum(rows * columns for rows, columns in self.tiles)


def without_patches(pictures: Sequence[Picture]) -> list[Picture]:
    """Return the pictures without their pixels."""
    return [msgspec.structs.replace(each, patches=None) for each in pictures]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive placeholders of one picture: tokens begin .. end - 1 of the prompt.

    index: the number of the picture in the prompt.
    row: the row of the encoded picture for the first of these tokens.
    """

    begin: int
    end: int
    index: int
    row: int


class Placeholders:
    """The placeholders of a prompt with these pictures, in order."""

    def __init__(self, pictures: Sequence[Picture]) -> None:
        self.pictures = pictures
        self._runs: list[Stretch] = []
        for index, picture in enumerate(pictures):
            row = 0
            for begin, count in picture.spans:
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
        first = max(0, bisect_right(self._begins, begin) - 1)
        for at in range(first, len(self._runs)):
            run = self._runs[at]
            if run.begin >= end:
                return
            start, stop = max(run.begin, begin), min(run.end, end)
            if start < stop:
                yield Stretch(start, stop, run.index, run.row + start - run.begin)

    def cut_by(self, position: int) -> tuple[int, int] | None:
        """Return (begin, end) of the placeholders without a gap that an end at `position` cuts.

        None: it cuts none.
        """
        at = bisect_right(self._joined, (position, 0)) - 1
        if at < 0:
            return None
        begin, end = self._joined[at]
        return (begin, end) if begin < position < end else None

    def mark(self, begin: int, end: int) -> bytes:
        """Return a mark that no other picture has; b"" without placeholders."""
        return b"".join(
            MARK.pack(
                self.pictures[run.index].digest,
                run.begin - begin,
                run.end - run.begin,
                run.row,
                self.pictures[run.index].spans[0][0] - begin,
            )
            for run in self.runs(begin, end)
        )

    def angles(self, begin: int, end: int, merge: int) -> list[list[int]] | None:
        """Return the places of tokens begin .. end - 1 on three axes; None: they are the positions.

        The tokens of a picture are a grid of merged patches. All have the same place on the first
        axis, as a text at the picture's begin would have; their rows and columns are added to it
        on the other axes. The text after a grid of r x c goes on with the place max(r, c) later,
        as in Qwen2-VL, so it has the same place on all axes, earlier than its position.

        merge: the patches of a side of the block of patches that a token stands for.
        """
        if not self._runs or end <= self._begins[0]:
            return None
        found: list[list[int]] = [[], [], []]
        shift, at = 0, begin
        for picture in self.pictures:
            (first, count), ((rows, columns),) = picture.spans[0], picture.tiles
            assert len(picture.spans) == 1, "a picture with angles is one grid"
            rows, columns = rows // merge, columns // merge
            if first >= end:
                break
            for each in found:
                each += range(at + shift, max(at, first) + shift)
            numbers = range(max(begin - first, 0), min(end - first, count))
            found[0] += [first + shift] * len(numbers)
            found[1] += [first + shift + number // columns for number in numbers]
            found[2] += [first + shift + number % columns for number in numbers]
            shift += max(rows, columns) - count
            at = max(at, first + count)
        for each in found:
            each += range(at + shift, end + shift)
        return found

    def without(self, ids: Sequence[int]) -> list[int]:
        """Return `ids`, the tokens of the prompt and later ones, without the placeholders."""
        kept: list[int] = []
        at = 0
        for run in self._runs:
            kept += ids[at : run.begin]
            at = run.end
        return [*kept, *ids[at:]]


def extra_keys(content: bytes, num_tokens: int) -> list[tuple[str, int]]:
    """Return (digest as hex, place in the block) of each picture in the content of a block.

    num_tokens: the number of tokens of the block; their ids come first in `content`.
    """
    marks = content[4 * num_tokens :]
    found = ((digest, place) for digest, *_, place in MARK.iter_unpack(marks))
    return [(digest.hex(), place) for digest, place in dict.fromkeys(found)]
