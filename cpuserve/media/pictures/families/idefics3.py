"""Idefics3, SmolVLM, SmolVLM2, and Granite-Docling 258M: square tiles, and the whole picture.

Source: the image processors and processors of transformers 5.24 (Idefics3, SmolVLM).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.preprocessing import (
    in_merge_order,
    is_low,
    read_filter,
    read_number,
    refuse_setting,
)
from cpuserve.media.pictures.layout import OneMarker, PictureLayout

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

# The longest side that these processors make of any picture.
_MOST_SIDE = 4096


class Idefics3(OneMarker, frozen=True, kw_only=True, tag="idefics3"):
    """The numbers of one checkpoint.

    longest: the longer side after scaling, in pixels; 0 = `height` and `width` instead.
    tile: the side of a tile in pixels.
    splits: whether a picture becomes tiles, and not only one whole picture.
    resample: Pillow's number of the filter.
    patch: the side of a patch in pixels. merge: the side of a block that becomes one row.
    most_rows: the most rows of a picture; 0 = no limit besides the size.
    marker, around, whole: the texts of the tokens of the prompt.
    """

    tile: int
    patch: int
    merge: int
    longest: int = 0
    height: int = 0
    width: int = 0
    scales: bool = True
    splits: bool = True
    resample: int = 1
    most_rows: int = 0
    marker: str = "<image>"
    around: str = "<fake_token_around_image>"
    whole: str = "<global-img>"

    @property
    def rows_of_tile(self) -> int:
        """How many rows of the tower a tile becomes."""
        side: int = self.tile // self.patch // self.merge
        return side * side

    @property
    def page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        return max(self.longest, self.height, self.width, self.tile)

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels."""
        fitting = self._fitting(width, height)
        down, across = fitting._grid(*fitting._tiled(width, height))
        rows, number = self.rows_of_tile, down * across + 1
        side = self.tile // self.patch
        used = fitting._scaled(width, height) if self.splits else (self.tile, self.tile)
        return PictureLayout(
            ((side, side),) * number, self._text(down, across), *used, rows=rows * number
        )

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL.Image import Resampling

        fitting = self._fitting(*image.size)
        filter_ = Resampling(self.resample)
        for size in fitting._steps(*image.size):
            image = image.resize(size, filter_)
        down, across = self._grid(*image.size)
        whole = image.resize((self.tile, self.tile), filter_) if down else image
        pixels = np.asarray(image)
        tile = self.tile
        tiles = [
            pixels[y * tile : (y + 1) * tile, x * tile : (x + 1) * tile]
            for y in range(down)
            for x in range(across)
        ]
        return in_merge_order(np.stack([*tiles, np.asarray(whole)]), self.patch, self.merge)

    def changed(self, settings: Mapping[str, Any]) -> Idefics3:
        """Return the family with these settings; InvalidRequest if it cannot follow one."""
        made = self
        for name, value in settings.items():
            if name == "detail":
                made = made._with_detail(value)
            elif name == "do_image_splitting":
                if not isinstance(value, bool):
                    refuse_setting(name, f"must be true or false, got {value!r:.40}")
                made = msgspec.structs.replace(made, splits=value)
            elif name == "size":
                made = made._with_size(value)
            elif name == "max_tokens":
                made = made._with_most(value)
            else:
                refuse_setting(
                    name,
                    "is no setting of this model's pictures: it has size (longest_edge), "
                    "do_image_splitting, detail, and a maximum number of tokens",
                )
        return made

    def _with_detail(self, detail: object) -> Idefics3:
        return msgspec.structs.replace(self, splits=False) if is_low(detail) else self

    def _with_size(self, size: object) -> Idefics3:
        longest = size.get("longest_edge") if isinstance(size, Mapping) else None
        if (
            not isinstance(size, Mapping)
            or set(size) != {"longest_edge"}
            or not isinstance(longest, int)
            or isinstance(longest, bool)
            or not self.tile <= longest <= _MOST_SIDE
        ):
            refuse_setting(
                "size",
                f'must be {{"longest_edge": N}} with N from {self.tile} to {_MOST_SIDE}, '
                f"got {size!r:.60}",
            )
        return msgspec.structs.replace(self, longest=longest, height=0, width=0)

    def _with_most(self, most: object) -> Idefics3:
        if not isinstance(most, int) or isinstance(most, bool) or most < self.rows_of_tile:
            refuse_setting(
                "max_tokens",
                f"must be at least {self.rows_of_tile}, the tokens of one tile, got {most!r:.40}",
            )
        return msgspec.structs.replace(self, most_rows=min(most, self.most_rows or most))

    def _fitting(self, width: int, height: int) -> Idefics3:
        """Return the family with the largest size at which the picture has at most most_rows."""
        if not self.most_rows:
            return self
        longest = self.longest or max(self.height, self.width)
        made = self
        while made.splits:
            down, across = made._grid(*made._tiled(width, height))
            if (down * across + 1) * self.rows_of_tile <= self.most_rows:
                break
            longest = (longest - 1) // self.tile * self.tile
            made = msgspec.structs.replace(
                made, longest=longest, height=0, width=0, splits=longest > 0, scales=True
            )
        return made

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
        first = [self._scaled(width, height)] if self.scales else []
        return [*first, self._tiled(width, height)]

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return (rows, columns) of the tiles; (0, 0) if the whole picture is the only tile."""
        if max(width, height) <= self.tile:
            return 0, 0
        return height // self.tile, width // self.tile

    def _text(self, down: int, across: int) -> str:
        rows = self.marker * self.rows_of_tile
        whole = f"{self.around}{self.whole}{rows}{self.around}"
        if not down:
            return whole
        lines = (
            "".join(f"{self.around}<row_{y + 1}_col_{x + 1}>{rows}" for x in range(across)) + "\n"
            for y in range(down)
        )
        return "".join(lines) + "\n" + whole


def idefics3(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> Idefics3:
    """Return the family with the numbers of a checkpoint.

    config: config.json. processor: the settings of the image processor.
    whole: the settings of the processor. tokens: the texts of special tokens, by name.

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    patch = read_number(vision.get("patch_size"), "vision_config.patch_size")
    merge = read_number(config.get("scale_factor"), "scale_factor")
    most = read_number(vision.get("image_size"), "vision_config.image_size")
    tile = read_number(_edge(processor.get("max_image_size")), "max_image_size.longest_edge")
    size = processor.get("size")
    size = size if isinstance(size, Mapping) else {}
    sides = {
        name: read_number(size[key], f"size.{key}")
        for name, key in (("longest", "longest_edge"), ("height", "height"), ("width", "width"))
        if size.get(key)
    }
    if "longest" not in sides and len(sides) < 2:
        msg = f"size is {size!r:.60}: longest_edge is needed, or height and width"
        raise ModelError(msg)
    if tile > most or tile % (patch * merge):
        msg = (
            f"tiles of {tile} pixels do not fit the tower, which reads {most} pixels in patches of "
            f"{patch} and merges {merge} x {merge} of them"
        )
        raise ModelError(msg)
    made = Idefics3(
        tile=tile,
        patch=patch,
        merge=merge,
        **sides,
        scales=processor.get("do_resize", True) is not False,
        splits=processor.get("do_image_splitting", True) is not False,
        resample=read_filter(processor, 1),
        marker=tokens.get("image_token", "<image>"),
        around=tokens.get("fake_image_token", "<fake_token_around_image>"),
        whole=tokens.get("global_image_token", "<global-img>"),
    )
    rows = whole.get("image_seq_len")
    if rows is not None and rows != made.rows_of_tile:
        msg = f"image_seq_len is {rows!r}, but a tile has {made.rows_of_tile} rows"
        raise ModelError(msg)
    return made


def _edge(size: object) -> object:
    return size.get("longest_edge") if isinstance(size, Mapping) else None
