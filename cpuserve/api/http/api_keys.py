"""Middleware that requires an API key, except to read public routes."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from cpuserve.api.errors.http_errors import Unauthorized, error_response
from cpuserve.api.request.headers import CALLER, OWNER, READS, header
from cpuserve.api.stored.owners import owner_of
from cpuserve.api.webui.page import asks_for_page

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

# Load balancers and supervisors read these paths without a key; they show only the status.
PUBLIC_PATHS = frozenset({"/health", "/v1/health", "/ping", "/live"})
# With --public-metrics, Prometheus and inventory tools can read these paths without a key.
METRICS_PATHS = frozenset({"/metrics", "/version"})


class ApiKeys:
    """Responds with 401 unless the request has a valid API key, or reads a public route.

    No path is public for other methods: POST / computes embeddings, and GET / is the chat page.

    public: the paths that GET and HEAD may read without a key.
    webui: the chat page is public, because it contains no data and asks the user for the key.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        public: Collection[str] = PUBLIC_PATHS,
        *,
        webui: bool = False,
    ) -> None:
        self._app = app
        self._public = public
        self._webui = webui
        self._digests = [_digest(key.encode()) for key in keys]
        self._owners = [owner_of(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app, or respond with 401 if the request needs a key and has none."""
        if scope["type"] == "http" and not self._is_public(scope):
            error = self._identify(scope)
            if error is not None:
                await error_response(error, None, scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_public(self, scope: Scope) -> bool:
        if self._webui and asks_for_page(scope):
            return True
        return scope["method"] in READS and scope["path"] in self._public

    def _identify(self, scope: Scope) -> Unauthorized | None:
        """Store the caller in `scope` if the request has a valid key; otherwise return an error."""
        key = _key(scope)
        if not key:
            return Unauthorized("Missing API key: send the header Authorization: Bearer KEY")
        # The time of this comparison does not depend on the key: all digests have the same length,
        # and the digest of the key is compared with all of them.
        digest = _digest(key)
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if any(matches):
            place = matches.index(True)
            scope[CALLER], scope[OWNER] = f"key-{1 + place}", self._owners[place]
            return None
        return Unauthorized("Wrong API key: send a key that this server was started with")


def _key(scope: Scope) -> bytes:
    """Return the API key of a request; b"" if the request has none."""
    scheme, _, key = header(scope, b"authorization").partition(b" ")
    if scheme.lower() != b"bearer":
        key = header(scope, b"x-api-key")  # Anthropic clients send this header
    return key.strip()


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
