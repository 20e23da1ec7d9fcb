"""Write the body of a response past the middleware, for streams of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

# The key of a request's DirectBody in the ASGI scope; it is missing with other HTTP servers.
DIRECT_BODY = "cpuserve.direct_body"


class DirectBody:
    """Writes pieces of a response's body directly to the transport, without middleware and h11.

    It is for streams of tokens: middleware and h11's events would double the work per token in the
    front end. The start and the last piece of the response must be sent as ASGI messages, so that
    h11's state stays correct.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        # As in h11, a body without Content-Length is chunked in HTTP/1.1. In HTTP/1.0 it ends with
        # the connection.
        self._chunked = cycle.scope["http_version"] == "1.1"

    async def write(self, data: bytes) -> None:
        """Send `data`: wait while the write buffer is full, and do nothing after a disconnect."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if data and not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
