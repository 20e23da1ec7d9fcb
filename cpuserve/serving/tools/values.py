"""Find the types of values in schemas; convert values without quotes, or in Python, to JSON.

Types are tried in the order of vLLM: null, integer, number, boolean, object, array, string.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from cpuserve.serving.tools.base import JsonSchema

Types = frozenset[str]

# Words that clients write in place of the types of JSON schemas.
_ALIASES = {
    **dict.fromkeys(("str", "text", "varchar", "char", "enum"), "string"),
    **dict.fromkeys(("int", "int32", "int64", "uint", "long", "short", "unsigned"), "integer"),
    **dict.fromkeys(("float", "float32", "float64", "double"), "number"),
    **dict.fromkeys(("dict", "map"), "object"),
    **dict.fromkeys(("list", "arr", "tuple", "sequence"), "array"),
    "bool": "boolean",
}
_UNIONS = ("anyOf", "oneOf", "allOf")

# Values in Python syntax, which some models write in calls.
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


def types_of(schema: Any, root: JsonSchema) -> Types:
    """Return the types of a schema, through all its unions and references into `root`."""
    found: set[str] = set()
    for one in parts_of(schema, root):
        kinds = one.get("type")
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if isinstance(kind, str):
                name = kind.strip().lower()
                found.add(_ALIASES.get(name, name))
        values = one.get("enum")
        found.update(map(_type_of, values if isinstance(values, list) else ()))
        if "const" in one:
            found.add(_type_of(one["const"]))
    return frozenset(found)


def property_schema(schema: JsonSchema, key: str) -> Any:
    """Return the schema of a member of an object, or None; schemas of clients are unchecked."""
    properties = schema.get("properties")
    return properties.get(key) if isinstance(properties, Mapping) else None


def parts_of(schema: Any, root: JsonSchema) -> Iterator[JsonSchema]:
    """Yield a schema and all schemas of its unions and references into `root`, each once."""
    # Schemas come from clients unchecked: they may nest a thousand levels or have any members.
    followed: set[str] = set()
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if not isinstance(one, Mapping):
            continue
        yield one
        for key in _UNIONS:
            members = one.get(key)
            waiting += members if isinstance(members, list) else ()
        reference = one.get("$ref")
        if isinstance(reference, str) and reference not in followed:
            followed.add(reference)
            waiting.append(referred(reference, root))


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"


def referred(reference: str, root: JsonSchema) -> Any:
    """Return the target in `root` of a JSON pointer like #/$defs/City, or None."""
    found: Any = root
    if not reference.startswith("#"):
        return None
    for part in reference[1:].split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def as_json(text: str, types: Types) -> str:
    """Return a value as JSON: the first of `types` that fits, else any type, else a string."""
    for kind, read in _READERS.items():
        if kind in types and (value := read(text)) is not None:
            return value
    if "string" not in types and (value := _any(text)) is not None:
        return value
    return json.dumps(text, ensure_ascii=False)


def may_be_null(begun: str) -> bool:
    """Return whether a value that begins with the text `begun` may become null."""
    return any(word.startswith(begun.strip().lower()) for word in ("null", "none"))


def _null(text: str) -> str | None:
    return "null" if text.strip().lower() in ("null", "none") else None


def _integer(text: str) -> str | None:
    try:
        return str(int(text))
    except ValueError:  # the text is no integer, or has more digits than Python reads
        return None


def _number(text: str) -> str | None:
    try:
        value = float(text)
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    return _any(text) or json.dumps(value)  # text that is JSON is returned unchanged


def _boolean(text: str) -> str | None:
    return {"true": "true", "1": "true", "false": "false", "0": "false"}.get(text.strip().lower())


def _any(text: str, *kinds: type) -> str | None:
    """Return `text` if it is a JSON value (of one of the types `kinds`, if given), else None."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return text.strip() if not kinds or isinstance(value, kinds) else None


def json_of_python(text: str) -> str | None:
    """Return a Python value (string, number, list, tuple, dict, True, None) as JSON, or None."""
    written = _PARTS.sub(_part_as_json, text.strip())
    try:
        value = json.loads(written, parse_constant=_refuse, parse_float=_finite)
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def text_of_python(inside: str) -> str:
    """Return the text between two quotes with its Python escapes replaced."""
    return _ESCAPES.sub(_unescaped, inside)


def _finite(text: str) -> float:
    """Return a number. Raises ValueError if it is too large."""
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    """Raise ValueError: the value is NaN or Infinity, which Python reads but JSON has not."""
    raise ValueError(text)


def _part_as_json(found: re.Match[str]) -> str:
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


def _of_python(text: str, begins: str) -> str | None:
    """Return a value in Python syntax, which some templates write, as JSON, or None.

    begins: the characters that may begin the value.
    """
    return json_of_python(text) if text.strip()[:1] in tuple(begins) else None


_READERS: dict[str, Callable[[str], str | None]] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": lambda text: _any(text, dict) or _of_python(text, "{"),
    "array": lambda text: _any(text, list) or _of_python(text, "[("),
}
