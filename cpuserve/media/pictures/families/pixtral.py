"""Mistral Small 3.1 and its relatives: one picture with its aspect, and a token after each line.

Source: the image processor and the processor of Pixtral in transformers 5.24.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.base import OneTile
from cpuserve.media.pictures.families.preprocessing import (
    PictureFiles,
    is_count,
    part_of,
    read_filter,
    read_number,
    refuse_setting,
    value_error,
)
from cpuserve.program.pictures import MOST_PATCHES

_LOW_EDGE = 512  # of a picture with `detail: low`


class PixtralPictures(OneTile, frozen=True, kw_only=True):
    """The numbers of one checkpoint.

    edge: the most pixels of the longer side. most_rows: the most rows of a picture.
    line: the text of the token after each line of rows but the last.
    """

    edge: int
    most_rows: int
    marker: str = "[IMG]"
    line: str = "[IMG_BREAK]"
    after: str = "[IMG_END]"

    @property
    def document_page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        return self.edge

    def text(self, columns: int, rows: int) -> str:
        """Return the text in place of the marker; see OneTile."""
        return self.line.join([self.marker * columns] * rows) + self.after

    def in_low_detail(self) -> PixtralPictures:
        """Return the family that makes few rows of a picture."""
        return self.replaced(edge=min(self.edge, _LOW_EDGE))

    def with_setting(self, name: str, value: Any) -> PixtralPictures:
        """Return the family with a setting; see Family."""
        if name == "size" and isinstance(value, Mapping) and {*value} == {"longest_edge"}:
            return self.replaced(edge=_number(name, value["longest_edge"], self.block))
        if name == "max_tokens":
            return self.replaced(most_rows=min(self.most_rows, _number(name, value, 1)))
        settings = (
            "this model's pictures have size (longest_edge), detail, and a maximum number of tokens"
        )
        raise value_error(name, value, settings)

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) in whole blocks, with this longest edge or a shorter one.

        The edge is shorter if the picture would have more rows than `most_rows`.
        """
        edge = self.edge
        while True:
            ratio = max(width / edge, height / edge)
            sides = (width, height)
            if ratio > 1:
                sides = (math.floor(width / ratio), math.floor(height / ratio))
            columns, rows = ((side - 1) // self.block + 1 for side in sides)
            columns, rows = max(columns, 1), max(rows, 1)
            if columns * rows <= self.most_rows:
                return columns * self.block, rows * self.block
            # Too many rows: try one block less on the longer side.
            edge = (max(columns, rows) - 1) * self.block


def mistral3(files: PictureFiles) -> PixtralPictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    processor, outer = files.processor, files.whole
    patch = files.of_vision("patch_size", 16)
    merge = read_number(files.config.get("spatial_merge_size", 2), "spatial_merge_size")
    edge = read_number(part_of(processor, "size").get("longest_edge"), "size.longest_edge")
    files.check_scaled()
    if processor.get("do_center_crop"):
        msg = "do_center_crop must be false: the tower reads whole pictures"
        raise ModelError(msg)
    if outer.get("patch_size", patch) != patch or outer.get("spatial_merge_size", merge) != merge:
        msg = (
            f"processor_config.json has patch_size {outer.get('patch_size')!r:.40} and "
            f"spatial_merge_size {outer.get('spatial_merge_size')!r:.40}, but the model reads "
            f"blocks of {merge} x {merge} patches of {patch} pixels"
        )
        raise ModelError(msg)
    default = "[IMG]"
    line = files.token("image_break", "[IMG_BREAK]")
    after = files.token("image_end", "[IMG_END]")
    if _is_light_on(files.config):
        default, line, after = "<|image_pad|>", "", ""
    return PixtralPictures(
        edge=edge,
        most_rows=MOST_PATCHES // merge**2,
        patch=patch,
        merge=merge,
        resample=read_filter(processor, 3),
        marker=files.token("image", default),
        line=line,
        after=after,
    )


def _is_light_on(config: Mapping[str, Any]) -> bool:
    """Return whether a model is LightOnOCR: its prompts have no tokens for the ends of lines.

    Its first files call themselves a Mistral 3.
    """
    names = config.get("architectures") or [""]
    is_named = isinstance(names, list) and str(names[0]).lower().startswith("lightonocr")
    return is_named or config.get("model_type") == "lighton_ocr"


def _number(name: str, value: object, low: int) -> int:
    if not is_count(value, low):
        refuse_setting(name, f"must be a number of at least {low}, got {value!r:.40}")
    return value
