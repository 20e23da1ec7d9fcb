"""Middleware of all requests, whoever sends them (guards.py refuses some).

It assigns ids, counts and logs responses, reads unusual request lines, handles unexpected errors,
and closes connections while the server drains.
"""

from __future__ import annotations

import re
import uuid
from functools import partial
from typing import TYPE_CHECKING

from cpuserve.api.dialects import dialect_of
from cpuserve.api.errors.http_errors import (
    DIALECT,
    REQUEST_ID,
    HeadersTooLarge,
    error_response,
    settle_failure,
)
from cpuserve.api.errors.record import RECORD, RequestRecord
from cpuserve.api.http.guards import METRICS_PATHS, PUBLIC_PATHS
from cpuserve.api.request.body import ClientGone
from cpuserve.api.request.headers import (
    ALLOWANCE,
    CALLER,
    WORK,
    address_of,
    header,
    trace_parent_of,
    warning_header,
)
from cpuserve.api.stored.disk import disk_error, limit_error
from cpuserve.base.errors import InvalidRequest
from cpuserve.metrics.families import exemplar_labels
from cpuserve.metrics.server import SERVED
from cpuserve.serving.callers.allowance import LimitReached
from cpuserve.serving.callers.caller import Caller
from cpuserve.serving.cancellation import CANCELLATIONS
from cpuserve.serving.work import CURRENT_WORK, RequestWork

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cpuserve.api.http.records import Records
    from cpuserve.api.request.state import ServerState
    from cpuserve.metrics.http import HttpMetrics


class ConnectionClose:
    """Adds "Connection: close" to responses while the server drains.

    Otherwise a client could send its next request on the same connection just
    when the server closes it. A proxy that has to open a new connection chooses another server.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app; while the server drains, add "Connection: close" to its response."""

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and self._state.draining:
                kept = [field for field in message.get("headers", ()) if field[0] != b"connection"]
                message["headers"] = [*kept, (b"connection", b"close")]
            await send(message)

        await self._app(scope, receive, send_and_close)


class RequestLine:
    """Normalizes requests for the middleware and routes after this one.

    HEAD gets the response of GET without the body. A request for a full URL, which clients
    of a proxy send, becomes a request for its path, and its host replaces the Host header
    (RFC 9112, 3.2.2). A request with both Content-Length and Transfer-Encoding is rejected
    and its connection is closed, because a proxy may have read it as two requests (RFC 9112, 6.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Call the app with a normalized request, or reject an ambiguous body length."""
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            msg = "The request has both Content-Length and Transfer-Encoding: send one of them"
            error = InvalidRequest(msg, code="invalid_http")
            return error_response(error, {"connection": "close"}, scope)(scope, receive, send)
        _use_path_only(scope)
        if scope["method"] == "HEAD":
            # Change only a copy of the scope: the HTTP server must see HEAD and send no body.
            return self._app({**scope, "method": "GET"}, receive, _without_body(send))
        # No frame of this function stays while the response streams.
        return self._app(scope, receive, send)


def _use_path_only(scope: Scope) -> None:
    """Change a request for http://host/path to a request for /path with the Host header `host`."""
    scheme, found, rest = scope["path"].partition("://")
    if not found or scheme.lower() not in ("http", "https"):
        return
    authority, slash, path = rest.partition("/")
    scope["path"] = slash + path or "/"
    scope["raw_path"] = scope["path"].encode()
    others = [(name, value) for name, value in scope["headers"] if name != b"host"]
    scope["headers"] = [(b"host", authority.encode("latin-1", "replace")), *others]


def _without_body(send: Send) -> Send:
    async def send_head(message: Message) -> None:
        if message["type"] == "http.response.body":
            message = {**message, "body": b""}
        await send(message)

    return send_head


class UnexpectedErrors:
    """Logs unexpected exceptions and responds to them with 500, without the exception's text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app; log an exception that it raises, and respond with 500."""
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientGone:
            if RECORD in scope:
                scope[RECORD].gone = True
        except CANCELLATIONS:
            raise
        except BaseException as error:
            shown = disk_error(error) or limit_error(error) or error
            settle_failure(shown, scope)
            if started:
                raise  # the response has started, so uvicorn can only close the connection
            await error_response(shown, None, scope)(scope, receive, send)


