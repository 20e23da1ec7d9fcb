"""Helpers of middleware and routes to read headers and scope entries of a request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cpuserve.api.errors.record import TraceParent

if TYPE_CHECKING:
    from starlette.types import Scope

Headers = Sequence[tuple[bytes, bytes]]

# The key in ASGI scopes for the Caller of the request. RequestIds sets it to the client's address;
# if the server has API keys, ApiKeys sets it to the caller with the key of the request.
CALLER = "cpuserve.caller"
# The key in ASGI scopes for the part of its caller's limits that the request takes: an Allowance.
ALLOWANCE = "cpuserve.allowance"
# The key in ASGI scopes for all that is reserved for the request: a RequestWork (serving/work.py).
WORK = "cpuserve.work"
# The key in ASGI scopes for a flag: run this request after all others, as for lines of a batch.
LOW_PRIORITY = "cpuserve.low_priority"
# The key in ASGI scopes for the fields of the request that have no effect, as the response says.
WARNINGS = "cpuserve.warnings"
_MOST_WARNINGS, _MOST_NAME = 16, 64
# Characters of names that a quoted text in a header may not have.
_UNPRINTABLE = re.compile(r"[^ !#-\[\]-~]")
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


def warning_header(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Return a header with the fields of the request that have no effect; [] if there are none.

    It has the form of the header Warning of HTTP (RFC 7234, 5.5).
    """
    fields = scope.get(WARNINGS)
    if not fields:
        return []
    names = ", ".join(_UNPRINTABLE.sub("?", name[:_MOST_NAME]) for name in fields[:_MOST_WARNINGS])
    more = f" and {len(fields) - _MOST_WARNINGS} more" if len(fields) > _MOST_WARNINGS else ""
    return [(b"warning", f'299 - "without effect: {names}{more}"'.encode())]


def address_of(scope: Scope) -> str:
    """Return the address of the client, without its port."""
    host, _ = scope.get("client") or ("local", 0)  # a Unix socket has no address
    return str(host)


# Version 00 of W3C Trace Context has four fields, a later version perhaps more, and ff is no
# version. Ids of zeros only name nothing.
_IDS = rb"-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})"
_PARENT = re.compile(rb"00" + _IDS)
_LATER_PARENT = re.compile(rb"(?!00|ff)[0-9a-f]{2}" + _IDS + rb"(?:-.*)?")
# A state is dropped if it is longer or has more members: it waits in memory for the collector,
# and each span of the request has it. The standard asks for 512 characters at least.
_MOST_IN_STATE = 512
_MOST_MEMBERS = 32
_MEMBER = re.compile(
    r"([a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
    r"=([ -+\--<>-~]{0,255}[!-+\--<>-~])"
)


def trace_parent_of(headers: Headers) -> TraceParent | None:
    """Return the span of the client; None if it sends none, several, or one that is invalid."""
    found = [value for name, value in headers if name == b"traceparent"]
    if len(found) != 1:
        return None
    parts = _PARENT.fullmatch(found[0]) or _LATER_PARENT.fullmatch(found[0])
    if parts is None:
        return None
    trace, span, flags = (part.decode() for part in parts.groups())
    states = b",".join(value for name, value in headers if name == b"tracestate")
    return TraceParent(trace, span, int(flags, 16), _state(states.decode("latin-1")))


def _state(text: str) -> tuple[tuple[str, str], ...]:
    """Return the members of a tracestate; () if not all of it is valid."""
    if len(text) > _MOST_IN_STATE:
        return ()
    parts = [part for each in text.split(",") if (part := each.strip(" \t"))]
    members = [_MEMBER.fullmatch(part) for part in parts]
    found = {member[1]: member[2] for member in members if member is not None}
    return tuple(found.items()) if len(found) == len(parts) <= _MOST_MEMBERS else ()
