"""What families of pictures have in common: how they read settings, and the order of patches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from cpuserve.base.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    import numpy as np

MOST_NUMBER = (1 << 63) - 1  # of a setting: the processes that decode get numbers of 64 bits
DETAILS = ("auto", "low", "high", "original")
_CHANNELS = 3
_MOST_FILTER = 5  # Pillow's HAMMING


def in_merge_order(tiles: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Return tiles [n, height, width, 3] as patches; see Family.patches."""
    import numpy as np

    number, height, width, _ = tiles.shape
    down, across = height // patch // merge, width // patch // merge
    split = tiles.reshape(number, down, merge, patch, across, merge, patch, _CHANNELS)
    ordered = split.transpose(0, 1, 4, 2, 5, 3, 6, 7)
    return np.ascontiguousarray(ordered).reshape(-1, patch * patch * _CHANNELS)


def read_number(value: object, name: str, least: int = 1) -> int:
    """Return a number of a checkpoint; ModelError if it is none, below `least`, or too large."""
    if type(value) is not int or not least <= value <= MOST_NUMBER:
        msg = f"{name} is {value!r:.40}: a whole number is needed to read pictures"
        raise ModelError(msg)
    return value


def read_filter(processor: Mapping[str, Any], usual: int) -> int:
    """Return Pillow's number of the filter of an image processor; ModelError if there is none."""
    found = processor.get("resample", usual)
    if type(found) is not int or not 0 <= found <= _MOST_FILTER:
        msg = f"resample is {found!r:.40}: a filter of Pillow is needed, from 0 to {_MOST_FILTER}"
        raise ModelError(msg)
    return found


def refuse_setting(name: str, why: str) -> NoReturn:
    """Raise the error for a setting of the preprocessing that a family cannot follow."""
    msg = f"{name} {why}"
    raise InvalidRequest(msg, role="mm_processor_kwargs")


def is_low(detail: object) -> bool:
    """Return whether `detail` asks for few rows; InvalidRequest if it is no level of detail."""
    if detail not in DETAILS:
        refuse_setting("detail", f"must be one of {', '.join(DETAILS)}, got {str(detail)[:40]!r}")
    return detail == "low"