# Monitors request these paths all the time; vLLM does not count them either.
UNCOUNTED_PATHS = PUBLIC_PATHS | METRICS_PATHS
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
        if scope["path"] in UNCOUNTED_PATHS:
            return
        # Clients may send any path and method, and each different one would add a metrics series.
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self._metrics.count(self.route(scope), method, status)
        error = scope[RECORD].error
        if isinstance(error, LimitReached):
            self._metrics.refuse(scope[CALLER].name, error.limit)

    def route(self, scope: Scope) -> str:
        """Return the route template of the request, such as /v1/models/{name}, or "none"."""
        path: str = scope["path"]
        template = getattr(scope.get("route"), "path", None)
        return template or (path if path in self._paths else "none")

    def shown(self, scope: Scope) -> str:
        """Return the path of the request as log lines have it: its route, else the path itself."""
        route = self.route(scope)
        return str(scope["path"]) if route == "none" else route


def plain_path(path: str) -> str:
    """Return a path without slashes at its end, and with one /v1 at its beginning.

    Clients that add /v1 to a base URL which has it already ask for /v1/v1/models, for example.
    """
    plain = path.rstrip("/") or "/"
    return plain.removeprefix("/v1") if plain.startswith("/v1/v1/") else plain


class RequestIds:
    """Begins the work of each request, and assigns a dialect and an id to it.

    The id is the client's X-Request-Id if valid, or a new id.
    The response has the id in x-request-id and in the id headers of the path's dialect.
    This class removes trailing slashes, and a repeated /v1, before other middleware reads the path.
    Responses to callers with limits have the headers of the dialect about limits,
    and a header with the fields of a request that have no effect.
    One wrapper of `send` adds the headers and counts the response, because each chunk
    of a stream passes every wrapper. At the end of the work, the access log gets the request.
    """

    def __init__(self, app: ASGIApp, counts: ResponseCounts, records: Records) -> None:
        self._app = app
        self._counts = counts
        self._records = records

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app with a request id, and count and log its response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["path"] = plain_path(scope["path"])
        dialect = dialect_of(scope["path"], {name for name, _ in scope["headers"]})
        scope[DIALECT] = dialect
        given = header(scope, b"x-request-id").decode("latin-1")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        scope[REQUEST_ID] = request_id
        parent = trace_parent_of(scope["headers"])
        SERVED.set(exemplar_labels(request_id, parent.trace if parent else ""))
        scope.setdefault(CALLER, Caller.of_address(address_of(scope)))
        record: RequestRecord = scope.setdefault(RECORD, RequestRecord())
        record.request_id, record.parent = request_id, parent
        names = ("x-request-id", *dialect.id_headers)
        echoed = [(name.encode(), request_id.encode()) for name in names]

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = scope[DIALECT].limits.of(scope.get(ALLOWANCE))
                told = warning_header(scope)
                message["headers"] = [*message.get("headers", ()), *echoed, *limits, *told]
                record.status = message["status"]
                self._counts.add(scope, record.status)
            elif not message.get("more_body", False):
                # A client may send its next request as soon as it has the last byte.
                work.response_ended()
            await send(message)

        record.at_end.append(partial(self._log, scope, record))
        scope[WORK] = work = RequestWork()
        CURRENT_WORK.set(work)
        record.waits = work.waits
        work.hold(record.end)
        try:
            await self._checked(scope, receive, send_with_id)
        finally:
            work.response_ended()

    def _checked(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if len(scope["headers"]) > _MAX_HEADER_FIELDS:
            msg = f"The request has more than {_MAX_HEADER_FIELDS} header fields: send fewer"
            return error_response(HeadersTooLarge(msg), None, scope)(scope, receive, send)
        return self._app(scope, receive, send)

    def _log(self, scope: Scope, record: RequestRecord) -> None:
        access, traces = self._records.access, self._records.traces
        # Load balancers poll public paths, and the log has the reason of a 503 already.
        polled = record.status == 503 and scope["path"] in PUBLIC_PATHS
        has_line = access.covers(record) and (access.which == "all" or not polled)
        has_span = traces is not None and scope["path"] not in UNCOUNTED_PATHS
        if not (has_line or has_span):
            return
        ended = record.ended(scope["method"], self._counts.shown(scope), scope[CALLER].name)
        if has_line:
            access.write(record, ended)
        if traces is not None and has_span:
            traces.add(record, ended)
