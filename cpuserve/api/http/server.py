"""The HTTP server: uvicorn, with timeouts for slow clients and our log format."""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from cpuserve.api.dialects import dialect_of, dialect_of_head
from cpuserve.api.errors.http_errors import LINGER_S, HeadersTooLarge, RequestTimeout, drop_body
from cpuserve.api.errors.record import RECORD, RequestRecord, note_failure
from cpuserve.api.http.access_log import log_refused
from cpuserve.api.http.listener import Listener
from cpuserve.api.response.direct_body import DIRECT_BODY, DirectBody
from cpuserve.base.errors import InvalidRequest
from cpuserve.base.fault_points import fault

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from starlette.types import ASGIApp, Receive, Scope, Send
    from uvicorn.protocols.http.h11_impl import RequestResponseCycle

    from cpuserve.api.errors.dialect import Dialect
    from cpuserve.base.errors import RequestError
    from cpuserve.config.server import ServerOptions

MAX_HEADER_BYTES = 64 * 1024
RECEIVE_BYTES = 1 << 18

# How often to check whether a client with a half-closed connection has disconnected.
_RESET_POLL_S = 0.1


class GuardedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """H11Protocol that closes stalled connections, and responds on half-closed ones.

    The request line and headers must arrive within header_timeout_s of opening the connection,
    or of the first byte of a later request. A body may pause for at most header_timeout_s.
    If a full write buffer does not drain within write_timeout_s,
    the connection and its request are aborted.

    space: where the sockets of all connections write the bytes that they receive.
      asyncio would allocate RECEIVE_BYTES for each piece, and small objects would split this
      memory (FrameReader).
    """

    # Instances share the keys of a dict of up to 30 attributes; uvicorn sets nearly as many.
    __slots__ = (
        "_asgi",
        "_body_timer",
        "_gone_timer",
        "_half_closed",
        "_head",
        "_header_timer",
        "_refused",
        "_write_timer",
    )

    space = memoryview(bytearray(0))
    header_timeout_s = 15.0
    write_timeout_s = 30.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._header_timer: asyncio.TimerHandle | None = None
        self._body_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._gone_timer: asyncio.TimerHandle | None = None
        # The bytes of the next request until its headers are complete.
        # The first of these bytes may have arrived together with the previous request.
        self._head = b""
        self._refused = False
        self._half_closed = False
        self._asgi = self.app
        self.app = self._call_asgi

    async def _call_asgi(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the application with a DirectBody for the request of the current `self.cycle`."""
        scope[DIRECT_BODY] = DirectBody(self.cycle)
        await self._asgi(scope, receive, _lingering(self.cycle, receive, send))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the header timeout for the first request."""
        super().connection_made(transport)
        self._start_header_timer()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        """Return `space`: asyncio calls buffer_updated before it asks for space again."""
        return self.space

    def buffer_updated(self, nbytes: int) -> None:
        """Handle the bytes that have arrived in `space`."""
        self.data_received(bytes(self.space[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Start the header timeout if a request begins; stop it when its headers are complete."""
        fault("client.receive")
        if self._refused:
            return
        if self._between_requests():
            if self._header_timer is None:
                self._start_header_timer()
            self._head = (self._head + data)[:MAX_HEADER_BYTES]
        super().data_received(data)
        if not self._between_requests():
            self._head = b""
            if not self._refused:  # else this timer ends the connection
                self._stop(self._header_timer)
                self._header_timer = None
        self._watch_body()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: HTTP allows a server to ignore an upgrade to WebSocket or h2c.

        uvicorn would log the advice to install a WebSocket library, which this server cannot use.
        """

    def _between_requests(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _start_header_timer(self) -> None:
        self._header_timer = self.loop.call_later(self.header_timeout_s, self._header_late)

    def _header_late(self) -> None:
        self._header_timer = None
        if self._between_requests() and not self.transport.is_closing():
            msg = f"The request headers were not complete within {self.header_timeout_s:g} s"
            self._refuse(RequestTimeout(msg))

    def _watch_body(self) -> None:
        """Restart the body timeout for each piece of a body, unless the response has been sent."""
        incomplete = self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing()
        if incomplete and self._body_timer is not None and self.cycle.response_complete:
            return
        self._stop(self._body_timer)
        self._body_timer = None
        if incomplete:
            self._body_timer = self.loop.call_later(self.header_timeout_s, self._body_late)

    def _body_late(self) -> None:
        self._body_timer = None
        if self.flow.read_paused:  # the client cannot send while the server has paused reading
            self._watch_body()
        elif self.cycle.response_started:
            self.transport.abort()
        else:
            msg = f"The client sent no more of the request body for {self.header_timeout_s:g} s"
            self._refuse(RequestTimeout(msg))

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle a half-close; return True, to keep the connection, if a response is pending."""
        cycle = self.cycle
        if self._refused or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        if not self.transport.can_write_eof():  # TLS: the end of one direction ends both
            self.transport.abort()
            return False
        if not self._half_closed:
            self._half_closed = True
            self._provoke_reset()
        return True

    def _provoke_reset(self) -> None:
        """Find out whether the client still reads, or has closed the connection completely.

        Both cases look the same until the server sends something: if the client has closed
        the connection, its system then replies with a reset. Before the response, the server sends
        an interim response (100), which HTTP/1.1 clients skip. HTTP/1.0 has no interim responses,
        so a response to such a client must start within LINGER_S.
        """
        cycle = self.cycle
        if not cycle.response_started and cycle.scope["http_version"] != "1.1":
            self._gone_timer = self.loop.call_later(LINGER_S, self._give_up)
            return
        if not cycle.response_started:
            going_on = h11.InformationalResponse(status_code=100, headers=[], reason="Continue")
            self.transport.write(self.conn.send(going_on) or b"")
            cycle.waiting_for_100_continue = False
        self._look_for_reset()

    def _look_for_reset(self) -> None:
        """Poll for a reset: asyncio stops reading at the half-close, so it does not report one."""
        sock = self.transport.get_extra_info("socket")
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self._gone_timer = self.loop.call_later(_RESET_POLL_S, self._look_for_reset)

    def _give_up(self) -> None:
        if not self.cycle.response_started:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Adjust the timers: the headers of a pipelined request may already be complete."""
        self._head = bytes(self.conn.trailing_data[0][:MAX_HEADER_BYTES])
        super().on_response_complete()
        if self._header_timer is not None and not self._between_requests():
            self._stop(self._header_timer)
            self._header_timer = None
        self._watch_body()
        if self._half_closed and (self._between_requests() or self.cycle.more_body):
            self.transport.close()  # the client can send no further request
        elif self._half_closed:
            self._provoke_reset()

    def send_400_response(self, msg: str) -> None:
        """Respond to invalid HTTP with an error in the dialect's format; close the connection."""
        request, _ = self.conn.trailing_data
        if len(request) > MAX_HEADER_BYTES:
            msg = f"The request headers exceed {MAX_HEADER_BYTES} bytes: send fewer or shorter ones"
            self._refuse(HeadersTooLarge(msg))
        else:
            self._refuse(InvalidRequest(msg, code="invalid_http"))

    def _refuse(self, error: RequestError) -> None:
        self._log_refusal(error)
        body = self._dialect().error(error, "")
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
            self.transport.close()  # a response has started, so no error can be sent
            return
        # Closing with unread data resets the connection, and the client would lose the response.
        # Close only the sending side, and drop received data for up to LINGER_S. TLS has no such
        # half-closed connections.
        self._refused = True
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._stop(self._header_timer)
        self._header_timer = self.loop.call_later(LINGER_S, self.transport.abort)

    def _dialect(self) -> Dialect:
        """Return the dialect of the request that is being received."""
        if self._head or self._between_requests():
            return dialect_of_head(self._head)
        scope = self.cycle.scope
        return dialect_of(scope["path"], {name for name, _ in scope["headers"]})

    def _log_refusal(self, error: RequestError) -> None:
        """Log a refused connection; if a request is running, end the request, which logs it."""
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            data, _ = self.conn.trailing_data
            # A connection without any data is a port probe, or a browser that connects early.
            if data or not isinstance(error, RequestTimeout):
                log_refused(self.client, error, data)
            return
        scope = cast("dict[str, Any]", cycle.scope)
        scope.setdefault(RECORD, RequestRecord())
        if not cycle.response_started:
            note_failure(error, scope)
            scope[RECORD].status = error.status
        cycle.disconnected = True
        cycle.message_event.set()

    def pause_writing(self) -> None:
        """Start the write timeout: the write buffer is full because the client does not read."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.write_timeout_s, self._write_late)

    def resume_writing(self) -> None:
        """Stop the write timeout: the client reads again."""
        super().resume_writing()
        self._stop(self._write_timer)
        self._write_timer = None

    def _write_late(self) -> None:
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop all timers of the closed connection."""
        for timer in (self._header_timer, self._body_timer, self._write_timer, self._gone_timer):
            self._stop(timer)
        super().connection_lost(exc)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


def _lingering(cycle: RequestResponseCycle, receive: Receive, send: Send) -> Send:
    """Return a `send` that reads the rest of a request before a response closes its connection.

    Closing a connection with unread data resets it, and the client would lose the response. So
    the end of the response waits for the rest of the body, which is dropped, in the limits of
    drop_body. Without a body, or on a connection that stays open, nothing waits.
    """
    closes = cycle.scope["http_version"] == "1.0" or _says_close(cycle.scope["headers"])

    def closes_on_body(message: Any) -> bool:
        ends = not message.get("more_body", False) and not cycle.disconnected
        return ends and cycle.more_body and (closes or not cycle.keep_alive)

    async def send_and_linger(message: Any) -> None:
        nonlocal closes
        if message["type"] == "http.response.start":
            closes = closes or _says_close(message.get("headers", ()))
        elif closes_on_body(message):
            await send({**message, "more_body": True})
            message = {**message, "body": b""}
            await drop_body(receive)
        await send(message)

    return send_and_linger


def _says_close(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(name == b"connection" and b"close" in value.lower() for name, value in headers)


def guarded_protocol(header_timeout_s: float, write_timeout_s: float) -> type[GuardedProtocol]:
    """Return a GuardedProtocol class with these timeouts, for one server and its event loop."""

    class Configured(GuardedProtocol):
        space = memoryview(bytearray(RECEIVE_BYTES))

    Configured.header_timeout_s = header_timeout_s
    Configured.write_timeout_s = write_timeout_s
    return Configured


_KEEP_ALIVE_S = 30


class _Server(uvicorn.Server):
    """uvicorn's server with TLS, and without signal handlers: front_end.py handles the signals.

    handshake_s: the most seconds that a TLS handshake may take.
    """

    handshake_s = GuardedProtocol.header_timeout_s

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections of `sockets`, with TLS where a Listener has a certificate."""
        await super().startup([])
        make_protocol = partial(
            cast("Any", self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for sock in sockets or ():
            certificate = sock.certificate if isinstance(sock, Listener) else None
            options: dict[str, Any] = {}
            if certificate is not None:
                options = {"ssl": certificate.context, "ssl_handshake_timeout": self.handshake_s}
            loop = asyncio.get_running_loop()
            server = await loop.create_server(
                make_protocol, sock=sock, backlog=self.config.backlog, **options
            )
            self.servers.append(server)


def make_server(
    app: ASGIApp,
    options: ServerOptions,
    *,
    header_timeout_s: float = GuardedProtocol.header_timeout_s,
    write_timeout_s: float = GuardedProtocol.write_timeout_s,
    handshake_s: float = GuardedProtocol.header_timeout_s,
) -> uvicorn.Server:
    """Return the HTTP server for `app`, which the caller runs with serve(sockets=[...])."""
    # --access-log all has a line of our own for each request.
    access_log = options.log_level == "debug" and options.access_log != "all"
    proxies = list(options.forwarded_allow_ips)
    config = uvicorn.Config(
        app,
        http=guarded_protocol(header_timeout_s, write_timeout_s),
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=access_log,
        server_header=False,
        forwarded_allow_ips="*" if "*" in proxies else proxies,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    _adopt_uvicorn_logs(access_log)
    server = _Server(config)
    server.handshake_s = handshake_s
    return server


def _adopt_uvicorn_logs(access_log: bool) -> None:
    """Send uvicorn's warnings, and its access log if enabled, to the handlers of our log."""
    for name, level in (("uvicorn.error", logging.WARNING), ("uvicorn.access", logging.INFO)):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = False
        logger.addFilter(_is_not_told)
        if name == "uvicorn.error" or access_log:
            logger.handlers = list(logging.getLogger("cpuserve").handlers)

    logging.getLogger("asyncio").addFilter(_is_no_lost_event)


def _is_no_lost_event(record: logging.LogRecord) -> bool:
    """Drop asyncio's line for each event to a client that is gone: its request has a line."""
    return record.msg != "socket.send() raised exception."


def _is_not_told(record: logging.LogRecord) -> bool:
    """Drop uvicorn's log line for invalid HTTP, because access_log.py logs it with the address."""
    return record.msg != "Invalid HTTP request received."
