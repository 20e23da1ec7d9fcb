"""Dialect: the paths of one API, and how it writes errors.

This module imports no web framework, because the startup server uses it while a model
is downloaded, before FastAPI is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import msgspec

from cpuserve.api.errors.error_json import Envelope, ErrorBody, error_json
from cpuserve.api.errors.limit_headers import OPENAI_LIMITS, LimitHeaders
from cpuserve.base.errors import status_of


@dataclass(frozen=True, slots=True)
class Dialect:
    """The API of one vendor or server; its folder has the object, and api/dialects.py lists it.

    error: encodes an exception as the body of a response, which has the type `body`.
    status: returns the HTTP status of an exception.
    statuses: the error statuses that its POST routes have besides the usual ones.
    beginnings: the path prefixes of the dialect, even of paths without a route;
      all other paths belong to the OpenAI dialect.
    id_headers: response headers with the request id, besides x-request-id.
    limits: the response headers with the limits of the caller.
    shared: prefixes of OpenAI paths that belong to this dialect if the request has `header`.
    """

    error: Envelope = error_json
    body: type[msgspec.Struct] = ErrorBody
    status: Callable[[BaseException], int] = status_of
    statuses: tuple[int, ...] = ()
    beginnings: tuple[str, ...] = ()
    id_headers: tuple[str, ...] = ()
    limits: LimitHeaders = OPENAI_LIMITS
    shared: tuple[str, ...] = ()
    header: bytes = b""

    def owns(self, path: str, header_names: Collection[bytes]) -> bool:
        """Return whether `path` belongs to the dialect in a request with these headers."""
        known = self.beginnings + (self.shared if self.header in header_names else ())
        return any(f"{path}/".startswith(f"{beginning}/") for beginning in known)


OPENAI = Dialect()
