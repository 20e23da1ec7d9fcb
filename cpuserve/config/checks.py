"""Checks of option values, and conversions of values from the format of other servers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence

from cpuserve.config.field import a_path, at_least, named
from cpuserve.config.values import parse_count, parse_space


def length(value: int) -> None:
    """Accept -1 and all positive numbers."""
    if value != -1:
        at_least(1)(value)


def zero_as_own(text: str) -> str:
    """Convert 0 to -1: for the model's own context length, llama.cpp has 0 and cpuserve -1."""
    return "-1" if text.strip() == "0" else text


ANY_NAME = "*"  # among the served names of a model: requests may use any name


def model_names(value: list[str]) -> None:
    """Accept different names that are not empty."""
    if not all(value) or len({*value}) < len(value):
        msg = "must be names that are not empty, each once"
        raise ValueError(msg)


def named_paths(value: list[str]) -> None:
    """Accept items NAME=PATH, such as LoRA adapters."""
    named(value, "PATH")
    for item in value:
        a_path(item.partition("=")[2])


def named_places(value: list[str]) -> None:
    """Accept items NAME=PLACE, where PLACE is the location of an offload tier of the KV cache."""
    named(value, "PLACE")
    for place in (item.partition("=")[2] for item in value):
        if place.startswith("~"):
            a_path(place)


def amount(text: str) -> None:
    """Accept an amount of memory, but no percentage and not "auto"."""
    if parse_space(text).percent is not None or text.strip().lower() == "auto":
        msg = "give GiB (4 or 0.5) or a unit (512MiB)"
        raise ValueError(msg)


WEIGHT_PLACES = ("auto", "always", "never")


def weight_place(text: str) -> None:
    """Accept auto, always, never, or an amount of memory for the weights that is not 0."""
    if text in WEIGHT_PLACES:
        return
    try:
        amount(text)
    except ValueError:
        msg = "give auto, always, never, or the memory for weights: GiB (4 or 0.5) or 512MiB"
        raise ValueError(msg) from None
    if not parse_space(text).bytes:
        msg = "weights need some memory: give GiB (4 or 0.5), a unit (512MiB), or never"
        raise ValueError(msg)


def bytes_as_space(text: str) -> str:
    """Convert bytes ("1073741824", "4G" and "4g" as in vLLM) or a unit ("4GiB") to GiB."""
    text = text.strip()
    size: int | None = None
    with contextlib.suppress(ValueError):
        size = parse_count(text)
    if size is None and text[-1:].lower() == "b":
        with contextlib.suppress(ValueError):
            size = parse_space(text).bytes or 0
    if size is None or size < 0:
        msg = "give bytes (4294967296 or 4G) or a unit (4GiB, 512MiB)"
        raise ValueError(msg)
    return f"{size / (1 << 30):.9f}"


def openvino_type(text: str) -> str:
    """Convert a KV cache type of OpenVINO ("u8", "i8") to a type of cpuserve; keep other texts."""
    return "int8" if text.strip().lower() in ("u8", "i8") else text


# vLLM shows base_model_name as the parent of an adapter. Here this key is ignored.
_KEYS = ("name", "path", "base_model_name")
_EXPECTED = """must be NAME=PATH or a JSON object such as '{"name": "a", "path": "DIR"}'"""


def read_modules(value: object) -> list[str]:
    """Return adapters as NAME=PATH; any of them may have been passed as an object.

    value: a list, an object, or a text (a JSON list or object, or items separated by commas).

    Raises a ValueError for an object without name or path, or with an unknown key.
    """
    return [_pair(item) for item in _items(value)]


def _items(value: object) -> Sequence[object]:
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, Mapping):
        return [value]
    text = str(value)
    if not text.lstrip().startswith(("{", "[")):
        return text.split(",")
    found = _json(text)
    return found if isinstance(found, list) else [found]


def _pair(item: object) -> str:
    if isinstance(item, str) and item.lstrip().startswith("{"):
        item = _json(item)
    if isinstance(item, str):
        return item.strip()
    if not isinstance(item, Mapping):
        raise ValueError(_EXPECTED)
    if unknown := [str(key) for key in item if key not in _KEYS]:
        msg = f"unknown key {', '.join(map(repr, unknown[:8]))}; supported: {', '.join(_KEYS)}"
        raise ValueError(msg)
    name, path = item.get("name"), item.get("path")
    if not (isinstance(name, str) and isinstance(path, str)):
        raise ValueError(_EXPECTED)
    if "=" in name:
        msg = f"the name {name!r} of an adapter must not contain ="
        raise ValueError(msg)
    return f"{name.strip()}={path.strip()}"


def _json(text: str) -> object:
    try:
        found: object = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(_EXPECTED) from None
    return found
