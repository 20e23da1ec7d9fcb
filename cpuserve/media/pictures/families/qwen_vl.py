"""Qwen-VL, dots.ocr, PaddleOCR-VL and GLM-OCR: one picture of any size, in whole blocks of patches.

Source: the image processors of Qwen2-VL, PaddleOCR-VL and GLM-4.6V, and the processor of Qwen3-VL,
in transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.base import OneTile
from cpuserve.media.pictures.families.preprocessing import (
    PictureFiles,
    is_count,
    part_of,
    read_filter,
    read_number,
    refuse_detail,
    refuse_setting,
    setting_error,
)
from cpuserve.program.pictures import MOST_PATCHES

_MOST_ASPECT = 200
_LOW_PIXELS = 512 * 512  # of a picture with `detail: low`
_EDGES = ("shortest_edge", "longest_edge")  # the names of the least and the most pixels in `size`


class QwenVL(OneTile, frozen=True, kw_only=True):
    """The numbers of one checkpoint.

    least, most: the pixels of a scaled picture, times `frames`.
    frames: how often the processor counts a picture, as if it were a video of so many frames.
    most_rows: the most rows of a picture.
    widens: whether a side shorter than a block is first scaled to one.
    enlarges: whether a picture with such a side is first scaled, and keeps its aspect.
    """

    least: int
    most: int
    most_rows: int
    marker: str = "<|image_pad|>"
    widens: bool = False
    enlarges: bool = False
    frames: int = 1

    @property
    def document_page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        max_pixels = min(self.most // self.frames, self.most_rows * self.block**2)
        return math.isqrt(4 * max_pixels // 3)

    @property
    def token_pixels(self) -> int:
        """The pixels of one token, a row of the tower's output, as the processor counts them."""
        return self.block**2 * self.frames

    def with_setting(self, name: str, value: Any) -> QwenVL:
        """Return the family with a setting; see Family."""
        if name == "detail":
            refuse_detail(value)
        if name == "size":
            if not isinstance(value, Mapping) or not value or not {*value} <= {*_EDGES}:
                want = '{"shortest_edge": N, "longest_edge": N}, the least and the most pixels'
                refuse_setting("size", f"must be {want}, got {value!r:.60}")
            return self._with_pixels("size", value)
        if name in ("min_pixels", "max_pixels"):
            return self._with_pixels(name, {_EDGES[name == "max_pixels"]: value})
        if name == "max_tokens":
            if not is_count(value, 1):
                refuse_setting(name, f"must be at least 1, got {value!r:.40}")
            return self.replaced(most_rows=min(self.most_rows, value))
        if name == "min_tokens":
            max_rows = min(self.most_rows, self.most // self.token_pixels)
            if not is_count(value, 1, max_rows):
                refuse_setting(name, f"must be between 1 and {max_rows}, got {value!r:.40}")
            return self.replaced(least=value * self.token_pixels)
        if name in ("fps", "num_frames", "do_sample_frames", "video"):
            refuse_setting(name, "is for videos, which this server does not read: send pictures")
        raise setting_error(
            name,
            "is no setting of this model's pictures: it has size (shortest_edge and "
            "longest_edge), min_pixels, max_pixels, detail, min_tokens and max_tokens",
        )

    def in_low_detail(self) -> QwenVL:
        """Return the family that makes few rows of a picture."""
        return self.replaced(most=max(self.least, min(self.most, _LOW_PIXELS * self.frames)))

    def _with_pixels(self, name: str, edges: Mapping[str, object]) -> QwenVL:
        """Return the family with least or most pixels, or both; `name`: the setting."""
        pixels = {"shortest_edge": self.least, "longest_edge": self.most}
        for edge in _EDGES:
            value = edges.get(edge, pixels[edge])
            if not is_count(value, 1):
                refuse_setting(name, f"must be a number of pixels, got {value!r:.40}")
            pixels[edge] = value
        min_pixels, max_pixels = pixels.values()
        if max_pixels < self.token_pixels or min_pixels > max_pixels:
            refuse_setting(
                name,
                f"means at least {min_pixels} and at most {max_pixels} pixels: the most must be at "
                f"least {self.token_pixels}, which are one token, and not below the least",
            )
        return self.replaced(least=min_pixels, most=max_pixels)

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) in whole blocks, with about the same aspect."""
        if self.widens and height < self.block:
            width, height = round(width * self.block / height), self.block
        if self.widens and width < self.block:
            width, height = self.block, round(height * self.block / width)
        if self.enlarges and min(width, height) < self.block:
            scale = max(self.block / height, self.block / width)
            width, height = int(width * scale), int(height * scale)
        if max(width, height) > _MOST_ASPECT * min(width, height):
            msg = (
                f"has {width} x {height} pixels: for this model, a side may be at most "
                f"{_MOST_ASPECT} times as long as the other"
            )
            raise InvalidRequest(msg)
        block, limit = self.block, self.most_rows * self.block**2
        max_pixels, num_pixels = min(self.most, limit * self.frames), self.frames * height * width
        min_pixels = min(self.least, max_pixels)
        sides = [round(side / block) * block for side in (width, height)]
        if self.frames * math.prod(sides) > max_pixels:
            beta = math.sqrt(num_pixels / max_pixels)
            sides = [max(block, math.floor(s / beta / block) * block) for s in (width, height)]
        elif self.frames * math.prod(sides) < min_pixels:
            beta = math.sqrt(min_pixels / num_pixels)
            sides = [math.ceil(side * beta / block) * block for side in (width, height)]
        if math.prod(sides) > limit:  # a long and narrow picture loses its aspect
            longer = sides.index(max(sides))
            sides[longer] = max(limit // sides[1 - longer] // block, 1) * block
        return sides[0], sides[1]


def qwen_vl(
    files: PictureFiles,
    marker: str = "<|image_pad|>",
    frames: int = 1,
    *,
    widens: bool = False,
    enlarges: bool = False,
) -> QwenVL:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    marker: the usual marker. For the other parameters see QwenVL.

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    processor, vision = files.processor, files.vision
    patch, merge = files.of_processor("patch_size"), files.of_processor("merge_size")
    for name, model_value, number in (
        ("patch_size", "patch_size", patch),
        ("spatial_merge_size", "merge_size", merge),
    ):
        if vision.get(name, number) != number:
            msg = f"{model_value} is {number}, but vision_config.{name} is {vision[name]!r:.40}"
            raise ModelError(msg)
    files.check_scaled()
    size = part_of(processor, "size")
    min_pixels, max_pixels = (
        read_number(processor.get(old_key) or size.get(edge), f"size.{edge}")
        for old_key, edge in zip(("min_pixels", "max_pixels"), _EDGES, strict=True)
    )
    if min_pixels > max_pixels or max_pixels < frames * (patch * merge) ** 2:
        allowed = f"at least {min_pixels} and at most {max_pixels} pixels"
        msg = f"size allows {allowed}, which is no picture"
        raise ModelError(msg)
    return QwenVL(
        least=min_pixels,
        most=max_pixels,
        most_rows=MOST_PATCHES // merge**2,
        patch=patch,
        merge=merge,
        frames=frames,
        resample=read_filter(processor, 3),
        marker=files.token("image", marker),
        widens=widens,
        enlarges=enlarges,
    )


def qwen3_omni(files: PictureFiles, marker: str = "<|image_pad|>") -> QwenVL:
    """Return the family of Qwen3-Omni (FamilyReader); see qwen_vl."""
    thinker = part_of(files.config, "thinker_config")
    return qwen_vl(replace(files, config={**files.config, **thinker}), marker)


def qwen2_5_omni(files: PictureFiles) -> QwenVL:
    """Return the family of Qwen2.5-Omni (FamilyReader); see qwen_vl."""
    return qwen3_omni(files, "<|IMAGE|>")


def dots_ocr(files: PictureFiles) -> QwenVL:
    """Return the family of dots.ocr (FamilyReader); see qwen_vl."""
    return qwen_vl(files, "<|imgpad|>")


def paddleocr_vl(files: PictureFiles) -> QwenVL:
    """Return the family of PaddleOCR-VL (FamilyReader); see qwen_vl."""
    return qwen_vl(files, "<|IMAGE_PLACEHOLDER|>", widens=True)


def glm_ocr(files: PictureFiles) -> QwenVL:
    """Return the family of GLM-OCR (FamilyReader); see qwen_vl."""
    frames = files.of_processor("temporal_patch_size", 2)
    return qwen_vl(files, "<|image|>", frames, enlarges=True)
