"""Kimi-VL and Kimi K2.5: one picture of any size, with a black border up to whole blocks.

Source: the image processors of the published models, and image_processing_kimi_k25 of
transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.preprocessing import (
    DETAILS,
    in_merge_order,
    read_filter,
    read_number,
    refuse_setting,
)
from cpuserve.media.pictures.layout import OneMarker, PictureLayout
from cpuserve.program.pictures import MOST_PATCHES

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_LOW_PATCHES = 1024  # of a picture with `detail: low`
_MOST_SIDE = 512  # patches of a side: the longest that the published models turn


class KimiPictures(OneMarker, frozen=True, kw_only=True, tag="kimi_vl"):
    """The numbers of one checkpoint.

    limit: the patches that a picture keeps; a larger one is scaled to about so many.
    limit_name: its key in the settings of the image processor.
    most_side: the most patches of a side.
    most_rows: the most rows of a picture.
    patch: the side of a patch in pixels. merge: the side of a block that becomes one row.
    resample: Pillow's number of the filter.
    marker: the text of the token for a row.
    begin: the text of the first token of a picture in a prompt.
    """

    limit: int
    most_rows: int
    merge: int
    resample: int = 3
    marker: str = "<|media_pad|>"
    begin: str = "<|media_start|>"
    limit_name: str = "in_token_limit"
    most_side: int = _MOST_SIDE

    @property
    def frame(self) -> tuple[str, str]:
        """The texts that chat templates write before and after a marker."""
        return f"{self.begin}image<|media_content|>", "<|media_end|>"

    @property
    def block(self) -> int:
        """The side in pixels of a block of patches that becomes one row."""
        return self.patch * self.merge

    @property
    def page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        patches = min(self.limit, self.most_rows * self.merge**2)
        return math.isqrt(4 * patches * self.patch**2 // 3)

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels."""
        used = self._scaled(width, height)
        across, down = (-(-length // self.block) for length in used)
        rows, tile = down * across, (down * self.merge, across * self.merge)
        return PictureLayout((tile,), self.marker * rows, *used, rows=rows)

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL.Image import Resampling

        size = self._scaled(*image.size)
        across, down = (-(-length // self.block) * self.block for length in size)
        framed = np.zeros((1, down, across, 3), np.uint8)
        framed[0, : size[1], : size[0]] = np.asarray(image.resize(size, Resampling(self.resample)))
        return in_merge_order(framed, self.patch, self.merge)

    def changed(self, settings: Mapping[str, Any]) -> KimiPictures:
        """Return the family with these settings; InvalidRequest if it cannot follow one."""
        made = self
        for name, value in settings.items():
            if name == "detail" and value in DETAILS:
                low = min(made.limit, _LOW_PATCHES)
                made = msgspec.structs.replace(made, limit=low) if value == "low" else made
                continue
            if name not in (made.limit_name, "max_tokens") or type(value) is not int or value < 1:
                refuse_setting(
                    name,
                    f"cannot be {value!r:.40}: the settings of this model's pictures are "
                    f"{made.limit_name} (a number of patches), detail, and a maximum number of "
                    "tokens",
                )
            if name == made.limit_name:
                made = msgspec.structs.replace(made, limit=value)
            else:
                made = msgspec.structs.replace(made, most_rows=min(made.most_rows, value))
        return made

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) in pixels without the border."""
        limit, longest = self.limit, self.most_side * self.patch
        patches = max(1, width // self.patch) * max(1, height // self.patch)
        while True:
            scale = min(1.0, math.sqrt(limit / patches), longest / height, longest / width)
            across, down = (min(max(1, int(side * scale)), longest) for side in (width, height))
            rows = -(-across // self.block) * -(-down // self.block)
            if rows <= self.most_rows:
                return across, down
            if limit > 1:
                limit -= limit // 64 or 1
            else:  # a long and narrow picture
                longest = max(longest - self.block, self.block)


def kimi_vl(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    _whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> KimiPictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    patch = read_number(processor.get("patch_size", 14), "patch_size")
    kernel = processor.get("merge_kernel_size", [2, 2])
    for name, given in (("patch_size", patch), ("merge_kernel_size", kernel)):
        if vision.get(name, given) != given:
            msg = f"{name} is {given!r:.40}, but vision_config.{name} is {vision[name]!r:.40}"
            raise ModelError(msg)
    if processor.get("pad_input") is not True:
        msg = "pad_input must be true: pictures that are cut to whole patches are not supported"
        raise ModelError(msg)
    merge = read_number(kernel[0] if isinstance(kernel, list) and kernel else kernel, "merge")
    return KimiPictures(
        limit=read_number(processor.get("in_token_limit", 4096), "in_token_limit"),
        most_rows=MOST_PATCHES // merge**2,
        patch=patch,
        merge=merge,
        resample=read_filter(processor, 3),
        marker=tokens.get("image_token", "<|media_pad|>"),
    )


def kimi_k25(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    _whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> KimiPictures:
    """Return the family of Kimi K2.5 with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    inner = processor.get("media_proc_cfg")  # of published files, which have keys of their own
    published = isinstance(inner, Mapping)
    own: Mapping[str, Any] = inner if isinstance(inner, Mapping) else processor
    merge = own.get("merge_kernel_size" if published else "merge_size", 2)
    merge = merge[0] if isinstance(merge, list) and merge else merge
    if own.get("fixed_output_tokens") is not None:
        msg = "fixed_output_tokens must be null: a picture has as many tokens as its size needs"
        raise ModelError(msg)
    size = own.get("size")
    size = size if isinstance(size, Mapping) else {}
    side = own.get("patch_limit_on_one_side") if published else size.get("max_height")
    name = "in_patch_limit" if published else "max_patches"
    limit = read_number(own.get(name, 16384), name)
    changed = {"pad_input": True, "merge_kernel_size": [merge] * 2, "in_token_limit": limit}
    return msgspec.structs.replace(
        kimi_vl(config, {**own, **changed}, {}, tokens),
        begin="<|media_begin|>",
        limit_name=name,
        most_side=read_number(_MOST_SIDE if side is None else side, "the most patches of a side"),
    )
