"""The interface of a dialect: one of them is a `Dialect` in DIALECTS of app.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.api.errors import ENVELOPE, error_json

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastapi import APIRouter
    from starlette.types import ASGIApp, Receive, Scope, Send

    from cpuserve.api.errors import Envelope

# The key of a scope with the id_headers of the dialect of its path.
ID_HEADERS = "cpuserve.id_headers"


@dataclass(frozen=True, slots=True)
class Dialect:
    """The API of one vendor or server: its endpoints, and how it writes errors.

    beginnings: of the paths whose errors `error` writes, also those of routes that do not exist.
    Errors of all other paths have OpenAI's format. id_headers: headers of the answers of these
    paths with the request's id, besides x-request-id. shared: beginnings of OpenAI's paths that are
    this dialect's in requests with `header`; such a dialect comes before OpenAI's in DIALECTS.
    """

    routers: tuple[APIRouter, ...]
    error: Envelope = error_json
    beginnings: tuple[str, ...] = ()
    id_headers: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    header: bytes = b""


class DialectOfPath:
    """Puts into the scope what the dialect of its path wants of every answer."""

    def __init__(self, app: ASGIApp, dialects: Iterable[Dialect]) -> None:
        self._app = app
        self._dialects = [
            (path, header, dialect)
            for dialect in dialects
            for paths, header in ((dialect.beginnings, b""), (dialect.shared, dialect.header))
            for path in paths
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "http":
            path = scope["path"]
            for beginning, header, dialect in self._dialects:
                if not f"{path}/".startswith(f"{beginning}/"):
                    continue
                if not header or has_header(scope, header):
                    scope[ENVELOPE] = dialect.error
                    scope[ID_HEADERS] = dialect.id_headers
        await self._app(scope, receive, send)


def has_header(scope: Scope, name: bytes) -> bool:
    """Return whether the request of `scope` has a header with this name, in lower case."""
    return any(given == name for given, _ in scope["headers"])
