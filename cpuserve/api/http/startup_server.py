"""A small HTTP server that responds until the FastAPI front end takes over the port.

A download takes minutes. Meanwhile a supervisor must see that the server is alive,
and a load balancer must see that it is not ready.
Importing FastAPI would delay the start of the engine by half a second. So this server uses only
asyncio. The server reads the head of a request, responds, and closes the connection.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cpuserve.api.dialects import dialect_of_head
from cpuserve.api.errors.dialect import OPENAI, Dialect
from cpuserve.api.http.access_log import log_unready
from cpuserve.api.http.listener import Listener
from cpuserve.base.errors import RETRY_AFTER_S, ServiceUnavailable
from cpuserve.serving.models.load_progress import LoadProgress, health_body, load_message

MAX_HEAD_BYTES = 1 << 16
HEAD_TIMEOUT_S = 15.0
# If a connection is closed with unread data, the system resets it, and the client
# may lose the response. So the server reads and drops further data for this many seconds.
LINGER_S = 2.0
_LIVE = "/live"
_HEALTH = ("/health", "/v1/health", "/ping")


class StartupServer:
    """Serves `listener` on its own thread until `stop` is called.

    /live returns 200. All other paths return 503; /health adds the progress of the start.
    """

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._loading = LoadProgress()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._stopped = threading.Event()
        self._connections: set[asyncio.Task[None]] = set()
        started = threading.Event()
        # A daemon thread, because a client that reads its response slowly must not delay the exit.
        threading.Thread(
            target=lambda: asyncio.run(self._serve(started)), name="cpuserve-starting", daemon=True
        ).start()
        started.wait()

    def on_progress(self, stage: str, done: int, total: int) -> None:
        """Set the loading progress that /health shows."""
        self._loading = LoadProgress.of(stage, done, total)

    def stop(self) -> None:
        """Stop accepting connections; return when the front end may take over the listener.

        Requests on open connections still get their responses.
        """
        if self._loop is not None and not self._stopped.is_set():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._stopped.wait()

    async def _serve(self, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener, self._accept)
        started.set()
        await self._stop.wait()
        self._loop.remove_reader(self._listener)
        self._stopped.set()
        if self._connections:
            await asyncio.wait(self._connections)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the client has disconnected before the connection was accepted
            return
        connection.setblocking(False)
        task = asyncio.ensure_future(self._respond(connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _respond(self, connection: socket.socket) -> None:
        """Respond to one request; drop a client that disconnects or sends no request."""
        try:
            reader, writer = await self._open(connection)
        except OSError:  # the client has disconnected, or cannot agree on TLS
            return
        with suppress(OSError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError):
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HEAD_TIMEOUT_S)
            writer.write(_response_to(head, self._loading))
            if writer.can_write_eof():
                writer.write_eof()
            await asyncio.wait_for(_drop(reader), LINGER_S)
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    async def _open(
        self, connection: socket.socket
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the streams of an accepted connection, after its TLS handshake if there is one."""
        loop, listener = asyncio.get_running_loop(), self._listener
        certificate = listener.certificate if isinstance(listener, Listener) else None
        options: dict[str, Any] = {}
        if certificate is not None:
            options = {"ssl": certificate.context, "ssl_handshake_timeout": HEAD_TIMEOUT_S}
        reader = asyncio.StreamReader(MAX_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, connection, **options)
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _drop(reader: asyncio.StreamReader) -> None:
    while await reader.read(MAX_HEAD_BYTES):
        pass


@dataclass(frozen=True, slots=True)
class _Response:
    status: str
    body: bytes = b""
    retry: bool = False

    def encode(self, *, with_body: bool) -> bytes:
        lines = [f"HTTP/1.1 {self.status}", "connection: close"]
        lines += [f"content-length: {len(self.body)}"]
        lines += ["content-type: application/json"] if self.body else []
        lines += [f"retry-after: {RETRY_AFTER_S}"] if self.retry else []
        head = "\r\n".join((*lines, "", "")).encode()
        return head + self.body if with_body else head


def _response_to(head: bytes, loading: LoadProgress) -> bytes:
    """Return the response for a request with these header bytes."""
    method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    path = rest.partition(" ")[0].partition("?")[0].rstrip("/") or "/"
    if path not in (_LIVE, *_HEALTH):
        log_unready(method, path)
    return _response(path, loading, dialect_of_head(head)).encode(with_body=method != "HEAD")


def _response(path: str, loading: LoadProgress, dialect: Dialect = OPENAI) -> _Response:
    if path == _LIVE:
        return _Response("200 OK")
    # The front end returns the same error while the engine loads (a test compares the two).
    body = dialect.error(ServiceUnavailable(load_message(loading)), "")
    if path in _HEALTH:
        body = health_body(body, "loading", loading)
    return _Response("503 Service Unavailable", body, retry=True)
