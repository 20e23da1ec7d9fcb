"""How a picture is shown to a model: its tiles, and the text in place of its marker."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import msgspec

from cpuserve.program.pictures import KIND, PictureForm

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEPT = 6  # the numbers of PictureForm.lines that say which part of a canvas is kept


class PictureLayout(msgspec.Struct, frozen=True, array_like=True):
    """How one picture is shown to the tower and in the prompt.

    tiles: (rows, columns) of each tile, in patches.
    text: the text in place of the marker; each placeholder in it stands for one row of the tower.
    width, height: the size of the scaled picture in pixels.
    rows: how many rows of the tower the picture has.
    lines: see PictureForm.
    """

    tiles: tuple[tuple[int, int], ...]
    text: str
    width: int
    height: int
    rows: int
    lines: tuple[int, ...] = ()

    @property
    def form(self) -> PictureForm:
        """The form of the patches for the tower."""
        return PictureForm(self.tiles, self.lines)

    @property
    def num_patches(self) -> int:
        """How many patches all tiles have."""
        return self.form.num_patches


def line_shape(lines: Sequence[int]) -> tuple[int, int]:
    """Return how many lines a picture has, and the rows of each without its end."""
    if len(lines) > _KEPT:
        return lines[_KEPT], lines[_KEPT + 1]
    _, _, top, bottom, left, right = lines
    return bottom - top, right - left


class ShownPicture(msgspec.Struct, frozen=True, gc=False):
    """What became of a picture of a request, for the client.

    width, height: its size in pixels, turned as its EXIF says.
    used_width, used_height: the size after scaling.
    tokens: how many tokens of the prompt it has, those between its tiles included.
    """

    kind: ClassVar[str] = KIND
    width: int
    height: int
    used_width: int
    used_height: int
    tokens: int

    @property
    def lost_detail(self) -> bool:
        """Whether a side was scaled to less than half."""
        return 2 * self.used_width < self.width or 2 * self.used_height < self.height

    @property
    def scaled(self) -> tuple[int, int, int, int] | None:
        """(width, height) before and after scaling, if it lost detail; else None."""
        sizes = self.width, self.height, self.used_width, self.used_height
        return sizes if self.lost_detail else None
