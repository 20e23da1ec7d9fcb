"""Gemma 4: one picture in whole blocks of patches, with at most a chosen number of tokens.

Source: the image processor and the processor of transformers 5.24 (Gemma 4).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.base import OneTile
from cpuserve.media.pictures.families.preprocessing import (
    PictureFiles,
    part_of,
    read_filter,
    refuse_setting,
    value_error,
)
from cpuserve.models.gemma4 import BUDGETS

_LISTED = ", ".join(map(str, BUDGETS))


class Gemma4Pictures(OneTile, frozen=True, kw_only=True):
    """The numbers of one checkpoint.

    budget: the most rows of a picture. limit: the largest budget that a request can choose.
    """

    budget: int
    limit: int
    marker: str = "<|image|>"
    before: str = "<|image>"
    after: str = "<image|>"

    @property
    def document_page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        return math.isqrt(4 * self.budget * self.block**2 // 3)

    def in_low_detail(self) -> Gemma4Pictures:
        """Return the family that makes few rows of a picture."""
        return self.replaced(budget=BUDGETS[0])

    def with_setting(self, name: str, value: Any) -> Gemma4Pictures:
        """Return the family with a setting; see Family."""
        if name == "max_soft_tokens":
            return self.replaced(budget=self._checked(value))
        if name == "max_tokens":
            fitting = [n for n in BUDGETS if isinstance(value, int) and n <= value]
            if not fitting:
                refuse_setting(name, f"must be at least {BUDGETS[0]}, got {value!r:.40}")
            limit = min(self.limit, fitting[-1])
            return self.replaced(budget=min(self.budget, limit), limit=limit)
        settings = (
            f"this model's pictures have max_soft_tokens ({_LISTED}), detail, and a maximum number "
            "of tokens"
        )
        raise value_error(name, value, settings)

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

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) in whole blocks that has at most `budget` rows.

        A side that would be shorter than a block becomes one block, and the other side becomes as
        many blocks as it is times as long, but no more than the budget.
        """
        factor = math.sqrt(self.budget * self.block**2 / (width * height))
        columns, rows = (math.floor(factor * side / self.block) for side in (width, height))
        if rows == 0:
            columns, rows = min(width // height, self.budget), 1
        elif columns == 0:
            columns, rows = 1, min(height // width, self.budget)
        return columns * self.block, rows * self.block


def gemma4_unified(files: PictureFiles) -> Gemma4Pictures:
    """Return the family of Gemma 4 Unified, where a block is one large patch; see gemma4."""
    text = {"use_bidirectional_attention": "vision", **part_of(files.config, "text_config")}
    family = gemma4(replace(files, config={**files.config, "text_config": text}))
    return family.replaced(patch=family.block, merge=1)


def gemma4(files: PictureFiles) -> Gemma4Pictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision, text = files.vision, part_of(files.config, "text_config")
    sizes = {name: files.of_processor(name) for name in ("patch_size", "pooling_kernel_size")}
    for name, size in sizes.items():
        if vision.get(name, size) != size:
            msg = f"{name} is {size}, but vision_config.{name} is {vision[name]!r:.40}"
            raise ModelError(msg)
    files.check_scaled()
    budget = files.of_processor("max_soft_tokens")
    if budget not in BUDGETS:
        msg = f"max_soft_tokens is {budget}, but must be one of {_LISTED}"
        raise ModelError(msg)
    attends_whole = text.get("use_bidirectional_attention") == "vision"
    return Gemma4Pictures(
        budget=budget,
        limit=budget if attends_whole else BUDGETS[-1],
        patch=sizes["patch_size"],
        merge=sizes["pooling_kernel_size"],
        resample=read_filter(files.processor, 3),
        marker=files.token("image", "<|image|>"),
        before=files.token("boi", "<|image>"),
        after=files.token("eoi", "<image|>"),
    )
