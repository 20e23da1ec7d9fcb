"""Gemma 3: a picture becomes one square, whatever its aspect.

Source: the image processor and the processor of transformers 5.24 (Gemma 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.preprocessing import (
    DETAILS,
    in_merge_order,
    read_filter,
    read_number,
    refuse_setting,
)
from cpuserve.media.pictures.layout import PictureLayout, WithMarker

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


class Gemma3Pictures(WithMarker, frozen=True, kw_only=True, tag="gemma3"):
    """The numbers of one checkpoint.

    side: the pixels of a side of the square.
    merge: the side of a block that becomes one row.
    resample: Pillow's number of the filter.
    marker, placeholder, after: the texts of the tokens before, for and after the rows.
    """

    side: int
    merge: int
    resample: int = 2
    marker: str = "<start_of_image>"
    placeholder: str = "<image_soft_token>"
    after: str = "<end_of_image>"
    gap: str = "\n\n"

    @property
    def page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        return self.side

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels; all sizes have the same."""
        del width, height
        side = self.side // self.patch
        rows = (side // self.merge) ** 2
        text = f"{self.marker}{self.placeholder * rows}{self.after}"
        return PictureLayout(((side, side),), text, self.side, self.side, rows=rows)

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL.Image import Resampling

        square = image.resize((self.side, self.side), Resampling(self.resample))
        return in_merge_order(np.asarray(square)[None], self.patch, self.merge)

    def changed(self, settings: Mapping[str, Any]) -> Gemma3Pictures:
        """Return the family itself; InvalidRequest for a setting that would change pictures.

        do_pan_and_scan, which adds parts of the picture, can only be false.
        """
        rows = self.layout(1, 1).rows
        for name, value in settings.items():
            if name == "detail" and value in DETAILS:
                continue
            if name == "do_pan_and_scan" and value is False:
                continue
            if name in ("max_tokens", "min_tokens"):
                is_most = name == "max_tokens"
                if type(value) is int and (value >= rows if is_most else value <= rows):
                    continue
                bound = f"at {'least' if is_most else 'most'} {rows}"
                refuse_setting(
                    name, f"must be {bound}, the tokens of each picture, got {value!r:.40}"
                )
            refuse_setting(
                name,
                f"cannot be {value!r:.40}: this model's pictures all become {self.side} x "
                f"{self.side} pixels and {rows} tokens",
            )
        return self


def gemma3(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> Gemma3Pictures:
    """Return the family with the numbers of a checkpoint; see table.FamilyReader.

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    patch = read_number(vision.get("patch_size", 16), "vision_config.patch_size")
    side = read_number(vision.get("image_size", 224), "vision_config.image_size")
    rows = read_number(config.get("mm_tokens_per_image", 256), "mm_tokens_per_image")
    size = processor.get("size")
    given = size if isinstance(size, Mapping) else {}
    if (given.get("height"), given.get("width")) != (side, side):
        msg = f"size is {size!r:.60}, but the tower reads {side} x {side} pixels"
        raise ModelError(msg)
    if processor.get("do_pan_and_scan"):
        msg = "do_pan_and_scan, which adds parts of a picture, is not supported"
        raise ModelError(msg)
    across = math.isqrt(rows)
    if across**2 != rows or side // patch % across:
        msg = f"mm_tokens_per_image is {rows}: no square that divides {side // patch} patches"
        raise ModelError(msg)
    length = whole.get("image_seq_length")
    if length is not None and length != rows:
        msg = f"image_seq_length is {length!r}, but a picture has {rows} rows"
        raise ModelError(msg)
    return Gemma3Pictures(
        side=side,
        patch=patch,
        merge=side // patch // across,
        resample=read_filter(processor, 2),
        marker=tokens.get("boi_token", "<start_of_image>"),
        placeholder=tokens.get("image_token", "<image_soft_token>"),
        after=tokens.get("eoi_token", "<end_of_image>"),
    )
