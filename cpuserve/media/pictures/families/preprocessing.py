"""What families of pictures have in common: the files and settings they read, tiles, patches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

from cpuserve.base.errors import InvalidRequest, ModelError

if TYPE_CHECKING:
    import numpy as np

MOST_NUMBER = (1 << 63) - 1  # of a setting: the processes that decode get numbers of 64 bits
DETAILS = ("auto", "low", "high", "original")
_CHANNELS = 3
_MOST_FILTER = 5  # Pillow's HAMMING


@dataclass(frozen=True, slots=True)
class PictureFiles:
    """What the files of a checkpoint say about pictures.

    config: config.json. processor: the settings of the image processor.
    whole: the settings of the processor. tokens: the texts of special tokens, by name.
    """

    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    whole: Mapping[str, Any]
    tokens: Mapping[str, str]

    @property
    def vision(self) -> Mapping[str, Any]:
        """The config of the tower; {} if it has none."""
        return part_of(self.config, "vision_config")

    def of_vision(self, key: str, default: int | None = None) -> int:
        """Return a number of the tower's config, `default` without it; see read_number."""
        return read_number(self.vision.get(key, default), f"vision_config.{key}")

    def of_processor(self, key: str, default: int | None = None) -> int:
        """Return a number of the image processor, `default` without it; see read_number."""
        return read_number(self.processor.get(key, default), key)

    def token(self, name: str, default: str) -> str:
        """Return the text of a token, `default` if tokenizer_config.json does not have it."""
        return self.tokens.get(f"{name}_token", default)

    def check_square(self, side: int) -> None:
        """Raise ModelError if pictures do not become squares of the side that the tower reads."""
        size = part_of(self.processor, "size")
        if (size.get("height"), size.get("width")) != (side, side):
            size_text = f"{self.processor.get('size')!r:.60}"
            msg = f"size is {size_text}, but the tower reads {side} x {side} pixels"
            raise ModelError(msg)

    def check_scaled(self) -> None:
        """Raise ModelError if the image processor does not scale pictures."""
        if self.processor.get("do_resize", True) is False:
            msg = "do_resize is false: pictures of any size are read, which have to be scaled"
            raise ModelError(msg)


def part_of(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a part of a config; {} if it has none, or something else."""
    part = config.get(key)
    return part if isinstance(part, Mapping) else {}


def check_rows(name: str, length: object, rows: int, part: str = "a tile") -> None:
    """Raise ModelError if a checkpoint says that a tile, or what else has them, has other rows.

    name, length: the key and its value, None without it.
    """
    if length is not None and length != rows:
        msg = f"{name} is {length!r}, but {part} has {rows} rows"
        raise ModelError(msg)


def cut_tiles(pixels: np.ndarray, side: int) -> np.ndarray:
    """Return the tiles [n, side, side, 3] of a picture [height, width, 3], line by line."""
    height, width, _ = pixels.shape
    lines = pixels.reshape(height // side, side, width // side, side, _CHANNELS)
    return lines.swapaxes(1, 2).reshape(-1, side, side, _CHANNELS)


def named_tiles(columns: int, grid_rows: int, before: str, rows: str) -> str:
    """Return a text with the line and the column of each tile.

    before: the text before each name. rows: the text of the rows of a tile.
    """
    lines = (
        "".join(f"{before}<row_{y + 1}_col_{x + 1}>{rows}" for x in range(columns)) + "\n"
        for y in range(grid_rows)
    )
    return "".join(lines)


def in_merge_order(tiles: np.ndarray, patch: int, merge: int) -> np.ndarray:
    """Return tiles [n, height, width, 3] as patches; see Family.patches."""
    import numpy as np

    number, height, width, _ = tiles.shape
    rows, columns = height // patch // merge, width // patch // merge
    blocks = tiles.reshape(number, rows, merge, patch, columns, merge, patch, _CHANNELS)
    ordered = blocks.transpose(0, 1, 4, 2, 5, 3, 6, 7)
    return np.ascontiguousarray(ordered).reshape(-1, patch * patch * _CHANNELS)


def read_number(value: object, name: str, low: int = 1) -> int:
    """Return a number of a checkpoint; ModelError if it is none, below `low`, or too large."""
    if type(value) is not int or not low <= value <= MOST_NUMBER:
        msg = f"{name} is {value!r:.40}: a whole number is needed to read pictures"
        raise ModelError(msg)
    return value


def read_filter(processor: Mapping[str, Any], default: int) -> int:
    """Return Pillow's number of the filter of an image processor; ModelError if there is none."""
    filter_ = processor.get("resample", default)
    if type(filter_) is not int or not 0 <= filter_ <= _MOST_FILTER:
        msg = f"resample is {filter_!r:.40}: a filter of Pillow is needed, from 0 to {_MOST_FILTER}"
        raise ModelError(msg)
    return filter_


def refuse_setting(name: str, reason: str) -> NoReturn:
    """Raise the error for a setting of the preprocessing that a family cannot follow."""
    raise setting_error(name, reason)


def setting_error(name: str, reason: str) -> InvalidRequest:
    """Return the error for a setting of the preprocessing that a family cannot follow."""
    return InvalidRequest(f"{name} {reason}", role="mm_processor_kwargs")


def value_error(name: str, value: object, settings: str) -> InvalidRequest:
    """Return the error for a setting that a family does not have, or not with this value.

    settings: the text that says which settings it has.
    """
    return setting_error(name, f"cannot be {value!r:.40}: {settings}")


def refuse_detail(detail: object) -> NoReturn:
    """Raise the error for a value that is no level of detail."""
    refuse_setting("detail", f"must be one of {', '.join(DETAILS)}, got {str(detail)[:40]!r}")


def read_flag(name: str, value: object) -> bool:
    """Return the value of a setting that is true or false; InvalidRequest if it is neither."""
    if not isinstance(value, bool):
        refuse_setting(name, f"must be true or false, got {value!r:.40}")
    return value


def is_count(value: object, low: int, high: int = MOST_NUMBER) -> TypeGuard[int]:
    """Return whether the value of a setting is a whole number in these bounds."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
