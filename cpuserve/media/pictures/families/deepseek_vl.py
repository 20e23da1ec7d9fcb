"""DeepSeek-VL and Janus: the whole picture in a square with a border.

Source: their image processors and processors in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.llava import LlavaPictures, read_border
from cpuserve.media.pictures.families.preprocessing import in_merge_order, read_filter, read_number
from cpuserve.media.pictures.layout import PictureLayout

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


class DeepseekVLPictures(LlavaPictures, frozen=True, kw_only=True, tag="deepseek_vl"):
    """The numbers of one checkpoint, with the numbers of LLaVA 1.5.

    least: the least pixels of the shorter side of a scaled picture.
    border: the colour around the picture.
    before, after: the texts of the tokens around the rows; "" = there are none.
    """

    least: int = 14
    border: tuple[int, int, int]
    before: str = ""
    after: str = ""

    @property
    def page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        side: int = self.side
        return side

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels."""
        found = super().layout(width, height)
        return msgspec.structs.replace(found, text=f"{self.before}{found.text}{self.after}")

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL import Image as images

        (width, height), side = self._scaled(*image.size), self.side
        square = images.new("RGB", (side, side), self.border)
        scaled = image.resize((width, height), images.Resampling(self.resample))
        square.paste(scaled, ((side - width) // 2, (side - height) // 2))
        return in_merge_order(np.asarray(square)[None], self.patch, 1)

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) with the longer side of the square."""
        share = self.side / max(width, height)
        across, down = (max(round(length * share), self.least) for length in (width, height))
        return across, down


def deepseek_vl(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> DeepseekVLPictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    side = read_number(vision.get("image_size", 224), "vision_config.image_size")
    patch = read_number(vision.get("patch_size", 16), "vision_config.patch_size")
    size = processor.get("size")
    found = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else (size, size)
    least = read_number(processor.get("min_size", 14), "min_size")
    if found != (side, side) or side % patch or least > side:
        msg = (
            f"size is {size!r:.60} and min_size {least}, but the tower reads {side} x {side} "
            f"pixels in patches of {patch}"
        )
        raise ModelError(msg)
    if not processor.get("do_resize", True) or not processor.get("do_pad", True):
        msg = "do_resize and do_pad must be true: the tower reads squares of one size"
        raise ModelError(msg)
    rows = (side // patch) ** 2
    if whole.get("num_image_tokens", rows) != rows:
        msg = f"num_image_tokens is {whole['num_image_tokens']!r}, but a picture has {rows} rows"
        raise ModelError(msg)
    return DeepseekVLPictures(
        side=side,
        patch=patch,
        resample=read_filter(processor, 3),
        marker=tokens.get("image_token", "<image_placeholder>"),
        least=least,
        border=read_border(processor),
    )


def janus(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> DeepseekVLPictures:
    """Return the family of Janus with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    vision = config.get("vision_config")
    vision = vision if isinstance(vision, Mapping) else {}
    own = {**config, "vision_config": {"image_size": 384, **vision}}
    return msgspec.structs.replace(
        deepseek_vl(own, processor, whole, tokens),
        before=tokens.get("boi_token", "<begin_of_image>"),
        after=tokens.get("eoi_token", "<end_of_image>"),
    )
