"""PictureTower: pictures of prompts become tiles for a tower, and its rows those of their tokens.

The rows of a picture may be on a canvas of tiles: lines of rows, each with a row for its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from cpuserve.program.pictures import PictureForm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.core.media import MediaItem
    from cpuserve.runtime.executor import Bytes, Float32

Numbers = npt.NDArray[np.intp]
_END = -1  # the number of the row after a line


class TileTower(Protocol):
    """Encodes tiles of patches in slices (runtime/tower.py)."""

    line_end: Float32 | None  # the row after each line of rows (PictureForm.lines)

    @property
    def turned_merge(self) -> int:
        """Return the patches of a side of a row's block; 0 if a row has the angle of a position."""

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row."""

    @property
    def together(self) -> int:
        """Return the most patches of pictures that are encoded in one step of the tower."""

    def start(self, patches: Bytes, tiles: Sequence[tuple[int, int]]) -> None:
        """Begin to encode tiles of (rows, columns) patches; ValueError: it has no such tiles."""

    def advance(self, budget_s: float) -> bool:
        """Compute for about `budget_s` seconds; return whether all tiles are encoded."""

    def rows(self) -> Float32:
        """Return the rows of the encoded tiles."""


class PictureTower:
    """The MediaTower of pictures: a tower of tiles, and the forms of the pictures that it encodes.

    The work of a picture is its number of patches.
    """

    def __init__(self, tower: TileTower) -> None:
        self._tower = tower
        self._merge = tower.turned_merge
        self._begins: list[int] = []  # the first row of each picture, and the end of the last one
        self._lines: list[PictureLines | None] = []

    @property
    def turns(self) -> bool:
        """Whether RoPE turns tokens of pictures by their rows and columns."""
        return self._merge > 0

    @property
    def row_bytes(self) -> int:
        """Return the bytes of a row."""
        return self._tower.row_bytes

    @property
    def together(self) -> int:
        """Return the most patches of pictures that are encoded in one step of the tower."""
        return self._tower.together

    def grid(self, item: MediaItem) -> tuple[int, int] | None:
        """Return (rows, columns) of the blocks of patches that the tokens of a picture stand for.

        None: RoPE turns the tokens as those of a text.
        """
        if not self._merge:
            return None
        ((rows, columns),) = PictureForm.of(item.form).tiles
        return rows // self._merge, columns // self._merge

    def start(self, items: Sequence[MediaItem], payloads: Sequence[bytes]) -> None:
        """Begin to encode pictures; ValueError: the tower has no such tiles, or not these patches.

        payloads: the patches of each picture.
        """
        forms = [PictureForm.of(item.form) for item in items]
        counts = [
            form.num_patches if form.lines else item.num_rows
            for form, item in zip(forms, items, strict=True)
        ]
        self._begins = np.cumsum([0, *counts]).tolist()
        self._lines = [PictureLines.of(form) if form.lines else None for form in forms]
        patches = [*map(_patches, payloads, (form.num_patches for form in forms))]
        tiles = [tile for form in forms for tile in form.tiles]
        self._tower.start(patches[0] if len(patches) == 1 else np.concatenate(patches), tiles)

    def advance(self, budget_s: float) -> bool:
        """Compute for about `budget_s` seconds; return whether all pictures are encoded."""
        return self._tower.advance(budget_s)

    def rows(self, index: int, begin: int, end: int) -> Float32:
        """Return rows begin .. end - 1 of a picture; ValueError: their number is another one."""
        encoded = self._tower.rows()
        if len(encoded) != self._begins[-1]:
            msg = f"the tower made {len(encoded)} rows for {self._begins[-1]} tokens"
            raise ValueError(msg)
        picture_rows = encoded[self._begins[index] : self._begins[index + 1]]
        lines = self._lines[index]
        if lines is None:
            return picture_rows[begin:end]
        return lines.rows(picture_rows, begin, end, self._tower.line_end)


def _patches(payload: bytes, count: int) -> Bytes:
    """Return patches as an array [count, bytes of a patch]."""
    flat = np.frombuffer(payload, np.uint8)
    if not count or len(flat) % count:
        msg = f"{len(flat)} bytes are not {count} patches"
        raise ValueError(msg)
    return flat.reshape(count, -1)


@dataclass(frozen=True, slots=True)
class PictureLines:
    """Which rows of the tower make the rows of a picture, in the order of its placeholders.

    numbers: the tower's row for each placeholder [rows], or the four rows around it [rows, 4]
      if the canvas is scaled; -1 = the row after a line.
    weights: the shares of the four rows [rows, 4]; None = the canvas is not scaled.
    """

    numbers: Numbers
    weights: Float32 | None = None

    @staticmethod
    def of(form: PictureForm) -> PictureLines:
        """Return the lines of a picture that has some (PictureForm.lines)."""
        tile_rows, tile_columns, top, bottom, left, right = form.lines[:6]
        side, shape = form.tiles[0][0], (bottom - top, right - left)
        canvas = np.empty(shape, np.intp)
        if tile_rows and tile_columns:
            tiles = side**2 + np.arange(tile_rows * tile_columns * side**2).reshape(
                tile_rows, tile_columns, side, side
            )
            whole = tiles.swapaxes(1, 2).reshape(tile_rows * side, tile_columns * side)
            canvas = whole[top:bottom, left:right]
        base_numbers = np.arange(side**2)
        if len(form.lines) == 6:
            return PictureLines(np.concatenate([base_numbers, _ended(canvas).reshape(-1)]))
        corners, weights = _scaled(canvas, form.lines[6], form.lines[7])
        overview = np.zeros((len(base_numbers), 4), np.float32)
        overview[:, 0] = 1
        numbers = [np.repeat(base_numbers[:, None], 4, axis=1), _ended(corners).reshape(-1, 4)]
        shares = [overview, _ended(weights).reshape(-1, 4)]
        return PictureLines(np.concatenate(numbers), np.concatenate(shares))

    def rows(self, encoded: Float32, first: int, last: int, line_end: Float32 | None) -> Float32:
        """Return rows first .. last - 1 of the picture.

        encoded: the rows that the tower has made of all patches of the picture.
        line_end: the row after a line.
        """
        numbers = self.numbers[first:last]
        if self.weights is None:
            found, is_line_end = encoded[numbers], numbers < 0
        else:
            shares, is_line_end = self.weights[first:last], numbers[:, 0] < 0
            found = encoded[numbers[:, 0]] * shares[:, :1]
            for corner in range(1, 4):
                found += encoded[numbers[:, corner]] * shares[:, corner : corner + 1]
        if line_end is not None:
            found[is_line_end] = line_end
        return found


def _ended(canvas: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return a canvas with a further column for the ends of its lines."""
    padding = [(0, 0), (0, 1), *[(0, 0)] * (canvas.ndim - 2)]
    return np.pad(canvas, padding, constant_values=_END)


def _scaled(canvas: Numbers, rows: int, columns: int) -> tuple[Numbers, Float32]:
    """Return the corners of each place of a smaller canvas, and their shares: [rows, columns, 4].

    The places are the middles of equal parts of the canvas, as in bilinear interpolation of torch
    without aligned corners.
    """
    (above, below, low), (left, after, right) = (
        _between(old, new) for old, new in zip(canvas.shape, (rows, columns), strict=True)
    )
    corners = [canvas[np.ix_(y, x)] for y in (above, below) for x in (left, after)]
    shares = [np.outer(y, x) for y in (1 - low, low) for x in (1 - right, right)]
    return np.stack(corners, axis=2), np.stack(shares, axis=2).astype(np.float32)


def _between(old_length: int, new_length: int) -> tuple[Numbers, Numbers, npt.NDArray[np.float64]]:
    """Return the neighbours of new places on a line of old ones, and the share of the second."""
    places = np.maximum((np.arange(new_length) + 0.5) * (old_length / new_length) - 0.5, 0)
    below = np.minimum(places.astype(np.intp), old_length - 1)
    return below, np.minimum(below + 1, old_length - 1), places - below
