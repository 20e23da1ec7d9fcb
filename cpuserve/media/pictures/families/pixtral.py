"""Mistral Small 3.1 and its relatives: one picture with its aspect, and a token after each line.

Source: the image processor and the processor of Pixtral in transformers 5.24.
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

_LOW_EDGE = 512  # of a picture with `detail: low`


class PixtralPictures(OneMarker, frozen=True, kw_only=True, tag="pixtral"):
    """The numbers of one checkpoint.

    edge: the most pixels of the longer side. most_rows: the most rows of a picture.
    patch: the side of a patch in pixels. merge: the side of a block that becomes one row.
    resample: Pillow's number of the filter.
    marker, line, after: the texts of the tokens for a row, after each line of them but the last,
      and after the last line.
    """

    edge: int
    most_rows: int
    merge: int
    resample: int = 3
    marker: str = "[IMG]"
    line: str = "[IMG_BREAK]"
    after: str = "[IMG_END]"

    @property
    def block(self) -> int:
        """The side in pixels of a block of patches that becomes one row."""
        return self.patch * self.merge

    @property
    def page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        return self.edge

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels."""
        across, down = self._grid(width, height)
        lines = [self.marker * across] * down
        tile = down * self.merge, across * self.merge
        used = across * self.block, down * self.block
        return PictureLayout((tile,), self.line.join(lines) + self.after, *used, rows=across * down)

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL.Image import Resampling

        across, down = self._grid(*image.size)
        size = across * self.block, down * self.block
        pixels = np.asarray(image.resize(size, Resampling(self.resample)))
        return in_merge_order(pixels[None], self.patch, self.merge)

    def changed(self, settings: Mapping[str, Any]) -> PixtralPictures:
        """Return the family with these settings; InvalidRequest if it cannot follow one."""
        made = self
        for name, value in settings.items():
            if name == "detail" and value in DETAILS:
                made = made._with(edge=min(made.edge, _LOW_EDGE)) if value == "low" else made
            elif name == "size" and isinstance(value, Mapping) and {*value} == {"longest_edge"}:
                edge = value["longest_edge"]
                made = made._with(edge=_number("size", edge, made.block))
            elif name == "max_tokens":
                most = _number(name, value, 1)
                made = made._with(most_rows=min(made.most_rows, most))
            else:
                refuse_setting(
                    name,
                    f"cannot be {value!r:.40}: this model's pictures have size (longest_edge), "
                    "detail, and a maximum number of tokens",
                )
        return made

    def _with(self, **changes: int) -> PixtralPictures:
        return msgspec.structs.replace(self, **changes)

    def _grid(self, width: int, height: int) -> tuple[int, int]:
        """Return the blocks (across, down) of a picture with this longest edge, or a shorter one.

        The edge is shorter if the picture would have more rows than `most_rows`.
        """
        edge = self.edge
        while True:
            ratio = max(width / edge, height / edge)
            sides = (width, height)
            if ratio > 1:
                sides = (math.floor(width / ratio), math.floor(height / ratio))
            across, down = ((side - 1) // self.block + 1 for side in sides)
            across, down = max(across, 1), max(down, 1)
            if across * down <= self.most_rows:
                return across, down
            # One block less on the longer side.
            edge = (max(across, down) - 1) * self.block


def mistral3(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> PixtralPictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    patch = read_number(vision.get("patch_size", 16), "vision_config.patch_size")
    merge = read_number(config.get("spatial_merge_size", 2), "spatial_merge_size")
    size = processor.get("size")
    given = size if isinstance(size, Mapping) else {}
    edge = read_number(given.get("longest_edge"), "size.longest_edge")
    if processor.get("do_resize", True) is False:
        msg = "do_resize is false: pictures of any size are read, which have to be scaled"
        raise ModelError(msg)
    if processor.get("do_center_crop"):
        msg = "do_center_crop must be false: the tower reads whole pictures"
        raise ModelError(msg)
    if whole.get("patch_size", patch) != patch or whole.get("spatial_merge_size", merge) != merge:
        msg = (
            f"processor_config.json has patch_size {whole.get('patch_size')!r:.40} and "
            f"spatial_merge_size {whole.get('spatial_merge_size')!r:.40}, but the model reads "
            f"blocks of {merge} x {merge} patches of {patch} pixels"
        )
        raise ModelError(msg)
    usual = "[IMG]"
    line = tokens.get("image_break_token", "[IMG_BREAK]")
    after = tokens.get("image_end_token", "[IMG_END]")
    if _is_light_on(config):
        usual, line, after = "<|image_pad|>", "", ""
    return PixtralPictures(
        edge=edge,
        most_rows=MOST_PATCHES // merge**2,
        patch=patch,
        merge=merge,
        resample=read_filter(processor, 3),
        marker=tokens.get("image_token", usual),
        line=line,
        after=after,
    )


def _is_light_on(config: Mapping[str, Any]) -> bool:
    """Return whether a model is LightOnOCR: its prompts have no tokens for the ends of lines.

    Its first files call themselves a Mistral 3.
    """
    names = config.get("architectures") or [""]
    own = isinstance(names, list) and str(names[0]).lower().startswith("lightonocr")
    return own or config.get("model_type") == "lighton_ocr"


def _number(name: str, value: object, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        refuse_setting(name, f"must be a number of at least {least}, got {value!r:.40}")
    return value
