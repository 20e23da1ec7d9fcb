"""The app on a real socket, for tests that need a connection."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from cpuserve.api.app import app_of, create_app
from cpuserve.api.batches.start import batch_service
from cpuserve.api.callers.known_callers import KnownCallers
from cpuserve.api.http.listener import open_listener
from cpuserve.api.http.server import make_server
from cpuserve.api.request.state import ServerState
from cpuserve.api.stored.store import Store, StoreBounds
from cpuserve.base.background import Pauses, keep
from cpuserve.config.server import ServerOptions
from cpuserve.serving.models.registry import ModelRegistry
from tests.api.fakes import FakeEngine, Script, make_context, speak
from tests.helpers.patience import PATIENCE_S, until

# Pauses of background tasks that tests do not wait for.
QUICK = Pauses(first_s=0.02, longest_s=0.05, steady_s=0.2)
STREAM = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@dataclass
class Live:
    """A running server."""

    engine: FakeEngine
    context: Any
    state: ServerState
    port: int
    server: Any = None
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def open(self, *, receive_buffer: int | None = None):
        """Open a TCP connection."""
        sock = socket.socket()
        if receive_buffer:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", self.port))
        reader, writer = await asyncio.open_connection(sock=sock)
        self.writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        """Close every connection that was opened."""
        for writer in self.writers:
            writer.close()
        for writer in self.writers:
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def send(self, data: bytes) -> bytes:
        """Send `data`, and return all bytes received until the server closes the connection."""
        reader, writer = await self.open()
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        writer.close()
        return answer

    async def post(self, path: str, body: dict[str, Any]):
        """Send a request and return the connection without reading."""
        reader, writer = await self.open()
        writer.write(post(path, body))
        return reader, writer

    async def until(self, condition) -> None:
        """Wait until condition() holds."""
        await until(condition)

    async def is_sane(self) -> None:
        """Check that nothing runs, that the gauges are zero and that a request is answered."""
        await until(lambda: self.engine.running == 0)
        assert self.context.active_sequences == 0
        assert self.context.metrics.gauges() == (0, 0, 0.0)
        self.engine.script = speak
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = await self.send(post("/v1/chat/completions", body, close=True))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer


def post(path: str, body: dict[str, Any] | bytes, *, close: bool = False) -> bytes:
    """Return the bytes of a POST request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    end = b"connection: close\r\n" if close else b""
    head = b"POST %b HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n" % path.encode()
    return head + b"content-length: %d\r\n%b\r\n" % (len(data), end) + data


TIMEOUTS = ("header_timeout_s", "write_timeout_s", "handshake_s")


@asynccontextmanager
async def live(script: Script = speak, *, limits=None, context: Any = None, **options: Any):
    """Run a server on a free port of 127.0.0.1; context: of its model, in place of a script."""
    context = context or make_context(FakeEngine(script), http=limits)
    engine = context.client
    tls = {name: value for name, value in options.items() if name.startswith("ssl_")}
    with open_listener(ServerOptions(port=0, **tls)) as listener:
        port = listener.getsockname()[1]
        # Tests may send any Host header; those that test host names set allowed_hosts themselves.
        timeouts = {name: options.pop(name) for name in TIMEOUTS if name in options}
        http = ServerOptions(port=port, **{"allowed_hosts": ("*",), **options})
        stored, callers = Store(StoreBounds.of(http)), KnownCallers.of(http)
        state = ServerState(ModelRegistry(context), stored=stored, callers=callers)
        state.certificate = listener.certificate
        if http.files_dir is not None:
            state.batches = batch_service(state, http)
        server = make_server(app_of(state, http), http, **timeouts)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        if state.batches is not None:
            inner = create_app(state)
            batches = keep("running batches", lambda: state.batches.run(inner), QUICK)
        try:
            while not server.started:
                await asyncio.sleep(0.005)
            server_under_test = Live(engine, context, state, port, server)
            try:
                yield server_under_test
            finally:
                await server_under_test.close()
        finally:
            server.should_exit = True
            server.force_exit = True
            await running
            if state.batches is not None:
                batches.cancel()
                await asyncio.wait((batches,))
                state.batches.directory.close()
            await asyncio.to_thread(state.records.close)
