"""Error responses in the format of text-embeddings-inference (TEI)."""

from __future__ import annotations

import msgspec

from cpuserve.api.errors.dialect import Dialect
from cpuserve.api.errors.error_json import public_message
from cpuserve.base.errors import InvalidRequest, PromptTooLong, status_of

# HTTP statuses of TEI errors that are 400 in the other dialects.
_TOO_LARGE, _UNPROCESSABLE, _WRONG_MODEL = 413, 422, 424
# The advice in the message about a text that is too long (PromptTooLong.use_words).
CUT = {"cut": ", or omit truncate, so that it is cut"}
# The error code for a body that is not JSON.
_NO_JSON = "invalid_json"


class EmptyInput(InvalidRequest):
    """The request has no inputs (400)."""


class TooManyInputs(InvalidRequest):
    """The request has more inputs than the limit (413)."""


class TeiError(msgspec.Struct):
    """The body of every response with an error status."""

    error: str
    error_type: str


def tei_status(error: BaseException) -> int:
    """Return the HTTP status of an error: 413, 422 or 424 for most invalid requests."""
    status = status_of(error)
    if not isinstance(error, InvalidRequest) or status != 400:
        return status
    if isinstance(error, EmptyInput) or error.code == _NO_JSON:
        return status
    if isinstance(error, PromptTooLong | TooManyInputs):
        return _TOO_LARGE
    # The error role is "model" if the model cannot compute the results of the endpoint.
    return _WRONG_MODEL if error.role == "model" else _UNPROCESSABLE


def tei_error(error: BaseException, _request_id: str = "") -> bytes:
    """Return the exception `error` as the JSON of a TeiError."""
    return msgspec.json.encode(TeiError(public_message(error), _type_of(error)))


def _type_of(error: BaseException) -> str:
    if isinstance(error, EmptyInput):
        return "Empty"
    status = tei_status(error)
    if status == 503:
        return "Unhealthy"
    if status == 429:
        return "Overloaded"
    return "Backend" if status == _WRONG_MODEL or status >= 500 else "Validation"


TEI = Dialect(
    tei_error,
    TeiError,
    tei_status,
    (_UNPROCESSABLE, _WRONG_MODEL),
    (
        "/embed",
        "/embed_all",
        "/embed_sparse",
        "/predict",
        "/similarity",
        "/decode",
        "/info",
    ),
)
