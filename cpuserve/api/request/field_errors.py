"""Error messages for invalid request bodies, with the request field and the JSON types."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from typing import TYPE_CHECKING

from cpuserve.base.errors import InvalidRequest

if TYPE_CHECKING:
    import msgspec

# Matches the path in msgspec errors such as "Expected `int | null`, got `str` - at `$.stop[0]`".
_PATH = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_TYPE = re.compile(r"Expected `(?P<want>[^`]*)`, got `(?P<got>[^`]*)`")
_MISSING = re.compile(r"missing required field `(?P<name>[^`]*)`")

# Matches an escape sequence in a JSON string.
# The group matches only an unpaired surrogate, one half of a surrogate pair without the other half.
_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)

_JSON_NAMES = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_GOT_NAMES = {**_JSON_NAMES, "bool": "a boolean"}


def wrong_field(error: msgspec.ValidationError) -> InvalidRequest:
    """Return the error for a missing field or a field of the wrong type, with the field name."""
    text = str(error)
    if missing := _MISSING.search(text):
        name = missing["name"]
        return InvalidRequest(f"{name} is missing", param=name, code="missing_required_parameter")
    found = _PATH.search(text)
    path = found["path"] if found else ""
    reason = text[: found.start()] if found else text
    if types := _TYPE.fullmatch(reason):
        got = _GOT_NAMES.get(types["got"], types["got"])
        reason = f"must be {_wanted(types['want'])}, got {got}"
    name = path.partition(".")[0].partition("[")[0]
    shown = f"{path or 'The request body'} {reason}"
    return InvalidRequest(shown, param=name or None, code="invalid_type")


def _wanted(types: str) -> str:
    """Return "an integer" for "int | null"; null is left out, as it only means "not set"."""
    names = [_JSON_NAMES.get(name, name) for name in types.split(" | ") if name != "null"]
    return " or ".join(names)


def not_json(body: bytes | bytearray, error: msgspec.DecodeError) -> InvalidRequest:
    """Return the error for a body that is not valid JSON."""
    told = str(error)
    if not body.strip():
        return InvalidRequest("The request body is empty: send a JSON object", code="invalid_json")
    if body.startswith(BOM_UTF8):
        told = "it begins with a byte order mark: send UTF-8 without one"
    elif half := next((escape[1] for escape in _ESCAPE.finditer(body) if escape[1]), None):
        told = (
            f"it has \\{half.decode()} without the other half of its surrogate pair. A text was "
            "cut inside of a character: cut it between characters"
        )
    msg = f"The request body is not valid JSON: {told}"
    return InvalidRequest(msg, code="invalid_json")


def not_utf8(body: bytes | bytearray) -> InvalidRequest:
    """Return the error for a body that is not valid UTF-8, with the offset of the invalid byte."""
    # The position in msgspec errors is relative to one string, so the body is decoded again.
    try:
        body.decode()
        where = "in a string"
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
    return InvalidRequest(f"The request body is not valid UTF-8: {where}", code="invalid_json")
