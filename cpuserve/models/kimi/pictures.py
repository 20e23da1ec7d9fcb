"""Kimi-VL and Kimi K2.5: one picture of any size, with a black border up to whole blocks.

Source: the image processors of the published models, and image_processing_kimi_k25 of
transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.base import OneTile
from cpuserve.media.pictures.families.preprocessing import (
    PictureFiles,
    in_merge_order,
    is_count,
    part_of,
    read_filter,
    read_number,
    value_error,
)
from cpuserve.program.pictures import MOST_PATCHES

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_LOW_PATCHES = 1024  # of a picture with `detail: low`
_MOST_SIDE = 512  # patches of a side: the longest that the published models turn


class KimiPictures(OneTile, frozen=True, kw_only=True):
    """The numbers of one checkpoint.

    limit: the patches that a picture keeps; a larger one is scaled to about so many.
    limit_name: its key in the settings of the image processor.
    most_side: the most patches of a side.
    most_rows: the most rows of a picture.
    begin: the text of the first token of a picture in a prompt.
    """

    limit: int
    most_rows: int
    merge: int
    marker: str = "<|media_pad|>"
    begin: str = "<|media_start|>"
    limit_name: str = "in_token_limit"
    most_side: int = _MOST_SIDE

    @property
    def frame(self) -> tuple[str, str]:
        """The texts that chat templates write before and after a marker."""
        return f"{self.begin}image<|media_content|>", "<|media_end|>"

    @property
    def document_page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        patches = min(self.limit, self.most_rows * self.merge**2)
        return math.isqrt(4 * patches * self.patch**2 // 3)

    def framed(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) in pixels with the border up to whole blocks."""
        columns, rows = (-(-length // self.block) * self.block for length in (width, height))
        return columns, rows

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family."""
        import numpy as np
        from PIL.Image import Resampling

        size = self.scaled(*image.size)
        columns, rows = self.framed(*size)
        framed = np.zeros((1, rows, columns, 3), np.uint8)
        framed[0, : size[1], : size[0]] = np.asarray(image.resize(size, Resampling(self.resample)))
        return in_merge_order(framed, self.patch, self.merge)

    def in_low_detail(self) -> KimiPictures:
        """Return the family that makes few rows of a picture."""
        return self.replaced(limit=min(self.limit, _LOW_PATCHES))

    def with_setting(self, name: str, value: Any) -> KimiPictures:
        """Return the family with a setting; see Family."""
        if is_count(value, 1):
            if name == self.limit_name:
                return self.replaced(limit=value)
            if name == "max_tokens":
                return self.replaced(most_rows=min(self.most_rows, value))
        settings = (
            f"the settings of this model's pictures are {self.limit_name} (a number of patches), "
            "detail, and a maximum number of tokens"
        )
        raise value_error(name, value, settings)

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) in pixels without the border."""
        limit, longest = self.limit, self.most_side * self.patch
        patches = max(1, width // self.patch) * max(1, height // self.patch)
        while True:
            scale = min(1.0, math.sqrt(limit / patches), longest / height, longest / width)
            scaled_width, scaled_height = (
                min(max(1, int(side * scale)), longest) for side in (width, height)
            )
            rows = -(-scaled_width // self.block) * -(-scaled_height // self.block)
            if rows <= self.most_rows:
                return scaled_width, scaled_height
            if limit > 1:
                limit -= limit // 64 or 1
            else:  # a long and narrow picture
                longest = max(longest - self.block, self.block)


def kimi_vl(files: PictureFiles) -> KimiPictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    processor, vision = files.processor, files.vision
    patch = files.of_processor("patch_size", 14)
    kernel = processor.get("merge_kernel_size", [2, 2])
    for name, size in (("patch_size", patch), ("merge_kernel_size", kernel)):
        if vision.get(name, size) != size:
            msg = f"{name} is {size!r:.40}, but vision_config.{name} is {vision[name]!r:.40}"
            raise ModelError(msg)
    if processor.get("pad_input") is not True:
        msg = "pad_input must be true: pictures that are cut to whole patches are not supported"
        raise ModelError(msg)
    merge = read_number(kernel[0] if isinstance(kernel, list) and kernel else kernel, "merge")
    return KimiPictures(
        limit=files.of_processor("in_token_limit", 4096),
        most_rows=MOST_PATCHES // merge**2,
        patch=patch,
        merge=merge,
        resample=read_filter(processor, 3),
        marker=files.token("image", "<|media_pad|>"),
    )


def kimi_k25(files: PictureFiles) -> KimiPictures:
    """Return the family of Kimi K2.5 (FamilyReader); see kimi_vl."""
    media_config = files.processor.get(
        "media_proc_cfg"
    )  # of published files, which have keys of their own
    published = isinstance(media_config, Mapping)
    settings: Mapping[str, Any] = (
        media_config if isinstance(media_config, Mapping) else files.processor
    )
    merge = settings.get("merge_kernel_size" if published else "merge_size", 2)
    merge = merge[0] if isinstance(merge, list) and merge else merge
    if settings.get("fixed_output_tokens") is not None:
        msg = "fixed_output_tokens must be null: a picture has as many tokens as its size needs"
        raise ModelError(msg)
    side = settings.get("patch_limit_on_one_side")
    side = side if published else part_of(settings, "size").get("max_height")
    name = "in_patch_limit" if published else "max_patches"
    limit = read_number(settings.get(name, 16384), name)
    renamed = {"pad_input": True, "merge_kernel_size": [merge] * 2, "in_token_limit": limit}
    return kimi_vl(replace(files, processor={**settings, **renamed})).replaced(
        begin="<|media_begin|>",
        limit_name=name,
        most_side=read_number(_MOST_SIDE if side is None else side, "the most patches of a side"),
    )
