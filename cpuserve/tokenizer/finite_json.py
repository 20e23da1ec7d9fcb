"""Numbers that JSON or a double cannot hold, which become null, as JavaScript writes them.

Models write NaN, Infinity and 1e400. Clients could not read such arguments, or read them
differently when they are whole and when they are streamed.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

_WORDS = frozenset({"NaN", "Infinity", "-Infinity"})
_OTHER = re.compile(r'[^"+\-.0-9A-Za-z]*')
_SCALAR = re.compile(r"[+\-.0-9A-Za-z]*")
_INSIDE = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)


def loads_finite(text: str) -> Any:
    """Return a JSON value, with None for NaN, infinities, and numbers that no double holds.

    Raises:
      ValueError, RecursionError: the text is not JSON.
    """
    return json.loads(text, parse_constant=lambda _: None, parse_float=_finite)


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


class FiniteJson:
    """Changes JSON that arrives in pieces; a number is held back until its end has arrived.

    A text that does not begin with "{" is not changed.
    """

    def __init__(self) -> None:
        self._held: list[str] = []
        self._in_string = False
        self._is_object: bool | None = None

    def feed(self, text: str) -> str:
        """Return the next piece, changed as far as its numbers are complete."""
        if self._is_object is None and text.strip():
            self._is_object = text.lstrip().startswith("{")
        if not self._is_object:
            return text
        if self._held and not self._in_string and _SCALAR.fullmatch(text):
            self._held.append(text)
            return ""
        text, at, parts = "".join([*self._held, text]), 0, []
        self._held.clear()
        while at < len(text):
            begun, at = at, self._step(text, at)
            if at == begun:  # a number, or a backslash, is at the end of what has arrived
                self._held.append(text[at:])
                break
            parts.append(self._changed(text[begun:at]))
        return "".join(parts)

    def end(self) -> str:
        """Return the text that is still held back."""
        held = self._changed("".join(self._held))
        self._held.clear()
        return held

    def _step(self, text: str, at: int) -> int:
        """Return the end of what begins at `at`; `at` if more text is needed to know it."""
        if self._in_string:
            end = _end(_INSIDE, text, at)
            if text.startswith('"', end):
                self._in_string = False
                return end + 1
            return end
        if text[at] == '"':
            self._in_string = True
            return at + 1
        end = _end(_OTHER, text, at)
        if end > at:
            return end
        end = _end(_SCALAR, text, at)
        return at if end == len(text) else end

    def _changed(self, piece: str) -> str:
        if self._in_string:
            return piece
        if piece in _WORDS:
            return "null"
        try:
            return piece if math.isfinite(float(piece)) else "null"
        except ValueError:
            return piece


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """Return where the match of a pattern that also matches nothing ends."""
    found = pattern.match(text, at)
    return found.end() if found else at
