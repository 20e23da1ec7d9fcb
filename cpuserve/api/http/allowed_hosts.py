"""Middleware that rejects unknown Host headers, as a defence against DNS rebinding."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from cpuserve.api.errors.http_errors import Forbidden, error_response
from cpuserve.api.http.listener import is_loopback

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

    from cpuserve.config.server import ServerOptions

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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, or respond with 403 if the Host header is not allowed."""
        if scope["type"] == "http" and not self._allows(name := host_of(scope)):
            shown = name[:200]
            msg = (
                f"This server does not accept requests for the host name {shown!r}: use localhost "
                f"or an IP address, or start the server with `--allowed-hosts {shown}` or with an "
                "API key"
            )
            await error_response(Forbidden(msg), None, scope)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, name: str) -> bool:
        if not name or name in self._exact or name.endswith(self._endings):
            return True
        try:
            ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return True


def host_names(options: ServerOptions) -> Sequence[str] | None:
    """Return the allowed Host names besides local names; None = any name is allowed.

    Without an API key, a loopback address does not protect from web pages in a local browser:
    a page can make its own host name resolve to 127.0.0.1 (DNS rebinding).
    """
    if "*" in options.allowed_hosts:
        return None
    if options.allowed_hosts:
        return options.allowed_hosts
    protected = options.socket or options.api_key or not is_loopback(options.host)
    return None if protected else ()


def host_of(scope: Scope) -> str:
    """Return the lower-case host name in the Host header, without port; "" if it is missing."""
    value = next((value for name, value in scope["headers"] if name == b"host"), b"")
    text = value.decode("latin-1").strip().lower()
    name = text.partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    return name.rstrip(".")
