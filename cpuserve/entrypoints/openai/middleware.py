"""Around every route: request ids, API keys, and a last net under unexpected exceptions."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from typing import TYPE_CHECKING

from cpuserve.entrypoints.openai.body import ClientGone
from cpuserve.entrypoints.openai.errors import HeadersTooLarge, Unauthorized, error_response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

# Load balancers probe these without a key; they tell nothing but whether the server serves.
PUBLIC_PATHS = frozenset({"/health", "/ping"})

_MAX_HEADER_FIELDS = 128

_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestIds:
    """Gives each request an id, the client's X-Request-Id if it is a sane one, and echoes it.

    Trailing slashes of the path are dropped here too, before any rule looks at it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = _header(scope, b"x-request-id").decode("latin-1")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        scope["cpuserve.request_id"] = request_id
        scope["path"] = scope["path"].rstrip("/") or "/"
        echoed = (b"x-request-id", request_id.encode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), echoed]
            await send(message)

        if len(scope["headers"]) > _MAX_HEADER_FIELDS:
            msg = f"The request has more than {_MAX_HEADER_FIELDS} header fields"
            await error_response(HeadersTooLarge(msg))(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)


class ApiKeys:
    """401 on every route but PUBLIC_PATHS unless the request carries one of the keys."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            error = self._refusal(scope)
            if error is not None:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Unauthorized | None:
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        if scheme.lower() != b"bearer" or not key.strip():
            return Unauthorized("Missing API key: send the header Authorization: Bearer KEY")
        # Digests have one length, and every key is compared: the time tells nothing about either.
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return None if any(matches) else Unauthorized("Wrong API key")


class LastNet:
    """An exception nobody expected is logged and answered with 500, without its text."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection."""
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except ClientGone:
            log.debug("the client has gone: %s", scope.get("path"))
        except Exception as error:
            log.exception("request failed: %s %r", scope.get("method"), scope.get("path"))
            if started:
                raise  # all that is left is to cut the connection, which the server does
            await error_response(error)(scope, receive, send)


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for key, value in scope["headers"] if key == name), b"")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
