"""Error responses in the format of text-generation-inference (TGI)."""

from __future__ import annotations

import msgspec

from cpuserve.api.errors.dialect import Dialect
from cpuserve.api.errors.error_json import public_message
from cpuserve.base.errors import InvalidRequest, status_of

# The HTTP status of TGI for values that are 400 in the other dialects.
_UNPROCESSABLE = 422
_NO_JSON = "invalid_json"


class TgiError(msgspec.Struct):
    """The body of every response with an error status; clients compare `error_type`."""

    error: str
    error_type: str


def tgi_status(error: BaseException) -> int:
    """Return the HTTP status of an error: 422 for invalid values."""
    status = status_of(error)
    if isinstance(error, InvalidRequest) and status == 400 and error.code != _NO_JSON:
        return _UNPROCESSABLE
    return status


def tgi_error(error: BaseException, _request_id: str = "") -> bytes:
    """Return the exception `error` as the JSON of a TgiError."""
    status = status_of(error)
    kind = "overloaded" if status == 429 else "generation" if status >= 500 else "validation"
    return msgspec.json.encode(TgiError(public_message(error), kind))


TGI = Dialect(tgi_error, TgiError, tgi_status, (_UNPROCESSABLE,), ("/generate", "/generate_stream"))
