"""Granite-Docling 500M, InternVL, Qianfan-OCR and Aya Vision: square tiles on a canvas.

The canvas is the one that is most like the picture. Source: the image processors of
Granite-Docling and GOT-OCR 2, and the processors of these models, in transformers 5.24.
"""

from __future__ import annotations

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

_MOST_SIDE = 16  # the tokens <row_i_col_j> of Granite-Docling end at 16
_MOST_TILES = 64


class WideRule(msgspec.Struct, frozen=True):
    """Which wide pages of Granite-Docling get more tiles.

    tiles: the most tiles of such a page; 0 = there is no rule.
    scale: the canvas of usual size must have less than this share of the page's width; 0 = any.
    least, most: the aspect, width by height, must be above `least`, and not above `most`; 0 = any.
    """

    tiles: int = 0
    scale: float = 0.0
    least: float = 0.0
    most: float = 0.0


class CanvasTiles(OneMarker, frozen=True, kw_only=True, tag="canvas"):
    """The numbers of one checkpoint.

    tile: the side of a tile in pixels.
    patch: the side of a patch in pixels. merge: the side of a block that becomes one row.
    least, most: the number of tiles of a canvas; most = 1: the whole picture is the only tile.
    resample: Pillow's number of the filter.
    names: whether the prompt names the row and the column of each tile (Granite-Docling).
    numbered: the text before the number of each tile; "" = tiles have no numbers (Aya Vision).
    fine: whether tiles have four times as many rows as usual (Granite-Docling's `fine_route`).
    marker, before, after: the texts of the tokens of the prompt.
    most_rows: the most rows of a picture; 0 = no limit besides the tiles.
    """

    tile: int
    patch: int
    merge: int
    least: int = 1
    most: int = 1
    resample: int = 3
    names: bool = False
    numbered: str = ""
    fine: bool = False
    marker: str = "<image>"
    before: str = "<fake_token_around_image>"
    after: str = "<fake_token_around_image>"
    whole: str = "<global-img>"
    wide: WideRule = WideRule()
    most_rows: int = 0

    @property
    def rows_of_tile(self) -> int:
        """How many rows of the tower a tile becomes."""
        side: int = self.tile // self.patch // self.merge
        return side * side

    @property
    def page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        across, down = self._canvas(1275, 1650)
        return self.tile * max(across, down)

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels."""
        across, down = self._canvas(width, height)
        number = across * down + (across * down > 1)
        side, rows = self.tile // self.patch, self.rows_of_tile * number
        used = across * self.tile, down * self.tile
        text = self._named(across, down) if self.names else self._plain(number)
        return PictureLayout(((side, side),) * number, text, *used, rows=rows)

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL.Image import Resampling

        (across, down), tile, filter_ = self._canvas(*image.size), self.tile, self.resample
        canvas = np.asarray(image.resize((across * tile, down * tile), Resampling(filter_)))
        tiles = [
            canvas[y * tile : (y + 1) * tile, x * tile : (x + 1) * tile]
            for y in range(down)
            for x in range(across)
        ]
        if len(tiles) > 1:
            tiles.append(np.asarray(image.resize((tile, tile), Resampling(filter_))))
        return in_merge_order(np.stack(tiles), self.patch, self.merge)

    def changed(self, settings: Mapping[str, Any]) -> CanvasTiles:
        """Return the family with these settings; InvalidRequest if it cannot follow one."""
        made = self
        for name, value in settings.items():
            if name == "detail":
                made = made._with_detail(value)
            elif name == "crop_to_patches":
                if not isinstance(value, bool):
                    refuse_setting(name, f"must be true or false, got {value!r:.40}")
                made = made if value else made._with(least=1, most=1)
            elif name in ("min_patches", "max_patches"):
                number = _number(name, value, 1, _MOST_TILES)
                made = made._with(**{"least" if name == "min_patches" else "most": number})
            elif name == "max_tokens":
                number = _number(name, value, self.rows_of_tile)
                made = made._with(most_rows=min(number, made.most_rows or number))
            elif name == "fine_route" and self.names:
                if value is not self.fine:
                    here = "true" if self.fine else "false"
                    refuse_setting(
                        name,
                        f"cannot be {value!r:.40}: fine_route of this model's "
                        f"preprocessor_config.json, which is {here}, decides the connector that "
                        "the server loads for all pictures",
                    )
            else:
                refuse_setting(
                    name,
                    f"cannot be {value!r:.40}: the settings of this model's pictures are "
                    "crop_to_patches, min_patches, max_patches, detail, and a maximum number of "
                    "tokens",
                )
        if made.least > made.most:
            refuse_setting("min_patches", f"must be at most {made.most}, got {made.least}")
        return made

    def _with(self, **changes: Any) -> CanvasTiles:
        return msgspec.structs.replace(self, **changes)

    def _with_detail(self, detail: object) -> CanvasTiles:
        return self._with(least=1, most=1) if is_low(detail) else self

    def _canvas(self, width: int, height: int) -> tuple[int, int]:
        """Return how many tiles the canvas of a picture has across and down."""
        most = self.most
        if most > 1 and self._is_wide(width, height):
            most = self.wide.tiles
        if self.most_rows:  # the whole picture is one more tile
            most = min(most, max(1, self.most_rows // self.rows_of_tile - 1))
        return self._most_alike(width, height, most)

    def _is_wide(self, width: int, height: int) -> bool:
        """Whether the page gets more tiles by the rule of Granite-Docling."""
        rule, aspect = self.wide, width / height
        if not rule.tiles or (rule.scale <= 0 and rule.least <= 0):
            return False
        if (rule.least > 0 and aspect <= rule.least) or (0 < rule.most < aspect):
            return False
        across, _ = self._most_alike(width, height, self.most)
        return rule.scale <= 0 or across * self.tile / width < rule.scale

    def _most_alike(self, width: int, height: int, most: int) -> tuple[int, int]:
        """Return the canvas of at most `most` tiles with the most similar aspect.

        Of canvases of the same aspect, a larger one needs a picture of half its area.
        """
        side = min(most, _MOST_SIDE) if self.names else most
        grids = sorted(
            (
                (across, down)
                for across in range(1, side + 1)
                for down in range(1, side + 1)
                if min(self.least, most) <= across * down <= most
            ),
            key=lambda grid: grid[0] * grid[1],
        )
        best, nearest = (1, 1), float("inf")
        for grid in grids:
            away = abs(width / height - grid[0] / grid[1])
            enough = width * height > 0.5 * self.tile * self.tile * grid[0] * grid[1]
            if away < nearest or (away == nearest and enough):
                best, nearest = grid, away
        return best

    def _plain(self, number: int) -> str:
        rows = self.marker * self.rows_of_tile
        if not self.numbered:
            return f"{self.before}{rows * number}{self.after}"
        tiles = "".join(f"{self.numbered}_{tile}{rows}" for tile in range(1, number))
        return f"{self.before}{tiles}{self.whole}{rows}{self.after}"

    def _named(self, across: int, down: int) -> str:
        rows = self.marker * self.rows_of_tile
        lines = (
            "".join(f"{self.before}<row_{y + 1}_col_{x + 1}>{rows}" for x in range(across)) + "\n"
            for y in range(down)
        )
        whole = f"\n{self.before}{self.whole}{rows}{self.after}" if across * down > 1 else ""
        return "".join(lines) + whole


def granite_docling(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> CanvasTiles:
    """Return the family of Granite-Docling with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    merge, fine = read_number(vision.get("scale_factor", 4), "vision_config.scale_factor"), False
    if processor.get("fine_route"):
        merge, fine = read_number(merge // 2, "vision_config.scale_factor / 2"), True
    made = _tiles(
        processor,
        tile=read_number(vision.get("image_size", 512), "vision_config.image_size"),
        patch=read_number(vision.get("patch_size", 16), "vision_config.patch_size"),
        merge=merge,
        most=32,
        crops=True,
    )
    wide = WideRule(
        int(_share(processor, "dense_max_patches")),
        *(_share(processor, f"dense_{name}") for name in ("max_scale", "min_aspect", "max_aspect")),
    )
    made = msgspec.structs.replace(
        made,
        names=True,
        wide=wide,
        fine=fine,
        marker=tokens.get("image_token", "<image>"),
    )
    return _checked(made, whole.get("image_seq_len"), "image_seq_len")


def internvl(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> CanvasTiles:
    """Return the family of InternVL with the numbers of a checkpoint (FamilyReader).

    Its processor makes tiles, whatever the image processor's settings say about them.

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    ratio = config.get("downsample_ratio", 0.5)
    if not isinstance(ratio, int | float) or not 1e-3 < ratio <= 1:
        msg = f"downsample_ratio is {ratio!r:.40}: a number above 0.001, and at most 1, is needed"
        raise ModelError(msg)
    made = _tiles(
        {**processor, "crop_to_patches": True},
        tile=read_number(_one(vision.get("image_size", 448)), "vision_config.image_size"),
        patch=read_number(_one(vision.get("patch_size", 14)), "vision_config.patch_size"),
        merge=int(1 / ratio),
        most=12,
        crops=True,
    )
    made = msgspec.structs.replace(
        made,
        marker=tokens.get("context_image_token", "<IMG_CONTEXT>"),
        before=tokens.get("start_image_token", "<img>"),
        after=tokens.get("end_image_token", "</img>"),
    )
    return _checked(made, whole.get("image_seq_length"), "image_seq_length")


def aya_vision(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    _tokens: Mapping[str, str],
) -> CanvasTiles:
    """Return the family of Aya Vision with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    made = _tiles(
        processor,
        tile=read_number(vision.get("image_size", 224), "vision_config.image_size"),
        patch=read_number(vision.get("patch_size", 16), "vision_config.patch_size"),
        merge=read_number(config.get("downsample_factor", 2), "downsample_factor"),
        most=12,
        crops=False,
    )
    made = msgspec.structs.replace(
        made,
        marker=str(whole.get("img_patch_token", "<|IMG_PATCH|>")),
        before=str(whole.get("start_of_img_token", "<|START_OF_IMG|>")),
        after=str(whole.get("end_of_img_token", "<|END_OF_IMG|>")),
        numbered=str(whole.get("tile_token", "TILE")),
        whole=str(whole.get("tile_global_token", "TILE_GLOBAL")),
    )
    # The processor knows the size of a tile, and how many pixels become a row.
    side, pixels = whole.get("img_size", 364), whole.get("patch_size", 28)
    pixels = read_number(pixels, "patch_size") * read_number(
        whole.get("downsample_factor", 1), "downsample_factor"
    )
    return _checked(made, (read_number(side, "img_size") // pixels) ** 2, "img_size / patch_size")


def internvl_chat(
    config: Mapping[str, Any],
    _processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> CanvasTiles:
    """Return the family of InternVLChatModel with the numbers of a checkpoint (FamilyReader).

    Its code makes tiles as the model's config says, and the image processor has the pixels' mean.

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    image = config.get("force_image_size") or vision.get("image_size", 224)
    if config.get("dynamic_image_size", False):
        if config.get("use_thumbnail", False) is not True:
            msg = "use_thumbnail is false: pictures of several tiles have the whole picture as well"
            raise ModelError(msg)
        least, most = config.get("min_dynamic_patch", 1), config.get("max_dynamic_patch", 6)
    else:
        least, most = 1, 1
    settings = {
        "size": {"height": image, "width": image},
        "min_patches": least,
        "max_patches": most,
        "resample": 3,
    }
    own = {**config, "vision_config": {**vision, "image_size": image}}
    return internvl(own, settings, whole, tokens)


def _one(size: object) -> object:
    """Return the side of a square, which may be there twice."""
    twice = isinstance(size, list | tuple) and len(size) == 2 and size[0] == size[1]
    return size[0] if twice and isinstance(size, list | tuple) else size


def _tiles(
    processor: Mapping[str, Any], *, tile: int, patch: int, merge: int, most: int, crops: bool
) -> CanvasTiles:
    """Return the family with the tiles of an image processor. most, crops: its defaults.

    tile: the side of the pictures that the tower reads.
    """
    size = processor.get("size")
    given = size if isinstance(size, Mapping) else {}
    if (given.get("height"), given.get("width")) != (tile, tile):
        msg = f"size is {size!r:.60}, but the tower reads {tile} x {tile} pixels"
        raise ModelError(msg)
    if tile % (patch * merge):
        msg = f"tiles of {tile} pixels are not whole blocks of {merge} x {merge} patches of {patch}"
        raise ModelError(msg)
    if processor.get("do_resize", True) is False:
        msg = "do_resize is false: pictures of any size are read, which have to be scaled"
        raise ModelError(msg)
    least = read_number(processor.get("min_patches", 1), "min_patches")
    number = read_number(processor.get("max_patches", most), "max_patches")
    if not processor.get("crop_to_patches", crops):
        least, number = 1, 1
    if not least <= number <= _MOST_TILES:
        msg = f"min_patches is {least} and max_patches {number}: at most {_MOST_TILES} are read"
        raise ModelError(msg)
    resample = read_filter(processor, 3)
    return CanvasTiles(
        tile=tile, patch=patch, merge=merge, least=least, most=number, resample=resample
    )


def _checked(made: CanvasTiles, length: object, name: str) -> CanvasTiles:
    rows = made.rows_of_tile // 4 if made.fine else made.rows_of_tile
    if length is not None and length != rows:
        msg = f"{name} is {length!r}, but a tile has {rows} rows"
        raise ModelError(msg)
    return made


def _share(processor: Mapping[str, Any], name: str) -> float:
    found = processor.get(name) or 0
    if not isinstance(found, int | float) or isinstance(found, bool) or found < 0:
        msg = f"{name} is {found!r:.40}: a number is needed to read pictures"
        raise ModelError(msg)
    return float(found)


def _number(name: str, value: object, least: int, most: int = 1 << 30) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        refuse_setting(name, f"must be a number from {least} to {most}, got {value!r:.40}")
    return value
