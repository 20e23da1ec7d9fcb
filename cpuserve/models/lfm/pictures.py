"""LFM2-VL: one picture of any aspect, or tiles and the whole picture if it is large.

Source: the image processor and the processor of transformers 5.24 (LFM2-VL).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.base import Family
from cpuserve.media.pictures.families.preprocessing import (
    PictureFiles,
    cut_tiles,
    in_merge_order,
    is_count,
    read_filter,
    read_flag,
    refuse_setting,
)
from cpuserve.media.pictures.layout import PictureLayout
from cpuserve.program.pictures import MOST_PATCHES

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_FLAGS = {"do_image_splitting": "splits", "use_thumbnail": "thumbnail"}


class Lfm2Pictures(Family, frozen=True, kw_only=True):
    """The numbers of one checkpoint.

    least, most: the rows of a picture that is not tiles, and of the whole picture beside tiles.
    tolerance: a picture with more pixels than this number times `most` rows becomes tiles.
    tile: the side of a tile in pixels. fewest, greatest: the number of tiles.
    splits: whether a large picture becomes tiles. thumbnail: whether the whole picture is added.
    most_rows: the most rows of all tiles of a picture; 0 = no limit.
    limit: the largest `most` that a request can choose.
    framed: whether the text has the tokens `before`, `after`, `whole`, and tokens of tiles.
    """

    least: int
    most: int
    tolerance: float
    tile: int
    fewest: int
    greatest: int
    limit: int
    splits: bool = True
    thumbnail: bool = True
    most_rows: int = 0
    resample: int = 2
    framed: bool = True
    marker: str = "<image>"
    before: str = "<|image_start|>"
    after: str = "<|image_end|>"
    whole: str = "<|img_thumbnail|>"

    @property
    def document_page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        tiles = self.greatest * self.tile**2 if self.splits else 0
        return math.isqrt(4 * max(tiles, self.most * self.block**2) // 3)

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels."""
        fitting = self._fitting(width, height)
        grid_columns, grid_rows = fitting._grid(width, height)
        scaled_size = fitting._scaled(width, height)
        scaled_patches = scaled_size[1] // self.patch, scaled_size[0] // self.patch
        side = self.tile // self.patch
        tiles = ((side, side),) * (grid_rows * grid_columns)
        if not tiles or self.thumbnail:
            tiles = (*tiles, scaled_patches)
        if grid_columns:
            scaled_size = grid_columns * self.tile, grid_rows * self.tile
        rows = [rows // self.merge * (columns // self.merge) for rows, columns in tiles]
        names = [
            f"<|img_row_{y + 1}_col_{x + 1}|>"
            for y in range(grid_rows)
            for x in range(grid_columns)
        ]
        names += [self.whole if names else ""] * (len(rows) - len(names))
        name = names if self.framed else [""] * len(names)
        text = "".join(f"{n}{self.marker * count}" for n, count in zip(name, rows, strict=True))
        if self.framed:
            text = f"{self.before}{text}{self.after}"
        return PictureLayout(tiles, text, *scaled_size, rows=sum(rows))

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL.Image import Resampling

        fitting, filter_ = self._fitting(*image.size), Resampling(self.resample)
        columns, rows = fitting._grid(*image.size)
        parts = []
        if columns:
            large = image.resize((columns * self.tile, rows * self.tile), filter_)
            tiles = cut_tiles(np.asarray(large), self.tile)
            parts.append(in_merge_order(tiles, self.patch, self.merge))
        if not columns or self.thumbnail:
            thumbnail = np.asarray(image.resize(fitting._scaled(*image.size), filter_))
            parts.append(in_merge_order(thumbnail[None], self.patch, self.merge))
        return np.concatenate(parts)

    def changed(self, settings: Mapping[str, Any]) -> Lfm2Pictures:
        """Return the family with settings; see Family."""
        family = super().changed(settings)
        if family.least > family.most or family.fewest > family.greatest:
            refuse_setting(next(iter(settings)), "makes the least more than the most")
        return family

    def in_low_detail(self) -> Lfm2Pictures:
        """Return the family that makes few rows of a picture."""
        return self.replaced(splits=False)

    def with_setting(self, name: str, value: Any) -> Lfm2Pictures:
        """Return the family with a setting; see Family."""
        fields = {
            "min_image_tokens": ("least", self.limit),
            "max_image_tokens": ("most", self.limit),
            "min_tiles": ("fewest", 100),
            "max_tiles": ("greatest", 100),
            "max_tokens": ("most_rows", 1 << 30),
        }
        if name in _FLAGS:
            return self.replaced(**{_FLAGS[name]: read_flag(name, value)})
        if name not in fields:
            refuse_setting(
                name,
                "is no setting of this model's pictures: it has do_image_splitting, "
                "use_thumbnail, min_image_tokens, max_image_tokens, min_tiles, max_tiles, "
                "detail, and a maximum number of tokens",
            )
        field, limit = fields[name]
        if not is_count(value, 1, limit):
            refuse_setting(name, f"must be a number from 1 to {limit}, got {value!r:.40}")
        if name == "max_tokens" and self.most_rows:
            value = min(value, self.most_rows)
        return self.replaced(**{field: value})

    def _fitting(self, width: int, height: int) -> Lfm2Pictures:
        """Return the family with so few tiles, or rows, that `most_rows` has room for a picture."""
        if not self.most_rows:
            return self
        min_rows, max_rows, limit = (
            min(n, self.most_rows) for n in (self.least, self.most, self.limit)
        )
        family = self.replaced(least=min_rows, most=max_rows, limit=limit)
        side = self.tile // self.block
        grid_columns, grid_rows = self._grid(width, height)
        rows = grid_columns * grid_rows * side**2 + self.most * self.thumbnail
        return family.in_low_detail() if rows > self.most_rows else family

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) of the whole picture, in whole blocks."""
        block, sides = self.block, (width, height)
        min_pixels, max_pixels = (rows * block**2 for rows in (self.least, self.most))
        scaled_sides = [max(block, round(side / block) * block) for side in sides]
        if math.prod(scaled_sides) > max_pixels:
            beta = math.sqrt(height * width / max_pixels)
            scaled_sides = [max(block, math.floor(side / beta / block) * block) for side in sides]
        elif math.prod(scaled_sides) < min_pixels:
            beta = math.sqrt(min_pixels / (height * width))
            scaled_sides = [math.ceil(side * beta / block) * block for side in sides]
        # A long and narrow picture, which the image processor would leave too large for the tower.
        longer = scaled_sides.index(max(scaled_sides))
        room = self.limit // (scaled_sides[1 - longer] // block) * block
        scaled_sides[longer] = max(block, min(scaled_sides[longer], room))
        return scaled_sides[0], scaled_sides[1]

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the tiles (columns, rows) of a picture; (0, 0) if it does not become tiles."""
        block = self.block
        pixels = math.prod(max(self.patch, round(side / block) * block) for side in (height, width))
        large = pixels > self.most * block**2 * self.tolerance
        if not self.splits or not large or self.fewest == self.greatest == 1:
            return 0, 0
        aspect, best, best_distance = width / height, (1, 1), math.inf
        for columns, rows in _grids(self.fewest, self.greatest):
            distance = abs(aspect - columns / rows)
            roomy = width * height > 0.5 * self.tile**2 * columns * rows
            if distance < best_distance or (distance == best_distance and roomy):
                best, best_distance = (columns, rows), distance
        return best


