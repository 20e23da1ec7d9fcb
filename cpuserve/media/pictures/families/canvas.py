"""Granite-Docling 500M, InternVL, Qianfan-OCR and Aya Vision: square tiles on a canvas.

The canvas is the one that is most like the picture. Source: the image processors of
Granite-Docling and GOT-OCR 2, and the processors of these models, in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.base import SquareTiles
from cpuserve.media.pictures.families.preprocessing import (
    PictureFiles,
    check_rows,
    cut_tiles,
    in_merge_order,
    is_count,
    named_tiles,
    read_filter,
    read_flag,
    read_number,
    refuse_detail,
    refuse_setting,
    value_error,
)
from cpuserve.media.pictures.layout import PictureLayout

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_MOST_SIDE = 16  # the tokens <row_i_col_j> of Granite-Docling end at 16
_MOST_TILES = 64


class WideRule(msgspec.Struct, frozen=True):
    """Which wide pages of Granite-Docling get more tiles.

    tiles: the most tiles of such a page; 0 = there is no rule.
    scale: the canvas of usual size must have less than this share of the page's width; 0 = any.
    min_aspect, max_aspect: the aspect, width by height, must be above the first number, and not
      above the second; 0 = any.
    """

    tiles: int = 0
    scale: float = 0.0
    min_aspect: float = 0.0
    max_aspect: float = 0.0


class CanvasTiles(SquareTiles, frozen=True, kw_only=True):
    """The numbers of one checkpoint.

    min_tiles, max_tiles: the number of tiles of a canvas; max_tiles = 1: the whole picture is the
      only tile.
    names: whether the prompt names the row and the column of each tile (Granite-Docling).
    numbered: the text before the number of each tile; "" = tiles have no numbers (Aya Vision).
    fine: whether tiles have four times as many rows as usual (Granite-Docling's `fine_route`).
    wide: which pages get more tiles.
    """

    min_tiles: int = 1
    max_tiles: int = 1
    names: bool = False
    numbered: str = ""
    fine: bool = False
    before: str = "<fake_token_around_image>"
    after: str = "<fake_token_around_image>"
    wide: WideRule = WideRule()

    @property
    def document_page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        columns, rows = self._canvas(1275, 1650)
        return self.tile * max(columns, rows)

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels."""
        columns, lines = self._canvas(width, height)
        number = columns * lines + (columns * lines > 1)
        side, rows = self.tile // self.patch, self.rows_of_tile * number
        canvas_size = columns * self.tile, lines * self.tile
        text = self._named(columns, lines) if self.names else self._plain(number)
        return PictureLayout(((side, side),) * number, text, *canvas_size, rows=rows)

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL.Image import Resampling

        (columns, rows), tile, filter_ = self._canvas(*image.size), self.tile, self.resample
        canvas = np.asarray(image.resize((columns * tile, rows * tile), Resampling(filter_)))
        tiles = cut_tiles(canvas, tile)
        if len(tiles) > 1:
            overview = image.resize((tile, tile), Resampling(filter_))
            tiles = np.stack([*tiles, np.asarray(overview)])
        return in_merge_order(tiles, self.patch, self.merge)

    def changed(self, settings: Mapping[str, Any]) -> CanvasTiles:
        """Return the family with settings; see Family."""
        family = super().changed(settings)
        if family.min_tiles > family.max_tiles:
            refuse_setting(
                "min_patches", f"must be at most {family.max_tiles}, got {family.min_tiles}"
            )
        return family

    def with_setting(self, name: str, value: Any) -> CanvasTiles:
        """Return the family with a setting; see Family."""
        if name == "detail":
            refuse_detail(value)
        if name == "crop_to_patches":
            return self if read_flag(name, value) else self.in_low_detail()
        if name == "min_patches":
            return self.replaced(min_tiles=_number(name, value, 1, _MOST_TILES))
        if name == "max_patches":
            return self.replaced(max_tiles=_number(name, value, 1, _MOST_TILES))
        if name == "max_tokens":
            number = _number(name, value, self.rows_of_tile)
            return self.replaced(most_rows=min(number, self.most_rows or number))
        if name == "fine_route" and self.names:
            if value is self.fine:
                return self
            model_route = "true" if self.fine else "false"
            refuse_setting(
                name,
                f"cannot be {value!r:.40}: fine_route of this model's preprocessor_config.json, "
                f"which is {model_route}, decides the connector that the server loads for all "
                "pictures",
            )
        settings = (
            "the settings of this model's pictures are crop_to_patches, min_patches, max_patches, "
            "detail, and a maximum number of tokens"
        )
        raise value_error(name, value, settings)

    def in_low_detail(self) -> CanvasTiles:
        """Return the family that makes few rows of a picture."""
        return self.replaced(min_tiles=1, max_tiles=1)

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """Return how many tiles the canvas of a picture has across and down."""
        max_tiles = self.max_tiles
        if max_tiles > 1 and self._is_wide(width, height):
            max_tiles = self.wide.tiles
        if self.most_rows:  # the whole picture is one more tile
            max_tiles = min(max_tiles, max(1, self.most_rows // self.rows_of_tile - 1))
        return self._most_alike(width, height, max_tiles)

    def _is_wide(self, width: int, height: int) -> bool:
        """Whether the page gets more tiles by the rule of Granite-Docling."""
        rule, aspect = self.wide, width / height
        if not rule.tiles or (rule.scale <= 0 and rule.min_aspect <= 0):
            return False
        if (rule.min_aspect > 0 and aspect <= rule.min_aspect) or (0 < rule.max_aspect < aspect):
            return False
        columns, _ = self._most_alike(width, height, self.max_tiles)
        return rule.scale <= 0 or columns * self.tile / width < rule.scale

    def _most_alike(self, width: int, height: int, max_tiles: int) -> tuple[int, int]:
        """Return the canvas of at most `max_tiles` tiles with the most similar aspect.

        Of canvases of the same aspect, a larger one needs a picture of half its area.
        """
        side = min(max_tiles, _MOST_SIDE) if self.names else max_tiles
        grids = sorted(
            (
                (columns, rows)
                for columns in range(1, side + 1)
                for rows in range(1, side + 1)
                if min(self.min_tiles, max_tiles) <= columns * rows <= max_tiles
            ),
            key=lambda grid: grid[0] * grid[1],
        )
        best, best_distance = (1, 1), float("inf")
        for grid in grids:
            distance = abs(width / height - grid[0] / grid[1])
            is_large = width * height > 0.5 * self.tile * self.tile * grid[0] * grid[1]
            if distance < best_distance or (distance == best_distance and is_large):
                best, best_distance = grid, distance
        return best

    def _plain(self, number: int) -> str:
        rows = self.marker * self.rows_of_tile
        if not self.numbered:
            return f"{self.before}{rows * number}{self.after}"
        tiles = "".join(f"{self.numbered}_{tile}{rows}" for tile in range(1, number))
        return f"{self.before}{tiles}{self.whole}{rows}{self.after}"

    def _named(self, columns: int, lines: int) -> str:
        rows = self.marker * self.rows_of_tile
        overview = f"\n{self.before}{self.whole}{rows}{self.after}" if columns * lines > 1 else ""
        return named_tiles(columns, lines, self.before, rows) + overview


def granite_docling(files: PictureFiles) -> CanvasTiles:
    """Return the family of Granite-Docling with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    processor = files.processor
    merge, fine = files.of_vision("scale_factor", 4), False
    if processor.get("fine_route"):
        merge, fine = read_number(merge // 2, "vision_config.scale_factor / 2"), True
    side, patch = files.of_vision("image_size", 512), files.of_vision("patch_size", 16)
    family = _tiles(files, tile=side, patch=patch, merge=merge, max_tiles=32, crops=True)
    wide = WideRule(
        int(_share(processor, "dense_max_patches")),
        *(_share(processor, f"dense_{name}") for name in ("max_scale", "min_aspect", "max_aspect")),
    )
    marker = files.token("image", "<image>")
    family = family.replaced(names=True, wide=wide, fine=fine, marker=marker)
    rows = family.rows_of_tile // 4 if fine else family.rows_of_tile
    check_rows("image_seq_len", files.whole.get("image_seq_len"), rows)
    return family


def internvl(files: PictureFiles) -> CanvasTiles:
    """Return the family of InternVL with the numbers of a checkpoint (FamilyReader).

    Its processor makes tiles, whatever the image processor's settings say about them.

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision, ratio = files.vision, files.config.get("downsample_ratio", 0.5)
    if not isinstance(ratio, int | float) or not 1e-3 < ratio <= 1:
        msg = f"downsample_ratio is {ratio!r:.40}: a number above 0.001, and at most 1, is needed"
        raise ModelError(msg)
    family = _tiles(
        replace(files, processor={**files.processor, "crop_to_patches": True}),
        tile=read_number(_one(vision.get("image_size", 448)), "vision_config.image_size"),
        patch=read_number(_one(vision.get("patch_size", 14)), "vision_config.patch_size"),
        merge=int(1 / ratio),
        max_tiles=12,
        crops=True,
    )
    check_rows("image_seq_length", files.whole.get("image_seq_length"), family.rows_of_tile)
    return family.replaced(
        marker=files.token("context_image", "<IMG_CONTEXT>"),
        before=files.token("start_image", "<img>"),
        after=files.token("end_image", "</img>"),
    )


def aya_vision(files: PictureFiles) -> CanvasTiles:
    """Return the family of Aya Vision with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    processor_config, config = files.whole, files.config
    side, patch = files.of_vision("image_size", 224), files.of_vision("patch_size", 16)
    merge = read_number(config.get("downsample_factor", 2), "downsample_factor")
    family = _tiles(files, tile=side, patch=patch, merge=merge, max_tiles=12, crops=False)
    # The processor knows the size of a tile, and how many pixels become a row.
    pixels = read_number(processor_config.get("patch_size", 28), "patch_size")
    pixels *= read_number(processor_config.get("downsample_factor", 1), "downsample_factor")
    rows = (read_number(processor_config.get("img_size", 364), "img_size") // pixels) ** 2
    check_rows("img_size / patch_size", rows, family.rows_of_tile)
    return family.replaced(
        marker=str(processor_config.get("img_patch_token", "<|IMG_PATCH|>")),
        before=str(processor_config.get("start_of_img_token", "<|START_OF_IMG|>")),
        after=str(processor_config.get("end_of_img_token", "<|END_OF_IMG|>")),
        numbered=str(processor_config.get("tile_token", "TILE")),
        whole=str(processor_config.get("tile_global_token", "TILE_GLOBAL")),
    )


def internvl_chat(files: PictureFiles) -> CanvasTiles:
    """Return the family of InternVLChatModel with the numbers of a checkpoint (FamilyReader).

    Its code makes tiles as the model's config says, and the image processor has the pixels' mean.

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    config, vision = files.config, files.vision
    image = config.get("force_image_size") or vision.get("image_size", 224)
    min_tiles, max_tiles = 1, 1
    if config.get("dynamic_image_size", False):
        if config.get("use_thumbnail", False) is not True:
            msg = "use_thumbnail is false: pictures of several tiles have the whole picture as well"
            raise ModelError(msg)
        min_tiles = config.get("min_dynamic_patch", 1)
        max_tiles = config.get("max_dynamic_patch", 6)
    size = {"height": image, "width": image}
    settings = {"size": size, "min_patches": min_tiles, "max_patches": max_tiles, "resample": 3}
    config_with_size = {**config, "vision_config": {**vision, "image_size": image}}
    return internvl(replace(files, config=config_with_size, processor=settings))


def _one(size: object) -> object:
    """Return the side of a square, which may be there twice."""
    is_square = isinstance(size, list | tuple) and len(size) == 2 and size[0] == size[1]
    return size[0] if is_square and isinstance(size, list | tuple) else size


def _tiles(
    files: PictureFiles, *, tile: int, patch: int, merge: int, max_tiles: int, crops: bool
) -> CanvasTiles:
    """Return the family with the tiles of an image processor. max_tiles, crops: its defaults.

    tile: the side of the pictures that the tower reads.
    """
    processor = files.processor
    files.check_square(tile)
    if tile % (patch * merge):
        msg = f"tiles of {tile} pixels are not whole blocks of {merge} x {merge} patches of {patch}"
        raise ModelError(msg)
    files.check_scaled()
    min_tiles = files.of_processor("min_patches", 1)
    number = files.of_processor("max_patches", max_tiles)
    if not processor.get("crop_to_patches", crops):
        min_tiles, number = 1, 1
    if not min_tiles <= number <= _MOST_TILES:
        msg = f"min_patches is {min_tiles} and max_patches {number}: at most {_MOST_TILES} are read"
        raise ModelError(msg)
    resample = read_filter(processor, 3)
    return CanvasTiles(
        tile=tile,
        patch=patch,
        merge=merge,
        min_tiles=min_tiles,
        max_tiles=number,
        resample=resample,
    )


def _share(processor: Mapping[str, Any], name: str) -> float:
    share = processor.get(name) or 0
    if not isinstance(share, int | float) or isinstance(share, bool) or share < 0:
        msg = f"{name} is {share!r:.40}: a number is needed to read pictures"
        raise ModelError(msg)
    return float(share)


def _number(name: str, value: object, low: int, high: int = 1 << 30) -> int:
    if not is_count(value, low, high):
        refuse_setting(name, f"must be a number from {low} to {high}, got {value!r:.40}")
    return value
