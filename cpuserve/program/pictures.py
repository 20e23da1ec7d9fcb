"""What the preprocessing of pictures and their towers agree on: sizes, tiles and lines."""

from __future__ import annotations

from functools import lru_cache

import msgspec

KIND = "image"  # of MediaItem
# The most patches of a picture for a tower that reads pictures of any size; larger pictures are
# scaled. A page of 1275 x 1650 pixels has 8,320 patches of 16 x 16.
MOST_PATCHES = 8448


class PictureForm(msgspec.Struct, array_like=True, frozen=True):
    """How the patches of a picture, one row of bytes for each, make the rows of its tokens.

    tiles: (rows, columns) of each tile, counted in patches.
    lines: how the rows of tiles become lines of a canvas, each with a row for its end: the tiles
      down and across, the first line and the end of the lines that are kept, and the same for the
      columns; then perhaps the lines and columns after scaling. The first tile, which
      is the whole picture, comes before. Each patch has a row.
      () = the rows follow each other as the tower makes them.
    """

    tiles: tuple[tuple[int, int], ...]
    lines: tuple[int, ...] = ()

    @staticmethod
    def of(packed: bytes) -> PictureForm:
        """Return the form in MediaItem.form of a picture."""
        return _form(packed)

    def packed(self) -> bytes:
        """Return this as MediaItem.form."""
        return msgspec.msgpack.encode(self)

    @property
    def num_patches(self) -> int:
        """The number of patches of all tiles."""
        return sum(rows * columns for rows, columns in self.tiles)


@lru_cache(maxsize=4096)  # a step asks for the forms of all pictures of its requests
def _form(packed: bytes) -> PictureForm:
    return msgspec.msgpack.decode(packed, type=PictureForm)
