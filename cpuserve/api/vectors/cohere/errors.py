"""Errors in the format of Cohere."""

from __future__ import annotations

import msgspec

from cpuserve.api.errors.dialect import Dialect
from cpuserve.api.errors.error_json import public_message


class CohereError(msgspec.Struct):
    """The body of every response with an error status; `id` is the id of the request."""

    id: str
    message: str


def cohere_error(error: BaseException, request_id: str = "") -> bytes:
    """Return the exception `error` as the JSON of a CohereError."""
    return msgspec.json.encode(CohereError(request_id, public_message(error)))


COHERE = Dialect(cohere_error, CohereError, beginnings=("/v1/embed", "/v2/embed", "/v2/rerank"))
