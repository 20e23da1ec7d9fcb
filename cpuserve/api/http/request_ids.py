"""Middleware for all routes: dialects, request ids, response counts, the access log."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING

from cpuserve.api.dialects import dialect_of
from cpuserve.api.errors.http_errors import DIALECT, REQUEST_ID, HeadersTooLarge, error_response
from cpuserve.api.errors.record import RECORD, RequestRecord
from cpuserve.api.http.access_log import AccessLog
from cpuserve.api.http.api_keys import METRICS_PATHS, PUBLIC_PATHS
from cpuserve.api.request.headers import CALLER, OWNER, address_of, header
from cpuserve.metrics.families import exemplar_labels
from cpuserve.metrics.server import SERVED

if TYPE_CHECKING:
    from collections.abc import Collection

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cpuserve.metrics.http import HttpMetrics

# Monitors request these paths all the time; vLLM does not count them either.
_UNCOUNTED_PATHS = PUBLIC_PATHS | METRICS_PATHS
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_MAX_HEADER_FIELDS = 128

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class ResponseCounts:
    """Counts responses by route, HTTP method and status, for /metrics.

    A path that matches no route template and is not in `paths` counts as the route "none".
    """

    def __init__(self, metrics: HttpMetrics, paths: Collection[str]) -> None:
        self._metrics = metrics
        self._paths = frozenset(paths)

    def add(self, scope: Scope, status: int) -> None:
        """Count a response with this status to the request of `scope`."""
        if scope["path"] in _UNCOUNTED_PATHS:
            return
        # Clients may send any path and method, and each different one would add a metrics series.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.count(self.route(scope), method, status)

    def route(self, scope: Scope) -> str:
        """Return the route template of the request, such as /v1/models/{name}, or "none"."""
        path: str = scope["path"]
        template = getattr(scope.get("route"), "path", None)
        return template or (path if path in self._paths else "none")


class RequestIds:
    """Assigns a dialect and an id to each request: the client's X-Request-Id if valid, or a new id.

    The response has the id in x-request-id and in the id headers of the path's dialect.
    This class removes trailing slashes before other middleware reads the path.
    One wrapper of `send` adds the headers and counts the response, because each chunk
    of a stream passes every wrapper. At its end, the access log gets the request.
    """

    def __init__(self, app: ASGIApp, counts: ResponseCounts, access: AccessLog) -> None:
        self._app = app
        self._counts = counts
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app with a request id, and count and log its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        dialect = dialect_of(scope["path"], {name for name, _ in scope["headers"]})
        scope[DIALECT] = dialect
        given = header(scope, b"x-request-id").decode("latin-1")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        scope[REQUEST_ID] = request_id
        traceparent = header(scope, b"traceparent").decode("latin-1")
        SERVED.set(exemplar_labels(request_id, traceparent))
        scope[CALLER] = scope[OWNER] = address_of(scope)
        record: RequestRecord = scope.setdefault(RECORD, RequestRecord())
        record.request_id = request_id
        scope["path"] = scope["path"].rstrip("/") or "/"
        names = ("x-request-id", *dialect.id_headers)
        echoed = [(name.encode(), request_id.encode()) for name in names]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *echoed]
                record.status = message["status"]
                self._counts.add(scope, record.status)
            await send(message)

        try:
            await self._checked(scope, receive, send_with_id)
        finally:
            self._log(scope, record)

    async def _checked(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(scope["headers"]) > _MAX_HEADER_FIELDS:
            msg = f"The request has more than {_MAX_HEADER_FIELDS} header fields: send fewer"
            await error_response(HeadersTooLarge(msg), None, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _log(self, scope: Scope, record: RequestRecord) -> None:
        path = scope["path"]
        if self._access.which != "all" and record.status == 503 and path in PUBLIC_PATHS:
            return  # load balancers poll this path, and the log has the reason already
        route = self._counts.route(scope)
        shown = path if route == "none" else route
        self._access.write(record, scope["method"], shown, scope[CALLER])
