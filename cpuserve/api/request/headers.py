"""Helpers of middleware and routes to read headers and scope entries of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

# The key in ASGI scopes for the Caller of the request. RequestIds sets it to the client's address;
# if the server has API keys, ApiKeys sets it to the caller with the key of the request.
CALLER = "cpuserve.caller"
# The key in ASGI scopes for the part of its caller's limits that the request takes: an Allowance.
ALLOWANCE = "cpuserve.allowance"
# The key in ASGI scopes for a flag: run this request after all others, as for lines of a batch.
LOW_PRIORITY = "cpuserve.low_priority"
# The methods that change nothing, in any route.
READS = frozenset({"GET", "HEAD"})
# Browsers add Origin to each POST of a web page (Fetch standard, "append a request Origin header";
# it may be "null"), and newer browsers add Sec-Fetch-Site. No page can suppress these headers.
# Sec-Fetch-Mode says nothing, because fetch() of Node sends it too.
_OF_BROWSERS = frozenset({b"origin", b"sec-fetch-site"})


def header(scope: Scope, name: bytes) -> bytes:
    """Return the value of the first header `name` (lower case); b"" if it is missing."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def has_header(scope: Scope, name: bytes) -> bool:
    """Return whether the request of `scope` has a header `name` (lower case)."""
    return any(given == name for given, _ in scope["headers"])


def may_be_web_page(scope: Scope) -> bool:
    """Return whether a web page may have sent the request of `scope`."""
    return any(given in _OF_BROWSERS for given, _ in scope["headers"])


def address_of(scope: Scope) -> str:
    """Return the address of the client, without its port."""
    host, _ = scope.get("client") or ("local", 0)  # a Unix socket has no address
    return str(host)
