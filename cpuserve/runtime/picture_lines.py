"""The rows of a picture on a canvas of tiles: lines of rows, each with a row for its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from cpuserve.core.pictures import Picture
    from cpuserve.runtime.executor import Float32

Numbers = npt.NDArray[np.intp]
_END = -1  # the number of the row after a line


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
    def of(picture: Picture) -> PictureLines:
        """Return the lines of a picture that has some (Picture.lines)."""
        down, across, top, bottom, left, right = picture.lines[:6]
        side, shape = picture.tiles[0][0], (bottom - top, right - left)
        canvas = np.empty(shape, np.intp)
        if down and across:
            tiles = side**2 + np.arange(down * across * side**2).reshape(down, across, side, side)
            whole = tiles.swapaxes(1, 2).reshape(down * side, across * side)
            canvas = whole[top:bottom, left:right]
        first = np.arange(side**2)
        if len(picture.lines) == 6:
            return PictureLines(np.concatenate([first, _ended(canvas).reshape(-1)]))
        corners, weights = _scaled(canvas, picture.lines[6], picture.lines[7])
        alone = np.zeros((len(first), 4), np.float32)
        alone[:, 0] = 1
        numbers = [np.repeat(first[:, None], 4, axis=1), _ended(corners).reshape(-1, 4)]
        shares = [alone, _ended(weights).reshape(-1, 4)]
        return PictureLines(np.concatenate(numbers), np.concatenate(shares))

    def rows(self, encoded: Float32, first: int, last: int, line_end: Float32 | None) -> Float32:
        """Return rows first .. last - 1 of the picture.

        encoded: the rows that the tower has made of all patches of the picture.
        line_end: the row after a line.
        """
        numbers = self.numbers[first:last]
        if self.weights is None:
            found, ends = encoded[numbers], numbers < 0
        else:
            shares, ends = self.weights[first:last], numbers[:, 0] < 0
            found = encoded[numbers[:, 0]] * shares[:, :1]
            for corner in range(1, 4):
                found += encoded[numbers[:, corner]] * shares[:, corner : corner + 1]
        if line_end is not None:
            found[ends] = line_end
        return found


def _ended(canvas: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Return a canvas with a further column for the ends of its lines."""
    added = [(0, 0), (0, 1), *[(0, 0)] * (canvas.ndim - 2)]
    return np.pad(canvas, added, constant_values=_END)


def _scaled(canvas: Numbers, rows: int, columns: int) -> tuple[Numbers, Float32]:
    """Return the corners of each place of a smaller canvas, and their shares: [rows, columns, 4].

    The places are the middles of equal parts of the canvas, as in bilinear interpolation of torch
    without aligned corners.
    """
    (above, below, low), (before, after, right) = (
        _between(old, new) for old, new in zip(canvas.shape, (rows, columns), strict=True)
    )
    corners = [canvas[np.ix_(y, x)] for y in (above, below) for x in (before, after)]
    shares = [np.outer(y, x) for y in (1 - low, low) for x in (1 - right, right)]
    return np.stack(corners, axis=2), np.stack(shares, axis=2).astype(np.float32)


def _between(old: int, new: int) -> tuple[Numbers, Numbers, npt.NDArray[np.float64]]:
    """Return the neighbours of `new` places on a line of `old`, and the share of the second one."""
    places = np.maximum((np.arange(new) + 0.5) * (old / new) - 0.5, 0)
    first = np.minimum(places.astype(np.intp), old - 1)
    return first, np.minimum(first + 1, old - 1), places - first