def _grids(fewest: int, greatest: int) -> list[tuple[int, int]]:
    """Return all (columns, rows) of `fewest` to `greatest` tiles, in the image processor's order.

    Of grids with equally many tiles, the processor takes those first that its set has first.
    """
    grids = {
        (columns, rows)
        for count in range(fewest, greatest + 1)
        for columns in range(1, count + 1)
        for rows in range(1, count + 1)
        if fewest <= columns * rows <= greatest
    }
    return sorted(grids, key=math.prod)


def lfm2_vl(files: PictureFiles) -> Lfm2Pictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    config, processor, vision = files.config, files.processor, files.vision
    patch = files.of_processor("encoder_patch_size")
    merge = files.of_processor("downsample_factor")
    for name, key, processor_value, model_value in (
        ("encoder_patch_size", "vision_config.patch_size", patch, vision.get("patch_size", patch)),
        ("downsample_factor", "downsample_factor", merge, config.get("downsample_factor", merge)),
    ):
        if model_value != processor_value:
            msg = f"{name} is {processor_value}, but {key} of the model is {model_value!r:.40}"
            raise ModelError(msg)
    names = ("min_image_tokens", "max_image_tokens", "tile_size", "min_tiles", "max_tiles")
    min_rows, max_rows, tile, fewest, greatest = (files.of_processor(name) for name in names)
    tolerance = processor.get("max_pixels_tolerance")
    if not isinstance(tolerance, int | float) or isinstance(tolerance, bool) or tolerance < 1:
        msg = f"max_pixels_tolerance is {tolerance!r:.40}: a number of at least 1 is needed"
        raise ModelError(msg)
    if (
        min_rows > max_rows
        or fewest > greatest
        or tile % (patch * merge)
        or max_rows * merge**2 > MOST_PATCHES
    ):
        numbers = f"{min_rows}, {max_rows}, {tile}, {fewest} and {greatest}"
        msg = f"{', '.join(names)} are {numbers}, which is no way to scale pictures"
        raise ModelError(msg)
    return Lfm2Pictures(
        least=min_rows,
        most=max_rows,
        tolerance=tolerance,
        tile=tile,
        fewest=fewest,
        greatest=greatest,
        patch=patch,
        merge=merge,
        limit=max(max_rows, (tile // (patch * merge)) ** 2),
        splits=processor.get("do_image_splitting", True) is not False,
        thumbnail=processor.get("use_thumbnail", True) is not False,
        resample=read_filter(processor, 2),
        framed=files.whole.get("use_image_special_tokens", True) is not False,
        marker=files.token("image", "<image>"),
        before=files.token("image_start", "<|image_start|>"),
        after=files.token("image_end", "<|image_end|>"),
        whole=files.token("image_thumbnail", "<|img_thumbnail|>"),
    )
