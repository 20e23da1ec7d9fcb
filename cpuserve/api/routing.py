"""The endpoints of a file: their paths, and what /openapi.json says about them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

Handler = Callable[["Request"], Awaitable["Response"]]


class Endpoint(Route):
    """A route for one method; `openapi` is what its operation adds to what is known of all."""

    def __init__(
        self, method: str, path: str, handler: Handler, openapi: Mapping[str, Any]
    ) -> None:
        super().__init__(path, handler, methods=[method])
        # Starlette adds HEAD to GET, and would name it in the Allow header of a 405. RequestLine
        # has made a GET of it before.
        self.methods = {method}
        self.method = method
        self.openapi = openapi


class Router:
    """Collects endpoints, in the order in which the paths of requests are compared with theirs."""

    def __init__(self) -> None:
        self.endpoints: list[Endpoint] = []

    def get(
        self, path: str, *, openapi: Mapping[str, Any] | None = None
    ) -> Callable[[Handler], Handler]:
        """Return a decorator that makes a function the handler of GET `path`."""
        return self._add("GET", path, openapi)

    def post(
        self, path: str, *, openapi: Mapping[str, Any] | None = None
    ) -> Callable[[Handler], Handler]:
        """Return a decorator that makes a function the handler of POST `path`."""
        return self._add("POST", path, openapi)

    def _add(
        self, method: str, path: str, openapi: Mapping[str, Any] | None
    ) -> Callable[[Handler], Handler]:
        def add(handler: Handler) -> Handler:
            self.endpoints.append(Endpoint(method, path, handler, openapi or {}))
            return handler

        return add
