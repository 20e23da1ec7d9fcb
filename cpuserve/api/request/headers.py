"""Values that the middleware and the routes read in the headers of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

# A key of ASGI scopes for the sender of the request. RequestIds sets it to the client's address. If
# the server has API keys, ApiKeys sets it to "key-1" for the first key, "key-2" for the second one.
CALLER = "cpuserve.caller"
# A key of ASGI scopes: whether all other requests go before this one, as before lines of a batch.
LOW_PRIORITY = "cpuserve.low_priority"


def header(scope: Scope, name: bytes) -> bytes:
    """Return the value of the first header with this name, in lower case; b"" if it is missing."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def has_header(scope: Scope, name: bytes) -> bool:
    """Return whether the request of `scope` has a header with this name, in lower case."""
    return any(given == name for given, _ in scope["headers"])


def address_of(scope: Scope) -> str:
    """Return the address of the client, without its port."""
    host, _ = scope.get("client") or ("local", 0)  # a Unix socket has no address
    return str(host)
