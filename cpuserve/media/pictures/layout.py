"""How a picture is shown to a model: its tiles, and the text in place of its marker."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import msgspec

from cpuserve.program.pictures import KIND, PictureForm

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Self

    import numpy as np
    from PIL.Image import Image


# By the marker of a picture: the texts that chat templates write before and after it.
_FRAMES = {
    "<|image_pad|>": ("<|vision_start|>", "<|vision_end|>"),
    "<|IMAGE_PLACEHOLDER|>": ("<|IMAGE_START|>", "<|IMAGE_END|>"),
    "<|IMAGE|>": ("<|vision_bos|>", "<|vision_eos|>"),
    "<|imgpad|>": ("<|img|>", "<|endofimg|>"),
}
# By the same: the text, which may be no token, that chat templates write instead of the marker.
_WRITTEN = {"<|IMG_PATCH|>": "<image>", "<IMG_CONTEXT>": "<image>"}
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


class Family(Protocol):
    """The preprocessing of one family of models, with the numbers of one checkpoint.

    It is a msgspec.Struct of numbers, texts and the like, which a process with limits decodes.
    """

    @property
    def marker(self) -> str:
        """The text of the token that chat templates write once for each picture."""

    @property
    def written(self) -> str | None:
        """The text that chat templates write instead of the marker; None: they write the marker."""

    @property
    def frame(self) -> tuple[str, str]:
        """The texts that chat templates write before and after the marker of a picture."""

    @property
    def placeholder(self) -> str:
        """The text of the token for a row of the tower; it may be the marker."""

    @property
    def gap(self) -> str:
        """The text before and after each marker that templates do not write."""

    @property
    def patch_bytes(self) -> int:
        """The bytes of one patch."""

    @property
    def page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels."""

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture: uint8 [patches, patch * patch * 3].

        The columns have the order (y, x, channel). Tiles follow each other, and the patches of
        a tile are in merge order: blocks of patches that the tower merges, from left to right and
        from top to bottom, and so the patches of a block.
        """

    def changed(self, settings: Mapping[str, Any]) -> Family:
        """Return the family with the settings of a request or of the server.

        Raises InvalidRequest if the family has no such setting, or not this value.
        """

    def of_count(self, count: int) -> Family:
        """Return the family for a request with so many pictures, pages of documents included."""


class WithMarker(msgspec.Struct, frozen=True, kw_only=True):
    """What the families of cpuserve share.

    patch: the side of a patch in pixels. marker: the text of the token of a picture.
    """

    patch: int
    marker: str

    @property
    def written(self) -> str | None:
        """The text that chat templates write instead of the marker; None: they write the marker."""
        return _WRITTEN.get(self.marker)

    @property
    def frame(self) -> tuple[str, str]:
        """The texts that chat templates write before and after the marker of a picture."""
        return _FRAMES.get(self.marker, ("", ""))

    @property
    def patch_bytes(self) -> int:
        """The bytes of one patch."""
        return 3 * self.patch**2

    def of_count(self, _count: int) -> Self:
        """Return the family for a request with so many pictures, pages of documents included."""
        return self


class OneMarker(WithMarker, frozen=True, kw_only=True):
    """A family with one token: templates write it once, and each row of the tower gets it."""

    @property
    def placeholder(self) -> str:
        """The text of the token for a row of the tower."""
        return self.marker

    @property
    def gap(self) -> str:
        """The text around the marker, which templates do not write."""
        return ""
