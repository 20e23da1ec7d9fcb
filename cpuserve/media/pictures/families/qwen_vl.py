"""Qwen-VL, dots.ocr, PaddleOCR-VL and GLM-OCR: one picture of any size, in whole blocks of patches.

Source: the image processors of Qwen2-VL, PaddleOCR-VL and GLM-4.6V, and the processor of Qwen3-VL,
in transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.preprocessing import (
    in_merge_order,
    is_low,
    read_filter,
    read_number,
    refuse_setting,
)
from cpuserve.media.pictures.layout import OneMarker, PictureLayout
from cpuserve.program.pictures import MOST_PATCHES

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_MOST_ASPECT = 200
_LOW_PIXELS = 512 * 512  # of a picture with `detail: low`
_EDGES = ("shortest_edge", "longest_edge")  # the names of the least and the most pixels in `size`


class QwenVL(OneMarker, frozen=True, kw_only=True, tag="qwen_vl"):
    """The numbers of one checkpoint.

    least, most: the pixels of a scaled picture, times `frames`.
    frames: how often the processor counts a picture, as if it were a video of so many frames.
    most_rows: the most rows of a picture.
    patch: the side of a patch in pixels. merge: the side of a block that becomes one row.
    resample: Pillow's number of the filter.
    marker: the text of the token for a row.
    widens: whether a side shorter than a block is first scaled to one.
    grows: whether a picture with such a side is first scaled, and keeps its aspect.
    """

    least: int
    most: int
    most_rows: int
    patch: int
    merge: int
    resample: int = 3
    marker: str = "<|image_pad|>"
    widens: bool = False
    grows: bool = False
    frames: int = 1

    @property
    def block(self) -> int:
        """The side in pixels of a block of patches that becomes one row."""
        return self.patch * self.merge

    @property
    def page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        most = min(self.most // self.frames, self.most_rows * self.block**2)
        return math.isqrt(4 * most // 3)

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels.

        Raises InvalidRequest if one side is more than 200 times the other.
        """
        width, height = self._scaled(width, height)
        rows = height // self.block * (width // self.block)
        tile = height // self.patch, width // self.patch
        return PictureLayout((tile,), self.marker * rows, width, height, rows=rows)

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL.Image import Resampling

        size = self._scaled(*image.size)
        pixels = np.asarray(image.resize(size, Resampling(self.resample)))
        return in_merge_order(pixels[None], self.patch, self.merge)

    def changed(self, settings: Mapping[str, Any]) -> QwenVL:
        """Return the family with these settings; InvalidRequest if it cannot follow one."""
        made = self
        for name, value in settings.items():
            if name == "detail":
                made = made._with_detail(value)
            elif name == "size":
                made = made._with_size(value)
            elif name in ("min_pixels", "max_pixels"):
                edge = _EDGES[name == "max_pixels"]
                made = made._with_pixels(name, {edge: value})
            elif name == "max_tokens":
                made = made._with_most(value)
            elif name == "min_tokens":
                made = made._with_least(value)
            elif name in ("fps", "num_frames", "do_sample_frames", "video"):
                refuse_setting(
                    name, "is for videos, which this server does not read: send pictures"
                )
            else:
                refuse_setting(
                    name,
                    "is no setting of this model's pictures: it has size (shortest_edge and "
                    "longest_edge), min_pixels, max_pixels, detail, min_tokens and max_tokens",
                )
        return made

    def _with_detail(self, detail: object) -> QwenVL:
        if not is_low(detail):
            return self
        low = min(self.most, _LOW_PIXELS * self.frames)
        return msgspec.structs.replace(self, most=max(self.least, low))

    def _with_size(self, size: object) -> QwenVL:
        if not isinstance(size, Mapping) or not size or not {*size} <= {*_EDGES}:
            want = '{"shortest_edge": N, "longest_edge": N}, the least and the most pixels'
            refuse_setting("size", f"must be {want}, got {size!r:.60}")
        return self._with_pixels("size", size)

    def _with_pixels(self, name: str, edges: Mapping[str, object]) -> QwenVL:
        """Return the family with least or most pixels, or both; `name`: the setting."""
        found = []
        for edge, usual in zip(_EDGES, (self.least, self.most), strict=True):
            value = edges.get(edge, usual)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                refuse_setting(name, f"must be a number of pixels, got {value!r:.40}")
            found.append(value)
        least, most = found
        token = self.block**2 * self.frames
        if most < token or least > most:
            refuse_setting(
                name,
                f"means at least {least} and at most {most} pixels: the most must be at least "
                f"{token}, which are one token, and not below the least",
            )
        return msgspec.structs.replace(self, least=least, most=most)

    def _with_most(self, most: object) -> QwenVL:
        if not isinstance(most, int) or isinstance(most, bool) or most < 1:
            refuse_setting("max_tokens", f"must be at least 1, got {most!r:.40}")
        return msgspec.structs.replace(self, most_rows=min(self.most_rows, most))

    def _with_least(self, least: object) -> QwenVL:
        token = self.block**2 * self.frames
        most = min(self.most_rows, self.most // token)
        if not isinstance(least, int) or isinstance(least, bool) or not 1 <= least <= most:
            refuse_setting("min_tokens", f"must be between 1 and {most}, got {least!r:.40}")
        return msgspec.structs.replace(self, least=least * token)

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) in whole blocks, with about the same aspect."""
        if self.widens and height < self.block:
            width, height = round(width * self.block / height), self.block
        if self.widens and width < self.block:
            width, height = self.block, round(height * self.block / width)
        if self.grows and min(width, height) < self.block:
            scale = max(self.block / height, self.block / width)
            width, height = int(width * scale), int(height * scale)
        if max(width, height) > _MOST_ASPECT * min(width, height):
            msg = (
                f"has {width} x {height} pixels: for this model, a side may be at most "
                f"{_MOST_ASPECT} times as long as the other"
            )
            raise InvalidRequest(msg)
        block, limit = self.block, self.most_rows * self.block**2
        most, counted = min(self.most, limit * self.frames), self.frames * height * width
        least = min(self.least, most)
        sides = [round(side / block) * block for side in (width, height)]
        if self.frames * math.prod(sides) > most:
            beta = math.sqrt(counted / most)
            sides = [max(block, math.floor(s / beta / block) * block) for s in (width, height)]
        elif self.frames * math.prod(sides) < least:
            beta = math.sqrt(least / counted)
            sides = [math.ceil(side * beta / block) * block for side in (width, height)]
        if math.prod(sides) > limit:  # a long and narrow picture loses its aspect
            longer = sides.index(max(sides))
            sides[longer] = max(limit // sides[1 - longer] // block, 1) * block
        return sides[0], sides[1]


def qwen_vl(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    _whole: Mapping[str, Any],
    tokens: Mapping[str, str],
    frames: int = 1,
) -> QwenVL:
    """Return the family with the numbers of a checkpoint (FamilyReader). frames: see QwenVL.

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    patch = read_number(processor.get("patch_size"), "patch_size")
    merge = read_number(processor.get("merge_size"), "merge_size")
    for name, own, given in (
        ("patch_size", "patch_size", patch),
        ("spatial_merge_size", "merge_size", merge),
    ):
        if vision.get(name, given) != given:
            msg = f"{own} is {given}, but vision_config.{name} is {vision[name]!r:.40}"
            raise ModelError(msg)
    if processor.get("do_resize", True) is False:
        msg = "do_resize is false: pictures of any size are read, which have to be scaled"
        raise ModelError(msg)
    size = processor.get("size")
    size = size if isinstance(size, Mapping) else {}
    least, most = (
        read_number(processor.get(old) or size.get(edge), f"size.{edge}")
        for old, edge in zip(("min_pixels", "max_pixels"), _EDGES, strict=True)
    )
    if least > most or most < frames * (patch * merge) ** 2:
        msg = f"size allows at least {least} and at most {most} pixels, which is no picture"
        raise ModelError(msg)
    return QwenVL(
        least=least,
        most=most,
        most_rows=MOST_PATCHES // merge**2,
        patch=patch,
        merge=merge,
        frames=frames,
        resample=read_filter(processor, 3),
        marker=tokens.get("image_token", "<|image_pad|>"),
    )


def qwen3_omni(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> QwenVL:
    """Return the family of Qwen3-Omni with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    inner = config.get("thinker_config")
    config = {**config, **inner} if isinstance(inner, Mapping) else config
    return qwen_vl(config, processor, whole, tokens)


def qwen2_5_omni(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> QwenVL:
    """Return the family of Qwen2.5-Omni with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    return qwen3_omni(config, processor, whole, {"image_token": "<|IMAGE|>", **tokens})


def dots_ocr(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> QwenVL:
    """Return the family of dots.ocr with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    return qwen_vl(config, processor, whole, {"image_token": "<|imgpad|>", **tokens})


def paddleocr_vl(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> QwenVL:
    """Return the family of PaddleOCR-VL with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    tokens = {"image_token": "<|IMAGE_PLACEHOLDER|>", **tokens}
    return msgspec.structs.replace(qwen_vl(config, processor, whole, tokens), widens=True)


def glm_ocr(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> QwenVL:
    """Return the family of GLM-OCR with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    frames = read_number(processor.get("temporal_patch_size", 2), "temporal_patch_size")
    tokens = {"image_token": "<|image|>", **tokens}
    return msgspec.structs.replace(qwen_vl(config, processor, whole, tokens, frames), grows=True)
