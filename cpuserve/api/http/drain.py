"""Middleware that closes the connection after each response while the server drains."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from cpuserve.api.request.state import ServerState


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
