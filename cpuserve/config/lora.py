"""LoRA adapters in options, as NAME=PATH or as the JSON object of --lora-modules in vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

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
