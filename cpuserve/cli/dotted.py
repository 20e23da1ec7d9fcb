"""Flags with keys behind dots, as vLLM has them: --limit-mm-per-prompt.image 2."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Any

from cpuserve.base.errors import ConfigError

_DOTTED = re.compile(r"(--?[a-zA-Z][\w-]*)\.([^=]+)(?:=(.*))?", re.DOTALL)
_MOST_KEYS = 16


def without_dots(argv: Iterable[str], flags: Collection[str]) -> list[str]:
    """Return arguments with one JSON object in place of the dotted keys of a flag.

    flags: the flags that take an object. A value is read as JSON, or else is a text; a key that
    ends with "+" appends to a list. Keys are added to an object that the flag has already.

    Raises:
        ConfigError: a value is missing, or a key is empty, too deep, or in a value of another type.
    """
    found: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        match = _DOTTED.fullmatch(word)
        name = match[1].replace("_", "-") if match else ""
        if match is None or name not in flags:
            rest.append(word)
            continue
        value = match[3] if match[3] is not None else next(words, None)
        if value is None:
            msg = f"flag {word} expects a value"
            raise ConfigError(msg)
        _put(found.setdefault(name, {}), match[2].split("."), _read(value), word)
    if not found:
        return rest
    return _merged(rest, found)


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _put(target: dict[str, Any], keys: list[str], value: Any, word: str) -> None:
    if not all(keys) or len(keys) > _MOST_KEYS:
        msg = f"flag {word[:80]} must have 1 to {_MOST_KEYS} keys between its dots"
        raise ConfigError(msg)
    *outer, last = keys
    for key in outer:
        inner: Any = target.setdefault(key, {})
        if not isinstance(inner, dict):
            msg = f"flag {word[:80]} needs an object at {key!r}, which has another value"
            raise ConfigError(msg)
        target = inner
    if last.endswith("+") and isinstance(target.setdefault(last[:-1], []), list):
        target[last[:-1]].append(value)
    else:
        target[last] = value


def _merged(argv: list[str], objects: dict[str, Any]) -> list[str]:
    """Return arguments with the objects merged into the values that their flags have."""
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if flag not in objects:
            rest.append(word)
            continue
        given = _read(value if equals else next(words, ""))
        if isinstance(given, dict):
            objects[flag] = _joined(given, objects[flag])
    return [*rest, *(f"{flag}={json.dumps(value)}" for flag, value in objects.items())]


def _joined(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the members of both, those of `other` in place of those of `one`."""
    found = dict(one)
    for key, value in other.items():
        before = found.get(key)
        if isinstance(before, dict) and isinstance(value, dict):
            value = _joined(before, value)
        found[key] = value
    return found
