"""Errors in Anthropic's format {"type": "error", "error": {"type", "message"}}."""

from __future__ import annotations

import msgspec

from cpuserve.api.errors import public_message
from cpuserve.errors import RequestError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessageErrorInfo(msgspec.Struct):
    """Describes an error."""

    type: str
    message: str


class MessageError(msgspec.Struct):
    """The body of every response whose status is not 2xx."""

    type: str
    error: MessageErrorInfo


def anthropic_error(error: BaseException) -> bytes:
    """Return `error` as the JSON of a MessageError."""
    status = error.status if isinstance(error, RequestError) else 500
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return msgspec.json.encode(MessageError("error", MessageErrorInfo(kind, public_message(error))))


def error_frame(error: BaseException) -> bytes:
    """Return `error` as an event of a stream whose status has already been sent."""
    return b"event: error\ndata: %b\n\n" % anthropic_error(error)
