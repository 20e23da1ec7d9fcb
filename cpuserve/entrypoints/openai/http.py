"""The HTTP/1.1 protocol with the bounds uvicorn leaves open: slow senders and slow readers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from cpuserve.entrypoints.openai.errors import LINGER_S, error_json
from cpuserve.errors import RequestError

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

# The ASGI scope's member with the DirectBody of a request; other servers have none.
DIRECT_BODY = "cpuserve.direct_body"

MAX_HEADER_BYTES = 64 * 1024


class _BadHttp(RequestError):
    kind = "BadRequestError"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class DirectBody:
    """Pieces of a response's body, past the layers that see every ASGI message.

    For streams of tokens: each layer of middleware and h11's events would cost as much again as
    all else a token needs. Only between the response's start and its last piece, which both go the
    ordinary way; what h11 knows of the response then stays true.
    """

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        # What h11 decided: a body without length is chunked, or ends with the connection.
        self._chunked = cycle.scope["http_version"] == "1.1"

    async def write(self, data: bytes) -> None:
        """Send `data`; waits while the client's buffer is full, drops it once it is gone."""
        cycle = self._cycle
        if cycle.flow.write_paused and not cycle.disconnected:
            await cycle.flow.drain()
        if data and not cycle.disconnected:
            cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)


class GuardedProtocol(H11Protocol):
    """H11Protocol that closes connections which stall.

    The request line and headers must be complete header_timeout_s after the connection is made,
    or after a next request's first byte. A full write buffer must drain in write_timeout_s; then
    the connection is aborted, which aborts its request.
    """

    header_timeout_s = 15.0
    write_timeout_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._refused = False
        self._asgi = self.app
        self.app = self._call_asgi

    async def _call_asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application, with a DirectBody; `self.cycle` is this request's until it has ended."""
        scope[DIRECT_BODY] = DirectBody(self.cycle)
        await self._asgi(scope, receive, send)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock for the first request."""
        super().connection_made(transport)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Start the clock if this begins a request, stop it once the headers are complete."""
        if self._refused:
            return
        if self._header_timer is None and self._between_requests():
            self._start_header_timer()
        super().data_received(data)
        if not self._between_requests():
            self._stop(self._header_timer)
            self._header_timer = None

    def _between_requests(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._header_late)

    def _header_late(self) -> None:
        self._header_timer = None
        if self._between_requests() and not self.transport.is_closing():
            self._refuse(_BadHttp("The request headers were not complete in time", 408))

    def on_response_complete(self) -> None:
        """A pipelined request may have been waiting: its headers are complete or the clock runs."""
        super().on_response_complete()
        if self._header_timer is not None and not self._between_requests():
            self._stop(self._header_timer)
            self._header_timer = None

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in OpenAI's shape, and close."""
        received, _ = self.conn.trailing_data
        if len(received) > MAX_HEADER_BYTES:
            self._refuse(_BadHttp(f"The request headers exceed {MAX_HEADER_BYTES} bytes", 431))
        else:
            self._refuse(_BadHttp(msg, 400))

    def _refuse(self, error: RequestError) -> None:
        body = error_json(error)
        head = h11.Response(
            status_code=error.status,
            headers=[
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ],
        )
        try:
            for event in (head, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        except h11.LocalProtocolError:
            self.transport.close()  # an answer is already under way: nothing more can be said
            return
        # Closing with unread data resets the connection, and the client would lose the answer:
        # only this side is closed, and what still comes is dropped for a moment.
        self._refused = True
        self.flow.resume_reading()
        self.transport.write_eof()
        self._stop(self._header_timer)
        self._header_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def pause_writing(self) -> None:
        """The client does not read: start its clock."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_timeout_s, self._write_late)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        self._stop(self._write_timer)
        self._write_timer = None

    def _write_late(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all clocks."""
        self._stop(self._header_timer)
        self._stop(self._write_timer)
        super().connection_lost(exc)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def guarded_protocol(header_timeout_s: float, write_timeout_s: float) -> type[GuardedProtocol]:
    """GuardedProtocol with these timeouts."""

    class Configured(GuardedProtocol):
        pass

    Configured.header_timeout_s = header_timeout_s
    Configured.write_timeout_s = write_timeout_s
    return Configured
