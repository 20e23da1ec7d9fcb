"""Convert values in Python syntax, which some models write in calls, to JSON."""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn

_PARTS = re.compile(
    r"""(?P<text>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")|(?P<word>[A-Za-z_]\w*)"""
    # A string without a closing quote matches up to the end of the text, to keep the time linear.
    r"""|(?P<rest>['"].*)|(?P<comma>,)(?=\s{0,64}[])}])|(?P<open>\()|(?P<close>\))""",
    re.DOTALL,
)
_WORDS = {"True": "true", "False": "false", "None": "null"}
_ESCAPES = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a",
            "0": "\0", "\n": "", "\\": "\\", "'": "'", '"': '"'}  # fmt: skip


def json_of_python(text: str) -> str | None:
    """Return a Python value (string, number, list, tuple, dict, True, None) as JSON, or None."""
    written = _PARTS.sub(_as_json, text.strip())
    try:
        value = json.loads(written, parse_constant=refuse, parse_float=finite)
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def text_of_python(inside: str) -> str:
    """Return the text between two quotes with its Python escapes replaced."""
    return _ESCAPES.sub(_unescaped, inside)


def finite(text: str) -> float:
    """Return a number. Raises ValueError if it is too large."""
    value = float(text)
    return value if math.isfinite(value) else refuse(text)


def refuse(text: str) -> NoReturn:
    """Raise ValueError: the value is NaN or Infinity, which Python reads but JSON has not."""
    raise ValueError(text)


def _as_json(found: re.Match[str]) -> str:
    match found.lastgroup:
        case "text":
            return json.dumps(text_of_python(found[0][1:-1]))
        case "word":
            return _WORDS.get(found[0], found[0])
        case "comma":
            return ""
        case "rest":
            return found[0]
        case "open":
            return "["
    return "]"


def _unescaped(found: re.Match[str]) -> str:
    escape = found[1]
    if escape[0] in "xuU" and len(escape) > 1:
        code = int(escape[1:], 16)
        is_text = code < 0x110000 and not 0xD800 <= code < 0xE000
        return chr(code) if is_text else "\ufffd"
    return _ESCAPED.get(escape, found[0])
