"""The bases of all families: what they share, and families with one tile a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.media.pictures.families.preprocessing import (
    DETAILS,
    in_merge_order,
)
from cpuserve.media.pictures.layout import PictureLayout

if TYPE_CHECKING:
    from typing import Self

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


class Family(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The preprocessing of one family of models, with the numbers of one checkpoint.

    A process with limits gets all of it, so it has numbers, texts and the like.

    patch: the side of a patch in pixels. merge: the side of a block that becomes one row.
    resample: Pillow's number of the filter.
    marker: the text of the token that chat templates write once for each picture.
    before, after: the texts of the tokens around the rows; "" = there are none.
    gap: the text before and after each marker that templates do not write.
    """

    patch: int
    merge: int = 1
    resample: int = 3
    marker: str
    before: str = ""
    after: str = ""
    gap: str = ""

    @property
    def placeholder(self) -> str:
        """The text of the token for a row of the tower; it may be the marker."""
        return self.marker

    @property
    def frame(self) -> tuple[str, str]:
        """The texts that chat templates write before and after the marker."""
        return _FRAMES.get(self.marker, ("", ""))

    @property
    def written(self) -> str | None:
        """The text that chat templates write instead of the marker; None: they write the marker."""
        return _WRITTEN.get(self.marker)

    @property
    def block(self) -> int:
        """The side in pixels of a block of patches that becomes one row."""
        return self.patch * self.merge

    @property
    def patch_bytes(self) -> int:
        """The bytes of one patch."""
        return 3 * self.patch**2

    @property
    def document_page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        raise NotImplementedError

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels.

        Raises InvalidRequest if a picture cannot have this size.
        """
        raise NotImplementedError

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture: uint8 [patches, patch * patch * 3].

        The columns have the order (y, x, channel). Tiles follow each other, and the patches of
        a tile are in merge order: blocks of patches that the tower merges, from left to right and
        from top to bottom, and so the patches of a block.
        """
        raise NotImplementedError

    def changed(self, settings: Mapping[str, Any]) -> Self:
        """Return the family with the settings of a request or of the server.

        Raises InvalidRequest if the family has no such setting, or not this value.
        """
        family = self
        for name, value in settings.items():
            if name == "detail" and value in DETAILS:
                family = family.in_low_detail() if value == "low" else family
            else:
                family = family.with_setting(name, value)
        return family

    def in_low_detail(self) -> Self:
        """Return the family that makes few rows of a picture; by default as many as otherwise."""
        return self

    def with_setting(self, name: str, value: Any) -> Self:
        """Return the family with a setting, other than a level of `detail` that all families have.

        Raises InvalidRequest if the family has no such setting, or not this value.
        """
        raise NotImplementedError

    def for_pictures(self, _count: int) -> Self:
        """Return the family for a request with so many pictures, pages of documents included."""
        return self

    def replaced(self, **numbers: Any) -> Self:
        """Return the family with other numbers."""
        return msgspec.structs.replace(self, **numbers)


class SquareTiles(Family, frozen=True, kw_only=True):
    """A family that shows a picture as tiles, and as a whole beside them.

    tile: the side of a tile in pixels.
    most_rows: the most rows of a picture; 0 = no limit besides the tiles.
    whole: the text of the token before the rows of the whole picture.
    """

    tile: int
    marker: str = "<image>"
    whole: str = "<global-img>"
    most_rows: int = 0

    @property
    def rows_of_tile(self) -> int:
        """How many rows of the tower a tile becomes."""
        side: int = self.tile // self.patch // self.merge
        return side * side


class OneTile(Family, frozen=True, kw_only=True):
    """A family that scales a picture, and shows it as one tile."""

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) in pixels of a scaled picture.

        Raises InvalidRequest as `layout` does.
        """
        raise NotImplementedError

    def framed(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) in pixels of the tile of a scaled picture."""
        return width, height

    def text(self, columns: int, rows: int) -> str:
        """Return the text in place of the marker for so many rows of the tower."""
        return f"{self.before}{self.placeholder * (columns * rows)}{self.after}"

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels; see Family."""
        scaled_size = self.scaled(width, height)
        columns, lines = (length // self.patch for length in self.framed(*scaled_size))
        grid_columns, rows = columns // self.merge, lines // self.merge
        text = self.text(grid_columns, rows)
        return PictureLayout(((lines, columns),), text, *scaled_size, rows=grid_columns * rows)

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family."""
        import numpy as np
        from PIL.Image import Resampling

        picture = image.resize(self.scaled(*image.size), Resampling(self.resample))
        return in_merge_order(np.asarray(picture)[None], self.patch, self.merge)
