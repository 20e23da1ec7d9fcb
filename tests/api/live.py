"""The app on a real socket, for what only a connection can show."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from cpuserve.entrypoints.openai.server import make_server
from cpuserve.entrypoints.serve import HttpOptions
from tests.api.fakes import FakeEngine, Script, make_serving, speak

STREAM = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@dataclass
class Live:
    """A running server."""

    engine: FakeEngine
    serving: Any
    port: int
    writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def open(self, *, receive_buffer: int | None = None):
        """A raw connection."""
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
        """Send `data`; everything that comes until the server closes."""
        reader, writer = await self.open()
        writer.write(data)
        answer = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return answer

    async def post(self, path: str, body: dict[str, Any]):
        """Send a request and return the connection without reading."""
        reader, writer = await self.open()
        writer.write(post(path, body))
        return reader, writer

    async def until(self, condition, timeout_s: float = 5.0) -> None:
        """Wait until condition() holds."""
        loop = asyncio.get_running_loop()
        end = loop.time() + timeout_s
        while not condition():
            assert loop.time() < end, "it did not happen"
            await asyncio.sleep(0.005)

    async def is_sane(self) -> None:
        """Nothing runs, the gauges are zero and a plain request is answered."""
        await self.until(lambda: self.engine.running == 0)
        assert self.serving.active_sequences == 0
        assert self.serving.metrics.gauges() == (0, 0, 0.0)
        self.engine.script = speak
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = await self.send(post("/v1/chat/completions", body, close=True))
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer


def post(path: str, body: dict[str, Any] | bytes, *, close: bool = False) -> bytes:
    """The bytes of a POST."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    end = b"connection: close\r\n" if close else b""
    head = b"POST %b HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n" % path.encode()
    return head + b"content-length: %d\r\n%b\r\n" % (len(data), end) + data


@asynccontextmanager
async def live(script: Script = speak, *, limits=None, **options: Any):
    """A server on a free port of 127.0.0.1."""
    engine = FakeEngine(script)
    serving = make_serving(engine, http=limits)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        port = listener.getsockname()[1]
        server = make_server(serving, HttpOptions(port=port, **options))
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started:
                await asyncio.sleep(0.005)
            server_under_test = Live(engine, serving, port)
            try:
                yield server_under_test
            finally:
                await server_under_test.close()
        finally:
            server.should_exit = True
            server.force_exit = True
            await running
