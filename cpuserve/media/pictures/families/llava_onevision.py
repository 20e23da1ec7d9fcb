"""LLaVA-OneVision: tiles as in LLaVA-NeXT for one picture, and one square for each of several.

Lines that have more rows than a few tiles are scaled after the tower.
Source: the image processor and the processor of LLaVA-OneVision in transformers 5.24.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.llava import read_border
from cpuserve.media.pictures.families.llava_next import LlavaNextPictures, read_canvases
from cpuserve.media.pictures.families.preprocessing import PictureFiles, in_merge_order, read_filter
from cpuserve.media.pictures.layout import PictureLayout, line_shape

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_SCALED = 1.1  # lines are scaled if their sides would shrink to less than 1 / 1.1
_ASPECT = re.compile(r"anyres_max_([1-9]\d{0,2})")
_USUAL_ASPECT = "anyres_max_9"
# Pixels of the square around a picture: 512 MB, of the 1.3 GB that decoding may take.
_MOST_SQUARE = 1 << 27


class OnevisionPictures(LlavaNextPictures, frozen=True, kw_only=True):
    """The numbers of one checkpoint, with the numbers of LLaVA-NeXT.

    most_tiles: the lines of a larger canvas are scaled to the rows of about so many tiles.
    alone: whether a picture is the only one of its request, and gets tiles.
    border: the colour around a picture that is not alone.
    """

    most_tiles: int = 9
    alone: bool = True
    border: tuple[int, int, int] = (127, 127, 127)

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels.

        Raises InvalidRequest if the square around the picture is too large.
        """
        if self.alone:
            return super().layout(width, height)
        longest, side = max(width, height), self.side // self.patch
        if longest**2 > _MOST_SQUARE:
            msg = (
                f"has {width} x {height} pixels: with other pictures, a side may have at most "
                f"{math.isqrt(_MOST_SQUARE)}. Scale it down"
            )
            raise InvalidRequest(msg)
        columns, grid_rows = (max(1, self.side * length // longest) for length in (width, height))
        rows = side**2 + 1
        lines = (0, 0, 0, 1, 0, 0)  # one line without rows has its end
        return PictureLayout(((side, side),), self.marker * rows, columns, grid_rows, rows, lines)

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        if self.alone:
            return super().patches(image)
        import numpy as np
        from PIL import Image as images

        (width, height), longest = image.size, max(image.size)
        square = images.new("RGB", (longest, longest), self.border)
        square.paste(image, ((longest - width) // 2, (longest - height) // 2))
        filter_, tile_side = images.Resampling(self.resample), self.side // self.patch * self.patch
        scaled = np.asarray(square.resize((self.side, self.side), filter_))
        return in_merge_order(scaled[None, :tile_side, :tile_side], self.patch, 1)

    def for_pictures(self, count: int) -> OnevisionPictures:
        """Return the family for a request with so many pictures, pages of documents included."""
        return self.replaced(alone=False) if count > 1 else self

    def _lines(self, width: int, height: int) -> tuple[int, ...]:
        lines = super()._lines(width, height)
        rows, columns = line_shape(lines)
        ratio = math.sqrt(rows * columns / (self.most_tiles * (self.side // self.patch) ** 2))
        if ratio <= _SCALED:
            return lines
        return (*lines, max(1, int(rows // ratio)), max(1, int(columns // ratio)))

    def _most_rows(self, rows: int, columns: int) -> int:
        side: int = self.side // self.patch
        shares = min(rows * columns, _SCALED**2 * self.most_tiles)
        return side**2 + int(shares * side**2) + rows * side


def llava_onevision(files: PictureFiles) -> OnevisionPictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    processor, processor_config = files.processor, files.whole
    side, patch = files.of_vision("image_size", 224), files.of_vision("patch_size", 16)
    for name in ("size", "crop_size"):  # tiles are cut as crop_size says
        size = processor.get(name)
        canvas = [size, size]
        if isinstance(size, Mapping):
            canvas = [size.get("height"), size.get("width")]
        if size is None and name == "crop_size":
            continue
        if canvas != [side, side] or side < patch:
            msg = f"{name} is {size!r:.60}, but the tower reads {side} x {side} pixels"
            raise ModelError(msg)
    if not processor.get("do_resize", True) or processor.get("do_center_crop"):
        msg = "do_resize must be true and do_center_crop false: the tower reads whole pictures"
        raise ModelError(msg)
    length = processor_config.get("num_image_tokens", (side // patch) ** 2)
    if length != (side // patch) ** 2:
        msg = f"num_image_tokens is {length!r}, but a tile has {(side // patch) ** 2} rows"
        raise ModelError(msg)
    return OnevisionPictures(
        side=side,
        patch=patch,
        canvases=read_canvases(files, side),
        resample=read_filter(processor, 3),
        marker=files.token("image", "<image>"),
        most_tiles=_most_tiles(files.config, processor_config),
        border=read_border(processor),
    )


def _most_tiles(config: Mapping[str, Any], processor_config: Mapping[str, Any]) -> int:
    aspect = config.get("vision_aspect_ratio", _USUAL_ASPECT)
    match = _ASPECT.fullmatch(aspect) if isinstance(aspect, str) else None
    if match is None or processor_config.get("vision_aspect_ratio", aspect) != aspect:
        msg = (
            f"vision_aspect_ratio is {aspect!r:.40} in config.json and "
            f"{processor_config.get('vision_aspect_ratio')!r:.40} in processor_config.json: "
            f"{_USUAL_ASPECT}, or another number, is needed in both"
        )
        raise ModelError(msg)
    return int(match[1])
