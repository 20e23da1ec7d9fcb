"""LLaVA 1.5: the middle of a picture as one square. Source: the processors of CLIP and LLaVA.

Pixtral 12B is a LLaVA with the pictures of Pixtral.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import InvalidRequest, ModelError
from cpuserve.media.pictures.families.pixtral import PixtralPictures, mistral3
from cpuserve.media.pictures.families.preprocessing import (
    DETAILS,
    in_merge_order,
    read_filter,
    read_number,
    refuse_setting,
)
from cpuserve.media.pictures.layout import OneMarker, PictureLayout

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

_MOST_ASPECT = 100  # a longer picture would be large before its middle is cut out


class LlavaPictures(OneMarker, frozen=True, kw_only=True, tag="llava"):
    """The numbers of one checkpoint.

    side: the pixels of a side of the square. patch: the side of a patch in pixels.
    resample: Pillow's number of the filter.
    marker: the text of the token for a row.
    """

    side: int
    patch: int
    resample: int = 3
    marker: str = "<image>"

    @property
    def page_side(self) -> int:
        """The length in pixels of the longer side of a page of a document."""
        return 4 * self.side // 3

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return the layout of a picture of this size in pixels.

        Raises InvalidRequest if one side is more than 100 times the other.
        """
        used, side = self._scaled(width, height), self.side // self.patch
        return PictureLayout(((side, side),), self.marker * side**2, *used, rows=side**2)

    def patches(self, image: Image) -> np.ndarray:
        """Return the patches of an RGB picture; see Family.patches."""
        import numpy as np
        from PIL.Image import Resampling

        scaled = image.resize(self._scaled(*image.size), Resampling(self.resample))
        left, top = ((length - self.side) // 2 for length in scaled.size)
        square = np.asarray(scaled)[top : top + self.side, left : left + self.side]
        return in_merge_order(square[None], self.patch, 1)

    def changed(self, settings: Mapping[str, Any]) -> LlavaPictures:
        """Return the family itself; InvalidRequest for a setting that would change pictures."""
        rows = (self.side // self.patch) ** 2
        for name, value in settings.items():
            if name == "detail" and value in DETAILS:
                continue
            enough = isinstance(value, int) and not isinstance(value, bool) and value >= rows
            if name == "max_tokens" and enough:
                continue
            refuse_setting(
                name,
                f"cannot be {value!r:.40}: this model's pictures all become {self.side} x "
                f"{self.side} pixels and {rows} tokens",
            )
        return self

    def _scaled(self, width: int, height: int) -> tuple[int, int]:
        """Return the size (width, height) with the shorter side of the square."""
        short, long = sorted((width, height))
        if long > _MOST_ASPECT * short:
            msg = (
                f"has {width} x {height} pixels: for this model, a side may be at most "
                f"{_MOST_ASPECT} times as long as the other"
            )
            raise InvalidRequest(msg)
        longer = int(self.side * long / short)
        return (self.side, longer) if width <= height else (longer, self.side)


def llava(
    config: Mapping[str, Any],
    processor: Mapping[str, Any],
    whole: Mapping[str, Any],
    tokens: Mapping[str, str],
) -> LlavaPictures | PixtralPictures:
    """Return the family with the numbers of a checkpoint (FamilyReader).

    Raises ModelError if a number is missing, or numbers contradict each other.
    """
    if _vision(config).get("model_type") == "pixtral":
        return mistral3({**config, "spatial_merge_size": 1}, processor, whole, tokens)
    side, patch = read_square(config, processor)
    if not processor.get("do_resize", True) or not processor.get("do_center_crop", True):
        msg = "do_resize and do_center_crop must be true: the tower reads squares of one size"
        raise ModelError(msg)
    if processor.get("do_pad"):
        msg = "do_pad must be false: borders around the whole picture are not supported"
        raise ModelError(msg)
    length = config.get("image_seq_length")
    if length is not None and length != (side // patch) ** 2:
        msg = f"image_seq_length is {length!r}, but a picture has {(side // patch) ** 2} rows"
        raise ModelError(msg)
    del whole
    return LlavaPictures(
        side=side,
        patch=patch,
        resample=read_filter(processor, 3),
        marker=tokens.get("image_token", "<image>"),
    )


def read_square(config: Mapping[str, Any], processor: Mapping[str, Any]) -> tuple[int, int]:
    """Return the sides in pixels of the square that the tower reads, and of a patch.

    Raises ModelError if the processor makes pictures of another size.
    """
    vision = _vision(config)
    patch = read_number(vision.get("patch_size", 32), "vision_config.patch_size")
    side = read_number(vision.get("image_size", 224), "vision_config.image_size")
    size, crop = processor.get("size"), processor.get("crop_size")
    square = processor.get("default_to_square")  # a size of one number would lose the aspect
    edge = size.get("shortest_edge") if isinstance(size, Mapping) else None if square else size
    cut = (crop.get("height"), crop.get("width")) if isinstance(crop, Mapping) else (crop, crop)
    if edge != side or cut != (side, side) or side % patch:
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
    found = processor.get("image_mean")
    shares = found if isinstance(found, list | tuple) else []
    if len(shares) != 3 or not all(
        isinstance(share, int | float) and 0 <= share <= 1 for share in shares
    ):
        msg = f"image_mean is {found!r:.60}: three numbers from 0 to 1 are needed"
        raise ModelError(msg)
    red, green, blue = (int(255 * share) for share in shares)
    return red, green, blue


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    vision = config.get("vision_config")
    return vision if isinstance(vision, Mapping) else {"patch_size": 14, "image_size": 336}
