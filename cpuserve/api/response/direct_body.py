"""Write the body of a streamed response directly to the transport, past the middleware."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

# The key in ASGI scopes for the DirectBody of a request; other HTTP servers do not set it.
DIRECT_BODY = "cpuserve.direct_body"


class DirectBody:
    """Writes pieces of a response body directly to the transport, without middleware and h11.

    Middleware and h11 events would double the front end's work per token of a stream.
    The start and the last piece of the response must be sent as ASGI messages,
    so that the state of h11 stays correct.

    seen: is called with each piece, for the audit log; None = there is none.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        # As in h11, a body without Content-Length is chunked in HTTP/1.1.
        # In HTTP/1.0, the body ends when the connection is closed.
        self._chunked = cycle.scope["http_version"] == "1.1"
        self.seen: Callable[[bytes], None] | None = None

    async def write(self, data: bytes) -> None:
        """Send `data`; wait while the write buffer is full; do nothing after a disconnect."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if data and not cycle.disconnected:
            if self.seen is not None:
                self.seen(data)
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
