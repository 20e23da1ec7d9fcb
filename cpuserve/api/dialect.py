"""The interface of API dialects: each is a `Dialect` object in DIALECTS of app.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.api.dialects import OPENAI, ErrorFormat, error_format_of
from cpuserve.api.errors.http_errors import ERROR_FORMAT

if TYPE_CHECKING:
    from fastapi import APIRouter
    from starlette.types import ASGIApp, Receive, Scope, Send

# The key in ASGI scopes for the response headers that return the request id to the client
# (ErrorFormat.id_headers).
ID_HEADERS = "cpuserve.id_headers"


@dataclass(frozen=True, slots=True)
class Dialect:
    """The API of one vendor or server: its endpoints, and how it writes errors.

    A dialect that shares paths with the OpenAI dialect must come before it in DIALECTS.
    """

    routers: tuple[APIRouter, ...]
    errors: ErrorFormat = OPENAI


class DialectOfPath:
    """Middleware that stores the path's error format and its id headers in the ASGI scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Store the error format and the id headers in the scope, and call the app."""
        if scope["type"] == "http":
            errors = error_format_of(scope["path"], {name for name, _ in scope["headers"]})
            scope[ERROR_FORMAT] = errors
            scope[ID_HEADERS] = errors.id_headers
        await self._app(scope, receive, send)
