"""The facts that clients state of a file: its purpose, its media type, and when it expires."""

from __future__ import annotations

import mimetypes
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from cpuserve.base.errors import InvalidRequest, brief

# The reasons to upload a file. Only the purpose "batch" asks for a form of its content.
PURPOSES = ("assistants", "batch", "user_data", "vision")
_TRAINING = ("evals", "fine-tune")
# An hour, and 30 days: the limits of the OpenAI API.
LEAST_S, MOST_S = 3600, 30 * 86_400
UNKNOWN_TYPE = "application/octet-stream"
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,100}/[\w.+-]{1,100}", re.ASCII)
# The types that Python knows by itself, so that all systems have the same.
_NAMES = mimetypes.MimeTypes(filenames=())


class ExpiresAfter(msgspec.Struct):
    """When a file expires: so many seconds after it was created."""

    anchor: str
    seconds: int


def check_purpose(purpose: object) -> str:
    """Return the purpose of a file; InvalidRequest if the server keeps no files for it."""
    if isinstance(purpose, str) and purpose in PURPOSES:
        return purpose
    purposes = ", ".join(PURPOSES)
    reason = "this server trains and evaluates nothing" if purpose in _TRAINING else ""
    msg = f"purpose must be one of {purposes}, got {brief(purpose)!r}" + (
        f": {reason}" if reason else ""
    )
    raise InvalidRequest(msg, param="purpose")


def lasts_after(expires: ExpiresAfter | None, param: str) -> int | None:
    """Return the seconds until a file expires; None = it stays. `param`: the field, for errors."""
    if expires is None:
        return None
    if expires.anchor != "created_at":
        msg = f"{param}.anchor must be created_at, got {expires.anchor[:80]!r}"
        raise InvalidRequest(msg, param=param)
    return check_seconds(expires.seconds, f"{param}.seconds", MOST_S)


def expires_in(fields: dict[str, str]) -> int | None:
    """Take the fields expires_after[anchor] and expires_after[seconds] out of a form.

    Returns the seconds until the file expires, as `lasts_after` does.
    """
    names = "expires_after[anchor]", "expires_after[seconds]"
    anchor, seconds = (fields.pop(name, None) for name in names)
    if anchor is None and seconds is None:
        return None
    return lasts_after(ExpiresAfter(anchor or "", whole(seconds, names[1])), "expires_after")


def whole(text: str | None, param: str) -> int:
    """Return a whole number in a form field; InvalidRequest if the text is none."""
    if text is None or not (text.isascii() and text.isdigit() and len(text) < 12):
        msg = f"{param} must be a whole number, got {brief(text)!r}"
        raise InvalidRequest(msg, param=param)
    return int(text)


def check_seconds(seconds: int, param: str, max_seconds: int) -> int:
    """Return the seconds until a file expires; InvalidRequest if they are not in the limits."""
    if not LEAST_S <= seconds <= max_seconds:
        msg = f"{param} must be from {LEAST_S} to {max_seconds}, got {seconds}"
        raise InvalidRequest(msg, param=param)
    return seconds


def media_type_of(declared: str, filename: str) -> str:
    """Return the media type of a file as its client declares it, or else as its name says."""
    kind = declared.partition(";")[0].strip().lower()
    if _MEDIA_TYPE.fullmatch(kind) and kind != UNKNOWN_TYPE:
        return kind
    return _NAMES.guess_type(filename, strict=False)[0] or UNKNOWN_TYPE


def refuse_more(fields: Mapping[str, Any], known: str) -> None:
    """Raise InvalidRequest if a form has further fields; known: the fields that it may have."""
    for field in fields:
        msg = f"{field[:80]} is not supported: send {known}"
        raise InvalidRequest(msg, param=field[:80], code="unsupported_parameter")


def check_content(purpose: str, undecodable: str) -> None:
    """Raise InvalidRequest if the lines of a batch are no text in UTF-8, for this reason."""
    if purpose == "batch" and undecodable:
        msg = f"The file is not UTF-8 ({undecodable}): send JSON lines in UTF-8"
        raise InvalidRequest(msg, param="file", code="invalid_file_encoding")
