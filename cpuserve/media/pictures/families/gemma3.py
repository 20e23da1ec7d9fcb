"""Gemma 3: a picture becomes one square, whatever its aspect.

Source: the image processor and the processor of transformers 5.24 (Gemma 3).
"""

from __future__ import annotations

import math
from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.base import OneTile
from cpuserve.media.pictures.families.preprocessing import (
    PictureFiles,
    check_rows,
    read_filter,
    read_number,
    refuse_setting,
    value_error,
)


class Gemma3Pictures(OneTile, frozen=True, kw_only=True):
    """The numbers of one checkpoint.

    side: the pixels of a side of the square.
    marker, placeholder, after: the texts of the tokens before, for and after the rows.
    """

    side: int
    resample: int = 2
    marker: str = "<start_of_image>"
    placeholder: str = "<image_soft_token>"
    after: str = "<end_of_image>"
    gap: str = "\n\n"

    @property
    def document_page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        return self.side

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of the square; all sizes have the same."""
        del width, height
        return self.side, self.side

    def text(self, columns: int, rows: int) -> str:
        """Return the text in place of the marker; see OneTile."""
        return f"{self.marker}{super().text(columns, rows)}"

    def with_setting(self, name: str, value: Any) -> Gemma3Pictures:
        """Return the family itself; InvalidRequest for a setting that would change pictures.

        do_pan_and_scan, which adds parts of the picture, can only be false.
        """
        rows = self.layout(1, 1).rows
        if name == "do_pan_and_scan" and value is False:
            return self
        if name in ("max_tokens", "min_tokens"):
            is_most = name == "max_tokens"
            if type(value) is int and (value >= rows if is_most else value <= rows):
                return self
            bound = f"at {'least' if is_most else 'most'} {rows}"
            refuse_setting(name, f"must be {bound}, the tokens of each picture, got {value!r:.40}")
        settings = (
            f"this model's pictures all become {self.side} x {self.side} pixels and "
            f"{self.layout(1, 1).rows} tokens"
        )
        raise value_error(name, value, settings)


def gemma3(files: PictureFiles) -> Gemma3Pictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    patch, side = files.of_vision("patch_size", 16), files.of_vision("image_size", 224)
    rows = read_number(files.config.get("mm_tokens_per_image", 256), "mm_tokens_per_image")
    files.check_square(side)
    if files.processor.get("do_pan_and_scan"):
        msg = "do_pan_and_scan, which adds parts of a picture, is not supported"
        raise ModelError(msg)
    columns = math.isqrt(rows)
    if columns**2 != rows or side // patch % columns:
        msg = f"mm_tokens_per_image is {rows}: no square that divides {side // patch} patches"
        raise ModelError(msg)
    check_rows("image_seq_length", files.whole.get("image_seq_length"), rows, "a picture")
    return Gemma3Pictures(
        side=side,
        patch=patch,
        merge=side // patch // columns,
        resample=read_filter(files.processor, 2),
        marker=files.token("boi", "<start_of_image>"),
        placeholder=files.token("image", "<image_soft_token>"),
        after=files.token("eoi", "<end_of_image>"),
    )
