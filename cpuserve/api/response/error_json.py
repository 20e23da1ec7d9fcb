"""Errors as JSON, in the OpenAI format {"error": {"message", "type", "param", "code"}}.

No web framework is imported here, because the server that responds while a model is downloaded has
none.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from cpuserve.errors import RequestError

# Memory addresses and file paths, which clients must not see in messages of internal errors.
_INTERNAL = re.compile(r"\b0x[0-9a-fA-F]+|(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*")
_MAX_MESSAGE_CHARS = 2000


class ErrorInfo(msgspec.Struct):
    """Describes an error; `code` identifies its cause (RequestError.code)."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """The body of every response with an error status."""

    error: ErrorInfo


# Turns an error into the body of a response to the request with this id ("" if it has none).
Envelope = Callable[[BaseException, str], bytes]


def public_message(error: BaseException) -> str:
    """Return the message for the client; from status 500 on it contains no internal details."""
    if not isinstance(error, RequestError):
        return "Internal server error. The server's log has the details."
    text = error.message
    if error.status >= 500:
        text = _INTERNAL.sub("...", text)
    # A message may quote the request, and a lone surrogate in it cannot be encoded.
    return text[:_MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()


def error_json(error: BaseException, _request_id: str = "") -> bytes:
    """Return `error` as the JSON of an ErrorBody."""
    shown = error if isinstance(error, RequestError) else RequestError("")
    message = public_message(error)
    return msgspec.json.encode(ErrorBody(ErrorInfo(message, shown.kind, shown.param, shown.code)))
