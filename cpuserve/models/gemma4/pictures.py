"""Gemma 4: one picture in whole blocks of patches, with at most a chosen number of tokens.

Source: the image processor and the processor of transformers 5.24 (Gemma 4).
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
from cpuserve.models.gemma4 import BUDGETS

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_LISTED = ", ".join(map(str, BUDGETS))


class Gemma4Pictures(OneMarker, frozen=True, kw_only=True, tag="gemma4"):
    """The numbers of one checkpoint.

    budget: the most rows of a picture. limit: the largest budget that a request can choose.
    patch: the side of a patch in pixels. merge: the side of a block that becomes one row.
    resample: Pillow's number of the filter.
    marker, before, after: the texts of the tokens for, before and after the rows.
    """

    budget: int
    limit: int
    patch: int
    merge: int
    resample: int = 3
    marker: str = "<|image|>"
    before: str = "<|image>"
    after: str = "<image|>"

    @property
    def block(self) -> int:
        """The side in pixels of a block of patches that becomes one row."""
        return self.patch * self.merge

    @property
    def page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        return math.isqrt(4 * self.budget * self.block**2 // 3)

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels."""
        width, height = self._scaled(width, height)
        rows = height // self.block * (width // self.block)
        text = f"{self.before}{self.marker * rows}{self.after}"
        tile = height // self.patch, width // self.patch
        return PictureLayout((tile,), text, width, height, rows=rows)

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL.Image import Resampling

        size = self._scaled(*image.size)
        pixels = np.asarray(image.resize(size, Resampling(self.resample)))
        return in_merge_order(pixels[None], self.patch, self.merge)

    def changed(self, settings: Mapping[str, Any]) -> Gemma4Pictures:
        """Return the family with these settings; InvalidRequest if it cannot follow one."""
        made = self
        for name, value in settings.items():
            if name == "detail" and value in DETAILS:
                made = made._with(BUDGETS[0]) if value == "low" else made
            elif name == "max_soft_tokens":
                made = made._with(self._checked(value))
            elif name == "max_tokens":
                fitting = [n for n in BUDGETS if isinstance(value, int) and n <= value]
                if not fitting:
                    refuse_setting(name, f"must be at least {BUDGETS[0]}, got {value!r:.40}")
                limit = min(made.limit, fitting[-1])
                made = msgspec.structs.replace(made, budget=min(made.budget, limit), limit=limit)
            else:
                refuse_setting(
                    name,
                    f"cannot be {value!r:.40}: this model's pictures have max_soft_tokens "
                    f"({_LISTED}), detail, and a maximum number of tokens",
                )
        return made

    def _with(self, budget: int) -> Gemma4Pictures:
        return msgspec.structs.replace(self, budget=budget)

    def _checked(self, budget: object) -> int:
        """Return `budget` if a request can choose it."""
        if not isinstance(budget, int) or budget not in BUDGETS:
            refuse_setting("max_soft_tokens", f"must be one of {_LISTED}, got {budget!r:.40}")
        if budget > self.limit:
            refuse_setting(
                "max_soft_tokens",
                f"can be at most {self.limit}, got {budget}: for more, the server needs a larger "
                "--image-max-tokens; in models that see a picture in both directions, one step "
                "computes all of its tokens, and max_soft_tokens in their files is the most",
            )
        return budget

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) in whole blocks that has at most `budget` rows.

        A side that would be shorter than a block becomes one block, and the other side becomes as
        many blocks as it is times as long, but no more than the budget.
        """
        factor = math.sqrt(self.budget * self.block**2 / (width * height))
        across, down = (math.floor(factor * side / self.block) for side in (width, height))
        if down == 0:
            across, down = min(width // height, self.budget), 1
        elif across == 0:
            across, down = 1, min(height // width, self.budget)
        return across * self.block, down * self.block


def gemma4_unified(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> Gemma4Pictures:
    """Return the family of Gemma 4 Unified, where a block is one large patch (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    text = config.get("text_config")
    text = {"use_bidirectional_attention": "vision", **(text if isinstance(text, Mapping) else {})}
    made = gemma4({**config, "text_config": text}, processor, whole, tokens)
    return msgspec.structs.replace(made, patch=made.block, merge=1)


def gemma4(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    _whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> Gemma4Pictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision, text = (config.get(f"{name}_config") for name in ("vision", "text"))
    vision = vision if isinstance(vision, Mapping) else {}
    patch = read_number(processor.get("patch_size"), "patch_size")
    merge = read_number(processor.get("pooling_kernel_size"), "pooling_kernel_size")
    for name, given in (("patch_size", patch), ("pooling_kernel_size", merge)):
        if vision.get(name, given) != given:
            msg = f"{name} is {given}, but vision_config.{name} is {vision[name]!r:.40}"
            raise ModelError(msg)
    if processor.get("do_resize", True) is False:
        msg = "do_resize is false: pictures of any size are read, which have to be scaled"
        raise ModelError(msg)
    budget = read_number(processor.get("max_soft_tokens"), "max_soft_tokens")
    if budget not in BUDGETS:
        msg = f"max_soft_tokens is {budget}, but must be one of {_LISTED}"
        raise ModelError(msg)
    whole = isinstance(text, Mapping) and text.get("use_bidirectional_attention") == "vision"
    return Gemma4Pictures(
        budget=budget,
        limit=budget if whole else BUDGETS[-1],
        patch=patch,
        merge=merge,
        resample=read_filter(processor, 3),
        marker=tokens.get("image_token", "<|image|>"),
        before=tokens.get("boi_token", "<|image>"),
        after=tokens.get("eoi_token", "<image|>"),
    )
