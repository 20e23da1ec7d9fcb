"""Error responses in the format of llama-server."""

from __future__ import annotations

import msgspec

from cpuserve.api.errors.dialect import Dialect
from cpuserve.api.errors.error_json import public_message
from cpuserve.base.errors import PromptTooLong, RequestError

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
# The error code for fields and models that this server does not support.
_UNSUPPORTED = "unsupported_parameter"


class LlamaErrorInfo(msgspec.Struct):
    """The details of an error; `code` is the HTTP status.

    n_prompt_tokens: the length of a prompt that is too long. n_ctx: the length of the context.
    """

    code: int
    message: str
    type: str
    n_prompt_tokens: int | msgspec.UnsetType = msgspec.UNSET
    n_ctx: int | msgspec.UnsetType = msgspec.UNSET


class LlamaError(msgspec.Struct):
    """The body of every response with an error status."""

    error: LlamaErrorInfo


def llama_error(error: BaseException, _request_id: str = "") -> bytes:
    """Return the exception `error` as the JSON of a LlamaError."""
    shown = error if isinstance(error, RequestError) else RequestError("")
    info = LlamaErrorInfo(shown.status, public_message(error), _type_of(shown))
    if isinstance(error, PromptTooLong):
        info.type = "exceed_context_size_error"
        info.n_prompt_tokens, info.n_ctx = error.num_tokens, error.most
    return msgspec.json.encode(LlamaError(info))


def _type_of(error: RequestError) -> str:
    if error.code == _UNSUPPORTED:
        return "not_supported_error"
    usual = "server_error" if error.status >= 500 else "invalid_request_error"
    return _TYPES.get(error.status, usual)


LLAMACPP = Dialect(
    llama_error,
    LlamaError,
    beginnings=(
        "/completion",
        "/completions",
        "/infill",
        "/apply-template",
        "/embedding",
        "/embeddings",
        "/lora-adapters",
        "/props",
        "/slots",
    ),
)
