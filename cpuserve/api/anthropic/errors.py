"""Errors in the Anthropic format {"type": "error", "error": {"type", "message"}, "request_id"}."""

from __future__ import annotations

import msgspec

from cpuserve.api.errors.dialect import Dialect
from cpuserve.api.errors.error_json import public_message
from cpuserve.api.errors.limit_headers import ANTHROPIC_LIMITS
from cpuserve.api.request.fields import NO_THREADS
from cpuserve.base.errors import PromptTooLong, RequestError

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


class ErrorDetails(msgspec.Struct):
    """Details of an error: its code, and the fields of the request that are not supported."""

    error_code: str
    unsupported: list[str]


class MessageErrorInfo(msgspec.Struct, omit_defaults=True):
    """The type and the message of an error, with optional details."""

    type: str
    message: str
    details: ErrorDetails | None = None


class MessageError(msgspec.Struct):
    """The body of every response with an error status."""

    type: str
    error: MessageErrorInfo
    request_id: str


def anthropic_error(error: BaseException, request_id: str) -> bytes:
    """Return the exception `error` as the JSON of a MessageError with this request id."""
    status = error.status if isinstance(error, RequestError) else 500
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = public_message(error)
    if isinstance(error, PromptTooLong):
        # Claude Code parses the two token counts in this exact sentence of the Anthropic API,
        # and then compacts the conversation.
        message = f"prompt is too long: {error.num_tokens} tokens > {error.most} maximum"
    info = MessageErrorInfo(kind, message)
    if isinstance(error, RequestError) and error.code == NO_THREADS:
        info.details = ErrorDetails(error.code, ["thread"])
    return msgspec.json.encode(MessageError("error", info, request_id))


def error_frame(error: BaseException, request_id: str) -> bytes:
    """Return `error` as an SSE event of a stream that has already begun."""
    return b"event: error\ndata: %b\n\n" % anthropic_error(error, request_id)


# All Anthropic clients send the header anthropic-version, and no OpenAI client sends it.
ANTHROPIC = Dialect(
    anthropic_error,
    MessageError,
    beginnings=("/v1/messages",),
    id_headers=("request-id",),
    limits=ANTHROPIC_LIMITS,
    shared=("/v1/models", "/v1/files"),
    header=b"anthropic-version",
)
