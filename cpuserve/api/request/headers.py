"""Values that the middleware and the routes read in the headers of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope

KEY_DIGEST = "cpuserve.key_digest"  # a key of ASGI scopes: the SHA-256 of the valid API key


def header(scope: Scope, name: bytes) -> bytes:
    """Return the value of the first header with this name, in lower case; b"" if it is missing."""
    return next((value for key, value in scope["headers"] if key == name), b"")


def has_header(scope: Scope, name: bytes) -> bool:
    """Return whether the request of `scope` has a header with this name, in lower case."""
    return any(given == name for given, _ in scope["headers"])


def caller_of(scope: Scope) -> str:
    """Return the identity of the caller: the API key, if the server has keys, else the address."""
    host, _ = scope.get("client") or ("a local socket", 0)
    return str(scope.get(KEY_DIGEST, host))
