"""LLaVA-NeXT (1.6): the whole picture as a square, and its tiles on one of a few canvases.

The rows of the tiles are put together as lines, without the rows that are only padding.
Source: the image processor and the processor of LLaVA-NeXT in transformers 5.24.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.base import Family
from cpuserve.media.pictures.families.llava import read_square
from cpuserve.media.pictures.families.preprocessing import (
    PictureFiles,
    cut_tiles,
    in_merge_order,
    is_count,
    read_filter,
    refuse_setting,
    value_error,
)
from cpuserve.media.pictures.layout import PictureLayout, line_shape

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_MOST_TILES = 64


class LlavaNextPictures(Family, frozen=True, kw_only=True):
    """The numbers of one checkpoint.

    side: the pixels of a side of a tile.
    canvases: (tiles down, tiles across) of each canvas.
    """

    side: int
    canvases: tuple[tuple[int, int], ...]
    marker: str = "<image>"

    @property
    def document_page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        return self.side * max(self._canvas(1275, 1650))

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels."""
        grid_rows, columns = self._canvas(width, height)
        side = self.side // self.patch
        lines = self._lines(width, height)
        count, length = line_shape(lines)
        rows = side**2 + count * (length + 1)
        scaled_size = self._scaled(width, height)
        tiles = ((side, side),) * (1 + grid_rows * columns)
        return PictureLayout(tiles, self.marker * rows, *scaled_size, rows=rows, lines=lines)

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL.Image import Resampling

        (rows, columns), filter_ = self._canvas(*image.size), Resampling(self.resample)
        width, height = self._scaled(*image.size)
        canvas = np.zeros((rows * self.side, columns * self.side, 3), np.uint8)
        top, left = (canvas.shape[0] - height) // 2, (canvas.shape[1] - width) // 2
        scaled = np.asarray(image.resize((width, height), filter_))
        canvas[top : top + height, left : left + width] = scaled
        overview = np.asarray(image.resize((self.side, self.side), filter_))
        tiles = np.concatenate([overview[None], cut_tiles(canvas, self.side)])
        tile_side = self.side // self.patch * self.patch  # a tile may end with a part of a patch
        return in_merge_order(tiles[:, :tile_side, :tile_side], self.patch, 1)

    def in_low_detail(self) -> LlavaNextPictures:
        """Return the family that makes few rows of a picture."""
        min_tiles = min(map(math.prod, self.canvases))
        return self.replaced(canvases=tuple(c for c in self.canvases if math.prod(c) == min_tiles))

    def with_setting(self, name: str, value: Any) -> LlavaNextPictures:
        """Return the family with a setting; see Family.

        max_tokens leaves the canvases on which no picture has more rows.
        """
        if name != "max_tokens":
            raise value_error(
                name,
                value,
                "the settings of this model's pictures are detail, and a maximum number of tokens",
            )
        sizes = {canvas: self._most_rows(*canvas) for canvas in self.canvases}
        minimum = min(sizes.values())
        if not is_count(value, minimum):
            refuse_setting(
                name,
                f"must be at least {minimum}, the tokens of a large picture on the smallest canvas"
                f", got {value!r:.40}",
            )
        return self.replaced(canvases=tuple(c for c, rows in sizes.items() if rows <= value))

    def _most_rows(self, rows: int, columns: int) -> int:
        side: int = self.side // self.patch
        return side**2 + rows * side * (columns * side + 1)

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """Return (tiles down, tiles across) of the canvas that keeps most pixels of a picture.

        Of canvases that keep as many, it is the smallest.
        """
        best, best_pixels, least_waste = self.canvases[0], 0, float("inf")
        for rows, columns in self.canvases:
            canvas_height, canvas_width = rows * self.side, columns * self.side
            scale = min(canvas_width / width, canvas_height / height)
            pixels = min(int(width * scale) * int(height * scale), width * height)
            waste = canvas_height * canvas_width - pixels
            if pixels > best_pixels or (pixels == best_pixels and waste < least_waste):
                best, best_pixels, least_waste = (rows, columns), pixels, waste
        return best

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) of a picture on its canvas, with its aspect."""
        rows, columns = self._canvas(width, height)
        canvas_height, canvas_width = rows * self.side, columns * self.side
        if canvas_width / width < canvas_height / height:
            return canvas_width, min(math.ceil(height * (canvas_width / width)), canvas_height)
        return min(math.ceil(width * (canvas_height / height)), canvas_width), canvas_height

    def _lines(self, width: int, height: int) -> tuple[int, ...]:
        """Return PictureLayout.lines: the part of the canvas without padding."""
        rows, columns = self._canvas(width, height)
        side = self.side // self.patch
        canvas_height, canvas_width = rows * side, columns * side
        top, left = 0, 0
        if width / height > canvas_width / canvas_height:
            top = (canvas_height - int(round(height * (canvas_width / width), 7))) // 2
        else:
            left = (canvas_width - int(round(width * (canvas_height / height), 7))) // 2
        return rows, columns, top, canvas_height - top, left, canvas_width - left


def llava_next(files: PictureFiles) -> LlavaNextPictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    side, patch = read_square(files)
    for name in ("do_resize", "do_center_crop", "do_pad"):
        if not files.processor.get(name, True):
            msg = f"{name} must be true: the tower reads squares of one size"
            raise ModelError(msg)
    return LlavaNextPictures(
        side=side,
        patch=patch,
        canvases=read_canvases(files, side),
        resample=read_filter(files.processor, 3),
        marker=files.token("image", "<image>"),
    )


def read_canvases(files: PictureFiles, side: int) -> tuple[tuple[int, int], ...]:
    """Return (tiles down, tiles across) of each canvas; ModelError if one is no number of tiles."""
    pinpoints = files.processor.get("image_grid_pinpoints")
    if files.config.get("image_grid_pinpoints", pinpoints) != pinpoints:
        msg = "image_grid_pinpoints of config.json and preprocessor_config.json are not equal"
        raise ModelError(msg)
    canvases = [
        (size[0] // side, size[1] // side)
        for size in (pinpoints if isinstance(pinpoints, list) else [])
        if isinstance(size, list)
        and len(size) == 2
        and all(isinstance(length, int) and length > 0 and length % side == 0 for length in size)
    ]
    if not canvases or not isinstance(pinpoints, list) or len(canvases) != len(pinpoints):
        msg = (
            f"image_grid_pinpoints is {pinpoints!r:.60}: a list of sizes in multiples of {side} "
            "pixels is needed"
        )
        raise ModelError(msg)
    if max(map(math.prod, canvases)) > _MOST_TILES:
        msg = f"image_grid_pinpoints has more than {_MOST_TILES} tiles"
        raise ModelError(msg)
    return tuple(canvases)
