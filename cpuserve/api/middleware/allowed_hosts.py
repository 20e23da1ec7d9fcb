"""Accept requests only for known host names, as a defence against DNS rebinding."""

from __future__ import annotations

import ipaddress
import socket
from typing import TYPE_CHECKING

from cpuserve.api.http.listener import is_loopback
from cpuserve.api.response.errors import Forbidden, error_response

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

    from cpuserve.config.server import ServerOptions

# Containers of Docker and Podman reach their host by the last two names.
LOCAL_NAMES = ("localhost", "*.localhost", "host.docker.internal", "host.containers.internal")


class AllowedHosts:
    """Responds with 403 unless the Host header is an IP address, a local or a given name.

    The owner of a web page can point the page's domain name at 127.0.0.1 (DNS rebinding). The
    browser then treats a server there as the page's own server, and only the Host header reveals
    it. All IP addresses are allowed, because a page cannot own one as its domain name.
    """

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """`names` may contain patterns such as "*.example.com" for all names with that ending."""
        self._app = app
        known = [*LOCAL_NAMES, socket.gethostname(), *names]
        self._exact = {name.lower() for name in known if not name.startswith("*")}
        self._endings = tuple(name[1:].lower() for name in known if name.startswith("*"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
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
    """Return the host names, besides local ones, that requests may be addressed to; None = any.

    Without an API key, a loopback address does not protect from web pages in a browser on this
    machine: a page can make its own host name resolve to 127.0.0.1 (DNS rebinding).
    """
    if "*" in options.allowed_hosts:
        return None
    if options.allowed_hosts:
        return options.allowed_hosts
    protected = options.socket or options.api_key or not is_loopback(options.host)
    return None if protected else ()


def host_of(scope: Scope) -> str:
    """Return the name in the Host header in lower case, without the port; "" if it is missing."""
    value = next((value for name, value in scope["headers"] if name == b"host"), b"")
    text = value.decode("latin-1").strip().lower()
    name = text.partition("]")[0] if text.startswith("[") else text.partition(":")[0]
    return name.rstrip(".")
