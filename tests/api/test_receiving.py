"""What arrives is written into buffers that exist: no piece has a large buffer of its own.

A buffer for each piece would be cut to the bytes that have arrived, and what is allocated next
would split the rest. The heaps of processes that received for hours grew by these holes.
"""

import asyncio
import socket
import tracemalloc
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from cpuserve.engine.child import SocketChannel
from cpuserve.engine.grammars.messages import Drop
from cpuserve.engine.grammars.worker import Worker
from cpuserve.engine.ipc import RECEIVE_BYTES, Abort, Pong, encode_frame
from cpuserve.engine.process import _Link
from tests.api.fakes import FakeEngine, make_context
from tests.api.live import live
from tests.helpers.patience import until

SMALL = RECEIVE_BYTES // 2


@contextmanager
def allocations():
    """Trace the allocations of Python; the value has `peak` afterwards, in bytes."""
    found = SimpleNamespace(peak=0)
    tracemalloc.start()
    try:
        yield found
        found.peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_message_to_the_engine_takes_little_memory():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = SocketChannel(theirs)
        with allocations() as found:
            channel.listen()
            ours.sendall(encode_frame(Abort([1])))
            assert channel.receive(block=True) == [Abort([1])]
        ours.close()
        with pytest.raises(EOFError):
            channel.receive(block=True)
        assert found.peak < SMALL


def test_a_message_of_the_engine_takes_little_memory():
    async def run():
        got = []
        ours, theirs = socket.socketpair()
        client = SimpleNamespace(on_message=got.append, on_lost=lambda: None)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: _Link(client), sock=ours)
        with theirs, allocations() as found:
            theirs.sendall(encode_frame(Pong(True)))
            await until(lambda: got)
        transport.abort()
        assert got == [Pong(True)]
        return found.peak

    assert asyncio.run(run()) < SMALL


def test_a_message_to_the_grammar_process_takes_little_memory():
    pairs = [socket.socketpair() for _ in range(2)]
    worker = Worker(pairs[0][1], pairs[1][1], -1)
    taken = []

    def take(message):
        """Count the memory of the second message from here on: the buffers exist now."""
        taken.append((message, tracemalloc.get_traced_memory()[0]))
        if len(taken) == 1:
            tracemalloc.reset_peak()
            pairs[0][0].sendall(encode_frame(Drop([2], [])))
        else:
            pairs[1][0].close()

    worker._handle = take
    pairs[0][0].sendall(encode_frame(Drop([1], [])))
    with allocations() as found:
        worker.run()
    for sock in (pairs[0][0], pairs[0][1], pairs[1][1]):
        sock.close()
    assert [message for message, _ in taken] == [Drop([1], []), Drop([2], [])]
    assert found.peak - taken[0][1] < SMALL


def test_a_request_takes_little_memory():
    async def ask(sock, loop):
        await loop.sock_sendall(sock, b"GET /ping HTTP/1.1\r\nhost: a\r\n\r\n")
        return await loop.sock_recv(sock, 2048)

    async def run():
        loop = asyncio.get_running_loop()
        async with live(make_context(FakeEngine())) as server:
            with socket.socket() as sock:
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", server.port))
                assert (await ask(sock, loop)).startswith(b"HTTP/1.1 200 ")
                with allocations() as found:
                    assert (await ask(sock, loop)).startswith(b"HTTP/1.1 200 ")
        return found.peak

    assert asyncio.run(run()) < 2 * SMALL
