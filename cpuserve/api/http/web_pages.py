"""Middleware that keeps web pages from changing the server of their reader."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.routing import Route

from cpuserve.api.errors.http_errors import UnsupportedMediaType, error_response
from cpuserve.api.request.headers import READS, header, may_be_web_page
from cpuserve.api.route import reads_pages

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send


class WebPages:
    """Responds with 415 if a web page would change models, files, settings or stored responses.

    Any web page may send POST without a body, or with an upload, to 127.0.0.1 without a CORS
    preflight request. So routes refuse pages unless they are declared to read their JSON
    (`pages` of `api.route.post`). Pages of an origin in --allowed-origins may change
    something, unless the origin is only allowed by "*".
    """

    def __init__(
        self, app: ASGIApp, routes: Sequence[BaseRoute], origins: Collection[str] = ()
    ) -> None:
        self._app = app
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._origins = frozenset(origin.encode() for origin in origins if origin != "*")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, or refuse a page."""
        if scope["type"] == "http" and self._refuses(scope):
            msg = (
                "A request with Origin cannot upload files or change what the server keeps, "
                "because any web page could: use a program, or start the server with the "
                "origin of the page in --allowed-origins"
            )
            await error_response(UnsupportedMediaType(msg), None, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refuses(self, scope: Scope) -> bool:
        if scope["method"] in READS or not may_be_web_page(scope):
            return False
        return header(scope, b"origin") not in self._origins and self._changes(scope)

    def _changes(self, scope: Scope) -> bool:
        """Whether the request reaches a route that refuses pages; unknown routes change nothing."""
        method, path = scope["method"], scope["path"]
        for route in self._routes:
            if method in (route.methods or ()) and route.path_regex.match(path):
                return not reads_pages(route.endpoint)
        return False
