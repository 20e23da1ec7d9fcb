"""Errors as JSON, in the OpenAI format {"error": {"message", "type", "param", "code"}}.

This module imports no web framework, because the startup server uses it while a model
is downloaded, before FastAPI is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from cpuserve.base.errors import RequestError

# Matches memory addresses and file paths, which messages of internal errors must not reveal.
_INTERNAL = re.compile(r"\b0x[0-9a-fA-F]+|(?<![\w.])/(?:[\w.+-]+/)+[\w.+-]*")
_MAX_MESSAGE_CHARS = 2000


class ErrorInfo(msgspec.Struct):
    """The details of an error; `code` identifies its cause (RequestError.code)."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """The body of every response with an error status."""

    error: ErrorInfo


# A function (error, request id or "") -> body that encodes an error as a response body.
Envelope = Callable[[BaseException, str], bytes]


def public_message(error: BaseException) -> str:
    """Return the error message for the client, without internal details from status 500 on."""
    if not isinstance(error, RequestError):
        return "Internal server error. The server's log has the details."
    text = error.message
    if error.status >= 500:
        text = _INTERNAL.sub("...", text)
    # A message may quote a part of the request with a lone surrogate, which UTF-8 cannot encode.
    return text[:_MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()


def error_json(error: BaseException, _request_id: str = "") -> bytes:
    """Return the exception `error` as the JSON of an ErrorBody."""
    shown = error if isinstance(error, RequestError) else RequestError("")
    message = public_message(error)
    return msgspec.json.encode(ErrorBody(ErrorInfo(message, shown.kind, shown.param, shown.code)))
