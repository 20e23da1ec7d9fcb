"""Idefics3, SmolVLM, SmolVLM2, and Granite-Docling 258M: square tiles, and the whole picture.

Source: the image processors and processors of transformers 5.24 (Idefics3, SmolVLM).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.base import SquareTiles
from cpuserve.media.pictures.families.preprocessing import (
    PictureFiles,
    check_rows,
    cut_tiles,
    in_merge_order,
    is_count,
    named_tiles,
    part_of,
    read_filter,
    read_flag,
    read_number,
    refuse_detail,
    refuse_setting,
    setting_error,
)
from cpuserve.media.pictures.layout import PictureLayout

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

# The longest side that these processors make of any picture.
_MOST_SIDE = 4096


class Idefics3(SquareTiles, frozen=True, kw_only=True):
    """The numbers of one checkpoint.

    longest: the longer side after scaling, in pixels; 0 = `height` and `width` instead.
    splits: whether a picture becomes tiles, and not only one whole picture.
    around, whole: the texts of the tokens of the prompt.
    """

    longest: int = 0
    height: int = 0
    width: int = 0
    scales: bool = True
    splits: bool = True
    resample: int = 1
    around: str = "<fake_token_around_image>"

    @property
    def document_page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        return max(self.longest, self.height, self.width, self.tile)

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels."""
        fitting = self._fitting(width, height)
        lines, columns = fitting._grid(*fitting._tiled(width, height))
        rows, number = self.rows_of_tile, lines * columns + 1
        side = self.tile // self.patch
        scaled_size = fitting._scaled(width, height) if self.splits else (self.tile, self.tile)
        return PictureLayout(
            ((side, side),) * number, self._text(lines, columns), *scaled_size, rows=rows * number
        )

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL.Image import Resampling

        fitting = self._fitting(*image.size)
        filter_ = Resampling(self.resample)
        for size in fitting._steps(*image.size):
            image = image.resize(size, filter_)
        tiles = np.asarray(image)[None]
        if self._grid(*image.size) != (0, 0):
            overview = np.asarray(image.resize((self.tile, self.tile), filter_))
            tiles = np.stack([*cut_tiles(tiles[0], self.tile), overview])
        return in_merge_order(tiles, self.patch, self.merge)

    def with_setting(self, name: str, value: Any) -> Idefics3:
        """Return the family with a setting; see Family."""
        if name == "detail":
            refuse_detail(value)
        if name == "do_image_splitting":
            return self.replaced(splits=read_flag(name, value))
        if name == "size":
            longest = value.get("longest_edge") if isinstance(value, Mapping) else None
            if not is_count(longest, self.tile, _MOST_SIDE) or set(value) != {"longest_edge"}:
                refuse_setting(
                    name,
                    f'must be {{"longest_edge": N}} with N from {self.tile} to {_MOST_SIDE}, '
                    f"got {value!r:.60}",
                )
            return self.replaced(longest=longest, height=0, width=0)
        if name == "max_tokens":
            if not is_count(value, self.rows_of_tile):
                minimum = f"{self.rows_of_tile}, the tokens of one tile"
                refuse_setting(name, f"must be at least {minimum}, got {value!r:.40}")
            return self.replaced(most_rows=min(value, self.most_rows or value))
        raise setting_error(
            name,
            "is no setting of this model's pictures: it has size (longest_edge), "
            "do_image_splitting, detail, and a maximum number of tokens",
        )

    def in_low_detail(self) -> Idefics3:
        """Return the family that makes few rows of a picture."""
        return self.replaced(splits=False)

    def _fitting(self, width: int, height: int) -> Idefics3:
        """Return the family with the largest size at which the picture has at most most_rows."""
        if not self.most_rows:
            return self
        longest = self.longest or max(self.height, self.width)
        family = self
        while family.splits:
            rows, columns = family._grid(*family._tiled(width, height))
            if (rows * columns + 1) * self.rows_of_tile <= self.most_rows:
                break
            longest = (longest - 1) // self.tile * self.tile
            family = family.replaced(
                longest=longest, height=0, width=0, splits=longest > 0, scales=True
            )
        return family

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size after the first scaling, with the aspect kept."""
        if not self.scales:
            return width, height
        if not self.longest:
            return self.width, self.height
        aspect = width / height
        if width >= height:
            width, height = self.longest, int(self.longest / aspect)
            height += height % 2
        else:
            width, height = int(self.longest * aspect), self.longest
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        aspect = width / height
        if max(width, height) > _MOST_SIDE:
            if width >= height:
                width, height = _MOST_SIDE, int(_MOST_SIDE / aspect)
            else:
                width, height = int(_MOST_SIDE * aspect), _MOST_SIDE
        return max(width, 1), max(height, 1)

    def _tiled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size before tiles are cut: multiples of a tile, or one tile."""
        if not self.splits:
            return self.tile, self.tile
        width, height = self._scaled(width, height)
        aspect, tile = width / height, self.tile
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / aspect) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * aspect) / tile) * tile
        return max(width, 1), max(height, 1)

    def _steps(self, width: int, height: int) -> list[tuple[int, int]]:
        """Return the sizes of all scalings, one after another."""
        first_step = [self._scaled(width, height)] if self.scales else []
        return [*first_step, self._tiled(width, height)]

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (rows, columns) of the tiles; (0, 0) if the whole picture is the only tile."""
        if max(width, height) <= self.tile:
            return 0, 0
        return height // self.tile, width // self.tile

    def _text(self, lines: int, columns: int) -> str:
        rows = self.marker * self.rows_of_tile
        overview = f"{self.around}{self.whole}{rows}{self.around}"
        if not lines:
            return overview
        return f"{named_tiles(columns, lines, self.around, rows)}\n{overview}"


def idefics3(files: PictureFiles) -> Idefics3:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    processor = files.processor
    patch = files.of_vision("patch_size")
    merge = read_number(files.config.get("scale_factor"), "scale_factor")
    largest = files.of_vision("image_size")
    edge = part_of(processor, "max_image_size").get("longest_edge")
    tile, size = read_number(edge, "max_image_size.longest_edge"), part_of(processor, "size")
    sides: dict[str, Any] = {
        name: read_number(size[key], f"size.{key}")
        for name, key in (("longest", "longest_edge"), ("height", "height"), ("width", "width"))
        if size.get(key)
    }
    if "longest" not in sides and len(sides) < 2:
        msg = f"size is {size!r:.60}: longest_edge is needed, or height and width"
        raise ModelError(msg)
    if tile > largest or tile % (patch * merge):
        msg = (
            f"tiles of {tile} pixels do not fit the tower, which reads {largest} pixels in patches "
            f"of {patch} and merges {merge} x {merge} of them"
        )
        raise ModelError(msg)
    family = Idefics3(
        tile=tile,
        patch=patch,
        merge=merge,
        **sides,
        scales=processor.get("do_resize", True) is not False,
        splits=processor.get("do_image_splitting", True) is not False,
        resample=read_filter(processor, 1),
        marker=files.token("image", "<image>"),
        around=files.token("fake_image", "<fake_token_around_image>"),
        whole=files.token("global_image", "<global-img>"),
    )
    check_rows("image_seq_len", files.whole.get("image_seq_len"), family.rows_of_tile)
    return family
