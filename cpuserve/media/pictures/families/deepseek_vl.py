"""DeepSeek-VL and Janus: the whole picture in a square with a border.

Source: their image processors and processors in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.media.pictures.families.llava import LlavaPictures, read_border
from cpuserve.media.pictures.families.preprocessing import PictureFiles, in_merge_order, read_filter

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image


class DeepseekVLPictures(LlavaPictures, frozen=True, kw_only=True):
    """The numbers of one checkpoint, with the numbers of LLaVA 1.5.

    least: the least pixels of the shorter side of a scaled picture.
    border: the colour around the picture.
    """

    least: int = 14
    border: tuple[int, int, int]

    @property
    def document_page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        return self.side

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL import Image as images

        (width, height), side = self.scaled(*image.size), self.side
        square = images.new("RGB", (side, side), self.border)
        scaled = image.resize((width, height), images.Resampling(self.resample))
        square.paste(scaled, ((side - width) // 2, (side - height) // 2))
        return in_merge_order(np.asarray(square)[None], self.patch, 1)

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) with the longer side of the square."""
        share = self.side / max(width, height)
        scaled_width, scaled_height = (
            max(round(length * share), self.least) for length in (width, height)
        )
        return scaled_width, scaled_height


def deepseek_vl(files: PictureFiles) -> DeepseekVLPictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    processor, processor_config = files.processor, files.whole
    side, patch = files.of_vision("image_size", 224), files.of_vision("patch_size", 16)
    size, min_side = processor.get("size"), files.of_processor("min_size", 14)
    sides = (size.get("height"), size.get("width")) if isinstance(size, Mapping) else (size, size)
    if sides != (side, side) or side % patch or min_side > side:
        msg = (
            f"size is {size!r:.60} and min_size {min_side}, but the tower reads {side} x {side} "
            f"pixels in patches of {patch}"
        )
        raise ModelError(msg)
    if not processor.get("do_resize", True) or not processor.get("do_pad", True):
        msg = "do_resize and do_pad must be true: the tower reads squares of one size"
        raise ModelError(msg)
    rows = (side // patch) ** 2
    count = processor_config.get("num_image_tokens", rows)
    if count != rows:
        msg = f"num_image_tokens is {count!r}, but a picture has {rows} rows"
        raise ModelError(msg)
    return DeepseekVLPictures(
        side=side,
        patch=patch,
        resample=read_filter(processor, 3),
        marker=files.token("image", "<image_placeholder>"),
        least=min_side,
        border=read_border(processor),
    )


def janus(files: PictureFiles) -> DeepseekVLPictures:
    """Return the family of Janus (FamilyReader); see deepseek_vl."""
    vision = {"image_size": 384, **files.vision}
    family = deepseek_vl(replace(files, config={**files.config, "vision_config": vision}))
    return family.replaced(
        before=files.token("boi", "<begin_of_image>"), after=files.token("eoi", "<end_of_image>")
    )
