"""LLaVA 1.5: the middle of a picture as one square. Source: the processors of CLIP and LLaVA.

Pixtral 12B is a LLaVA with the pictures of Pixtral.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.base import OneTile
from cpuserve.media.pictures.families.pixtral import PixtralPictures, mistral3
from cpuserve.media.pictures.families.preprocessing import (
    PictureFiles,
    check_rows,
    in_merge_order,
    is_count,
    read_filter,
    read_number,
    value_error,
)

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_MOST_ASPECT = 100  # a longer picture would be large before its middle is cut out


class LlavaPictures(OneTile, frozen=True, kw_only=True):
    """The numbers of one checkpoint. side: the pixels of a side of the square."""

    side: int
    marker: str = "<image>"

    @property
    def document_page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        return 4 * self.side // 3

    def framed(self, width: int, height: int) -> tuple[int, int]:
        """Return the size of the square, which is cut out of the middle."""
        del width, height
        return self.side, self.side

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family."""
        import numpy as np
        from PIL.Image import Resampling

        scaled = image.resize(self.scaled(*image.size), Resampling(self.resample))
        left, top = ((length - self.side) // 2 for length in scaled.size)
        square = np.asarray(scaled)[top : top + self.side, left : left + self.side]
        return in_merge_order(square[None], self.patch, 1)

    def with_setting(self, name: str, value: Any) -> LlavaPictures:
        """Return the family itself; InvalidRequest for a setting that would change pictures."""
        if name == "max_tokens" and is_count(value, (self.side // self.patch) ** 2):
            return self
        settings = (
            f"this model's pictures all become {self.side} x {self.side} pixels and "
            f"{(self.side // self.patch) ** 2} tokens"
        )
        raise value_error(name, value, settings)

    def scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) with the shorter side of the square.

        Raises InvalidRequest if one side is more than 100 times the other.
        """
        short, long = sorted((width, height))
        if long > _MOST_ASPECT * short:
            msg = (
                f"has {width} x {height} pixels: for this model, a side may be at most "
                f"{_MOST_ASPECT} times as long as the other"
            )
            raise InvalidRequest(msg)
        longer = int(self.side * long / short)
        return (self.side, longer) if width <= height else (longer, self.side)


def llava(files: PictureFiles) -> LlavaPictures | PixtralPictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    config, processor = files.config, files.processor
    if _vision(files).get("model_type") == "pixtral":
        return mistral3(replace(files, config={**config, "spatial_merge_size": 1}))
    side, patch = read_square(files)
    if not processor.get("do_resize", True) or not processor.get("do_center_crop", True):
        msg = "do_resize and do_center_crop must be true: the tower reads squares of one size"
        raise ModelError(msg)
    if processor.get("do_pad"):
        msg = "do_pad must be false: borders around the whole picture are not supported"
        raise ModelError(msg)
    check_rows(
        "image_seq_length", config.get("image_seq_length"), (side // patch) ** 2, "a picture"
    )
    return LlavaPictures(
        side=side,
        patch=patch,
        resample=read_filter(processor, 3),
        marker=files.token("image", "<image>"),
    )


def read_square(files: PictureFiles) -> tuple[int, int]:
    """Return the sides in pixels of the square that the tower reads, and of a patch.

    Raises ModelError if the processor makes pictures of another size.
    """
    vision, processor = _vision(files), files.processor
    patch = read_number(vision.get("patch_size", 32), "vision_config.patch_size")
    side = read_number(vision.get("image_size", 224), "vision_config.image_size")
    size, crop = processor.get("size"), processor.get("crop_size")
    square = processor.get("default_to_square")  # a size of one number would lose the aspect
    edge = size.get("shortest_edge") if isinstance(size, Mapping) else None if square else size
    crop_size = (
        (crop.get("height"), crop.get("width")) if isinstance(crop, Mapping) else (crop, crop)
    )
    if edge != side or crop_size != (side, side) or side % patch:
        msg = (
            f"size is {size!r:.60} and crop_size {crop!r:.60}, but the tower reads {side} x {side} "
            f"pixels in patches of {patch}"
        )
        raise ModelError(msg)
    return side, patch


def read_border(processor: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the mean of pixels as the colour around a picture.

    Raises ModelError if there are no such numbers.
    """
    mean = processor.get("image_mean")
    shares = mean if isinstance(mean, list | tuple) else []
    if len(shares) != 3 or not all(
        isinstance(share, int | float) and 0 <= share <= 1 for share in shares
    ):
        msg = f"image_mean is {mean!r:.60}: three numbers from 0 to 1 are needed"
        raise ModelError(msg)
    red, green, blue = (int(255 * share) for share in shares)
    return red, green, blue


def _vision(files: PictureFiles) -> Mapping[str, Any]:
    vision = files.config.get("vision_config")
    return vision if isinstance(vision, Mapping) else {"patch_size": 14, "image_size": 336}
