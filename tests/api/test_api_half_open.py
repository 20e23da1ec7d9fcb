"""Clients that stop sending: after a half-close, or in the middle of a body."""

import asyncio
import json

import pytest

from cpuserve.api.http import server as served
from cpuserve.engine.ipc import Output
from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import ANSWER
from tests.api.live import STREAM, live, post
from tests.api.test_api_connection import runs, silent

CHAT = {"messages": STREAM["messages"]}


async def half_close(server, data: bytes):
    """Send `data`, close the sending side, and return the reader of the response."""
    reader, writer = await server.open()
    writer.write(data)
    writer.write_eof()
    return reader


async def final(reader) -> bytes:
    """Return all data up to the end of the stream, without interim responses."""
    answer = await reader.read()
    while answer.startswith(b"HTTP/1.1 100 "):
        answer = answer.partition(b"\r\n\r\n")[2]
    return answer


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@runs
async def test_a_half_closed_client_gets_a_short_answer(version):
    async with live() as server:
        reader = await half_close(server, b"GET /version HTTP/%b\r\nhost: a\r\n\r\n" % version)
        assert (await final(reader)).startswith(b"HTTP/1.1 200 ")
        await server.is_sane()


def gated(gate, tokens):
    def script(engine, number, prompt, params):
        if tokens:
            yield Output(number, [70])
        yield gate
        yield Output(number, [71], "length")

    return script


@pytest.mark.parametrize("tokens", [0, 1])
@pytest.mark.parametrize("body", [CHAT, STREAM], ids=["whole", "stream"])
@runs
async def test_a_half_closed_client_gets_an_answer_that_takes_its_time(monkeypatch, body, tokens):
    monkeypatch.setattr(served, "_RESET_POLL_S", 0.01)
    gate = asyncio.Event()
    async with live(gated(gate, tokens)) as server:
        reader = await half_close(server, post("/v1/chat/completions", body))
        await server.until(lambda: server.engine.running == 1)
        await asyncio.sleep(0.1)  # the server has checked the connection several times
        assert server.engine.aborted == 0
        gate.set()
        answer = await final(reader)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b'"length"' in answer
        await server.is_sane()


@runs
async def test_all_pipelined_requests_of_a_half_closed_client_are_answered():
    async with live() as server:
        last = post("/v1/chat/completions", CHAT)
        reader = await half_close(server, b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n" * 2 + last)
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200 ") == 3
        assert ANSWER.encode() in answer


@runs
async def test_a_client_that_leaves_while_its_pipelined_request_runs_is_noticed():
    async with live(silent) as server:
        _, writer = await server.open()
        writer.write(b"GET /live HTTP/1.1\r\nhost: a\r\n\r\n" + post("/v1/chat/completions", CHAT))
        await server.until(lambda: server.engine.running == 1)
        writer.close()
        await server.until(lambda: server.engine.aborted == 1)
        await server.is_sane()


@pytest.mark.parametrize("missing", [1, 20, 100])
@runs
async def test_half_a_request_gets_no_answer(missing):
    async with live() as server:
        reader = await half_close(server, post("/v1/chat/completions", CHAT)[:-missing])
        assert await reader.read() == b""
        assert not server.engine.asked
        await server.is_sane()


@runs
async def test_half_a_request_behind_a_whole_one_ends_the_connection():
    async with live() as server:
        whole = post("/v1/chat/completions", CHAT)
        reader = await half_close(server, whole + whole[:-5])
        assert (await reader.read()).count(b"HTTP/1.1 200 ") == 1
        await server.is_sane()


@runs
async def test_nobody_computes_for_long_for_an_http_1_0_client_that_may_have_gone(monkeypatch):
    monkeypatch.setattr(served, "LINGER_S", 0.1)
    async with live(silent) as server:
        request = post("/v1/chat/completions", CHAT).replace(b"HTTP/1.1", b"HTTP/1.0")
        reader = await half_close(server, request)
        await server.until(lambda: server.engine.aborted == 1)
        assert await reader.read() == b""
        await server.is_sane()


def upload(path=b"/v1/completions", length=100):
    head = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n" % path
    return head + b"content-length: %d\r\n\r\n" % length


@pytest.mark.parametrize("sent", [b"", b'{"prompt":'])
@runs
async def test_a_body_that_stops_arriving_is_408_like_headers(sent):
    async with live(header_timeout_s=0.2) as server:
        answer = await server.send(upload() + sent)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in head.lower()
        assert json.loads(body)["error"]["code"] == "request_timeout"
        await server.is_sane()


@runs
async def test_a_large_upload_that_stops_gives_its_room_to_others():
    size = 1 << 20
    limits = ClientLimits(max_body_bytes=size, max_held_bytes=size)
    async with live(limits=limits, header_timeout_s=0.3) as server:
        _, writer = await server.open()
        writer.write(upload(length=size) + b" " * (size // 2))
        await server.until(lambda: server.state.bodies.held == size)
        await server.until(lambda: server.state.bodies.held == 0)
        await server.is_sane()


@runs
async def test_a_body_may_come_slowly():
    async with live(header_timeout_s=1.0) as server:
        reader, writer = await server.open()
        writer.write(upload())
        for piece in [b'{"prompt":"hi"', *[b" " * 10] * 8, b" " * 5]:
            await asyncio.sleep(0.15)
            writer.write(piece)
        writer.write(b"}")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("trickle", [False, True])
@runs
async def test_a_body_that_nobody_reads_does_not_hold_its_connection(trickle):
    async with live(header_timeout_s=0.3) as server:
        reader, writer = await server.open()
        writer.write(upload(b"/v1/models", 1000))
        assert (await reader.readline()).startswith(b"HTTP/1.1 405 ")
        ended = asyncio.create_task(reader.read())
        while not ended.done():
            if trickle:
                writer.write(b" ")
            await asyncio.sleep(0.05)
        ended.exception()  # a reset is an end too
        await server.is_sane()
