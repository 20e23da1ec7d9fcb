"""Middleware that refuses requests.

They have no API key, exceed a limit of their caller, are for unknown hosts, or from web pages.
For other requests they return the coroutine of the next app: a stream keeps no frame of them.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from starlette.routing import Route

from cpuserve.api.errors.http_errors import (
    Forbidden,
    Unauthorized,
    UnsupportedMediaType,
    error_response,
)
from cpuserve.api.http.listener import is_loopback
from cpuserve.api.request.headers import (
    ALLOWANCE,
    CALLER,
    READS,
    WORK,
    header,
    may_be_web_page,
)
from cpuserve.api.route import reads_pages
from cpuserve.api.webui.page import asks_for_page
from cpuserve.serving.callers.allowance import Allowance, LimitReached

if TYPE_CHECKING:
    from collections.abc import Awaitable, Collection, Iterable, Sequence

    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

    from cpuserve.api.callers.known_callers import KnownCallers
    from cpuserve.config.server import ServerOptions
    from cpuserve.serving.callers.caller import Caller

# Load balancers and supervisors read these paths without a key; they show only the status.
PUBLIC_PATHS = frozenset({"/health", "/v1/health", "/ping", "/live"})
# With --public-metrics, Prometheus and inventory tools can read these paths without a key.
METRICS_PATHS = frozenset({"/metrics", "/version"})


class ApiKeys:
    """Responds with 401 unless the request has a valid API key, or reads a public route.

    No path is public for other methods: POST / computes embeddings, and GET / is the chat page.

    callers: who may send requests; a reload of their file changes them.
    public: the paths that GET and HEAD may read without a key.
    webui: the chat page is public, because it contains no data and asks the user for the key.
    """

    def __init__(
        self,
        app: ASGIApp,
        callers: KnownCallers,
        public: Collection[str] = PUBLIC_PATHS,
        *,
        webui: bool = False,
    ) -> None:
        self._app = app
        self._callers = callers
        self._public = public
        self._webui = webui

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Call the app, or respond with 401 if the request needs a key and has none."""
        if scope["type"] == "http" and not self._is_public(scope):
            error = self._identify(scope)
            if error is not None:
                return error_response(error, None, scope)(scope, receive, send)
        return self._app(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        if self._webui and asks_for_page(scope):
            return True
        return scope["method"] in READS and scope["path"] in self._public

    def _identify(self, scope: Scope) -> Unauthorized | None:
        """Store the caller in `scope` if the request has a valid key; otherwise return an error."""
        key = _key(scope)
        if not key:
            return Unauthorized("Missing API key: send the header Authorization: Bearer KEY")
        caller = self._callers.find(key)
        if caller is None:
            return Unauthorized("Wrong API key: send a key that this server knows")
        scope[CALLER] = caller
        return None


def _key(scope: Scope) -> bytes:
    """Return the API key of a request; b"" if the request has none."""
    scheme, _, key = header(scope, b"authorization").partition(b" ")
    if scheme.lower() != b"bearer":
        key = header(scope, b"x-api-key")  # Anthropic clients send this header
    return key.strip()


class CallersWithinLimits:
    """Responds with 429 if the caller has as many requests as it may have.

    All requests count, except GET and HEAD, from their headers to the end of their work, and also
    the lines of batches, which run as requests. The work of a response in the background ends
    later than its response. A request that ends other work needs no place among the parallel ones.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Call the app with an Allowance of the caller, or respond with 429."""
        caller: Caller | None = scope.get(CALLER)
        if caller is None or caller.use is None or scope["method"] in READS:
            return self._app(scope, receive, send)
        scope[ALLOWANCE] = allowance = Allowance(caller)
        try:
            allowance.begin(takes_place=not _ends_work(scope))
        except LimitReached as error:
            return error_response(error, None, scope)(scope, receive, send)
        scope[WORK].hold(allowance.end)
        return self._app(scope, receive, send)


def _ends_work(scope: Scope) -> bool:
    """Return whether a request cancels or deletes something, and runs no model itself."""
    method, path = str(scope["method"]), str(scope["path"])
    return method == "DELETE" or path.endswith("/cancel")


# Containers reach their host by host.docker.internal (Docker) or host.containers.internal (Podman).
LOCAL_NAMES = ("localhost", "*.localhost", "host.docker.internal", "host.containers.internal")


class AllowedHosts:
    """Responds with 403 unless the Host header has an IP address, a local name or a given name.

    The owner of a web page can point the page's domain name at 127.0.0.1 (DNS rebinding).
    The browser then treats this server as the page's own server; only the Host header,
    which still has the page's domain name, shows that it is not.
    All IP addresses are allowed, because no page can have an IP address as its domain name.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """`names`: allowed hosts; "*.example.com" allows all hosts with this ending."""
        self._app = app
        known = [*LOCAL_NAMES, socket.gethostname(), *names]
        self._exact = {name.lower() for name in known if not name.startswith("*")}
        self._endings = tuple(name[1:].lower() for name in known if name.startswith("*"))

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Call the app, or respond with 403 if the Host header is not allowed."""
        if scope["type"] == "http" and not self._allows(name := host_of(scope)):
            shown = name[:200]
            msg = (
                f"This server does not accept requests for the host name {shown!r}: use localhost "
                f"or an IP address, or start the server with `--allowed-hosts {shown}` or with an "
                "API key"
            )
            return error_response(Forbidden(msg), None, scope)(scope, receive, send)
        return self._app(scope, receive, send)

    def _allows(self, name: str) -> bool:
        if not name or name in self._exact or name.endswith(self._endings):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def host_names(options: ServerOptions) -> Sequence[str] | None:
    """Return the allowed hosts besides local ones; None = any host is allowed.

    Without an API key, a loopback address does not protect from web pages in a local browser:
    a page can make its own host name resolve to 127.0.0.1 (DNS rebinding).
    """
    if "*" in options.allowed_hosts:
        return None
    if options.allowed_hosts:
        return options.allowed_hosts
    protected = options.socket or options.asks_for_keys or not is_loopback(options.host)
    return None if protected else ()


def host_of(scope: Scope) -> str:
    """Return the lower-case host name in the Host header, without port; "" if it is missing."""
    value = next((value for name, value in scope["headers"] if name == b"host"), b"")
    text = value.decode("latin-1").strip().lower()
    name = text.partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    return name.rstrip(".")


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

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Call the app, or refuse a page."""
        if scope["type"] == "http" and self._refuses(scope):
            msg = (
                "A request with Origin cannot upload files or change what the server keeps, "
                "because any web page could: use a program, or start the server with the "
                "origin of the page in --allowed-origins"
            )
            return error_response(UnsupportedMediaType(msg), None, scope)(scope, receive, send)
        return self._app(scope, receive, send)

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
