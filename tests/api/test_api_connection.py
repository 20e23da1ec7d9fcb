"""Clients that disconnect, stall or send invalid HTTP do not change the server's state."""

import asyncio
import functools
import json
import logging
import socket
import struct
from contextlib import suppress

import pytest

from cpuserve.api.errors import http_errors as errors
from cpuserve.engine.ipc import Output
from cpuserve.serving.models.limits import ClientLimits
from tests.api.live import STREAM, live, post
from tests.helpers.even_loop import run_even
from tests.helpers.patience import PATIENCE_S, until


def runs(test):
    """Run an async test to its end; on a slow machine, its server and clients are as quick."""

    @functools.wraps(test)
    def wrapper(*args, **kwargs):
        run_even(asyncio.wait_for(test(*args, **kwargs), PATIENCE_S))

    return wrapper


def endless(engine, number, prompt, params):
    while True:
        yield Output(number, [70])
        yield 0.002


def silent(engine, number, prompt, params):
    yield asyncio.Event()
    yield Output(number, [70], "length")


def close(writer):
    writer.close()


def reset(writer):
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.close()


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("n", [1, 3])
@runs
async def test_leaving_in_mid_stream_aborts(leave, n):
    async with live(endless) as server:
        reader, writer = await server.post("/v1/chat/completions", {**STREAM, "n": n})
        await reader.readuntil(b"content")
        leave(writer)
        await until(lambda: server.engine.aborted == n)
        await server.is_sane()


@pytest.mark.parametrize("leave", [close, reset])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
@runs
async def test_leaving_before_the_first_token_aborts(leave, stream, path):
    async with live(silent) as server:
        asked = {"input": "hi"} if path == "/v1/responses" else {**STREAM, "prompt": "hi"}
        body = {**asked, "stream": stream}
        _, writer = await server.post(path, body)
        await until(lambda: server.engine.running == 1)
        leave(writer)
        await until(lambda: server.engine.aborted == 1)
        await server.is_sane()


@pytest.mark.parametrize("leave", [close, reset])
@runs
async def test_leaving_a_response_in_mid_stream_aborts(leave):
    async with live(endless) as server:
        reader, writer = await server.post("/v1/responses", {"input": "hi", "stream": True})
        await reader.readuntil(b"response.output_text.delta")
        leave(writer)
        await until(lambda: server.engine.aborted == 1)
        await server.is_sane()


@runs
async def test_leaving_a_whole_answer_aborts():
    async with live(endless) as server:
        _, writer = await server.post("/v1/completions", {"prompt": "hi", "n": 4})
        await until(lambda: server.engine.running == 4)
        writer.close()
        await until(lambda: server.engine.aborted == 4)
        await server.is_sane()


@pytest.mark.parametrize("cut", [30, 100, -1])
@runs
async def test_leaving_within_the_request_starts_nothing(cut, caplog):
    async with live() as server:
        _, writer = await server.open()
        writer.write(post("/v1/chat/completions", STREAM)[:cut])
        await asyncio.sleep(0.02)
        writer.close()
        await asyncio.sleep(0.02)
        assert not server.engine.asked
        await server.is_sane()
        assert "Traceback" not in caplog.text


@pytest.mark.deep
@runs
async def test_two_hundred_leave_at_once():
    async with live(endless) as server:
        opened = [await server.post("/v1/chat/completions", STREAM) for _ in range(200)]
        await until(lambda: server.engine.running == 200)
        for _, writer in opened:
            reset(writer)
        await until(lambda: server.engine.aborted == 200)
        await server.is_sane()


def flood(engine, number, prompt, params):
    for _ in range(40_000):
        yield Output(number, [70] * 16)
        yield 0.0
    yield Output(number, [], "length")


@runs
async def test_a_reader_that_stops_reading_is_cut_off_and_others_go_on():
    async with live(flood, write_timeout_s=0.3) as server:
        _, writer = await server.open(receive_buffer=4096)
        writer.transport.pause_reading()
        writer.write(post("/v1/chat/completions", STREAM))
        await until(lambda: server.engine.aborted == 1)
        await server.is_sane()


@runs
async def test_a_stream_waits_for_its_reader():
    """While the client does not read, the connection's buffers limit how much is generated."""
    taken = 0

    def counted(engine, number, prompt, params):
        nonlocal taken
        while True:
            taken += 1
            yield Output(number, [70] * 64)
            yield 0.0

    async with live(counted, write_timeout_s=20) as server:
        _, writer = await server.open(receive_buffer=4096)
        writer.transport.pause_reading()
        writer.write(post("/v1/chat/completions", STREAM))
        before = -1
        while taken != before or not taken:
            before = taken
            await asyncio.sleep(0.2)
        assert 0 < taken < 60_000
        writer.close()
        await until(lambda: server.engine.aborted == 1)


@pytest.mark.parametrize(
    "sent", [b"", b"G", b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"], ids=["no", "one", "half"]
)
@runs
async def test_headers_that_do_not_come_are_timed_out(sent):
    async with live(header_timeout_s=0.2) as server:
        answer = await server.send(sent)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "request_timeout"
        await server.is_sane()


@runs
async def test_headers_that_arrive_slowly_byte_by_byte_are_timed_out():
    async with live(header_timeout_s=0.3) as server:
        reader, writer = await server.open()
        writer.write(b"GET /health HTTP/1.1\r\n")
        answer = asyncio.create_task(reader.read())
        while not answer.done():  # the server has to end it: no header comes to an end here
            writer.write(b"x-a: b\r\n")
            await asyncio.wait([answer], timeout=0.05)
        assert answer.result().startswith(b"HTTP/1.1 408 ")
        writer.close()


@runs
async def test_the_second_request_of_a_connection_is_timed_too():
    async with live(header_timeout_s=0.2) as server:
        reader, writer = await server.open()
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"GET /health HTTP")
        assert (await asyncio.wait_for(reader.read(), PATIENCE_S)).startswith(b"HTTP/1.1 408 ")
        writer.close()


@runs
async def test_a_connection_serves_many_requests_slower_than_the_header_timeout():
    async with live(header_timeout_s=0.15) as server:
        reader, writer = await server.open()
        for _ in range(3):
            writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.2)
        writer.close()


@runs
async def test_a_long_answer_is_not_a_slow_header():
    def slow(engine, number, prompt, params):
        yield 0.5
        yield Output(number, [70], "length")

    async with live(slow, header_timeout_s=0.1) as server:
        answer = await server.send(post("/v1/completions", {"prompt": "a"}, close=True))
        assert answer.startswith(b"HTTP/1.1 200 ")


@runs
async def test_a_body_that_does_not_come_is_408_and_closed(monkeypatch):
    monkeypatch.setattr(errors, "LINGER_S", 0.1)
    async with live(limits=ClientLimits(body_timeout_s=0.2)) as server:
        head = post("/v1/completions", {"prompt": "a"})
        answer = await server.send(head[:-3])
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in answer
        await server.is_sane()


@runs
async def test_a_huge_body_is_413_before_it_is_sent(monkeypatch):
    monkeypatch.setattr(errors, "LINGER_S", 0.1)
    async with live() as server:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        answer = await server.send(head + b"content-length: 100000000\r\n\r\n" + b" " * 1000)
        assert answer.startswith(b"HTTP/1.1 413 ")
        await server.is_sane()


@runs
async def test_a_chunked_body_over_the_cap_is_413(monkeypatch):
    monkeypatch.setattr(errors, "LINGER_S", 0.1)
    async with live(limits=ClientLimits(max_body_bytes=100)) as server:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
        chunks = b"1\r\n \r\n" * 500
        answer = await server.send(head + b"transfer-encoding: chunked\r\n\r\n" + chunks)
        assert answer.startswith(b"HTTP/1.1 413 ")
        await server.is_sane()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"hello\r\n\r\n", 400),
        (b"GET / HTTP/x.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\n\r\n", 400),  # no Host
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\x00b\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nhost: a\r\nx-big: " + b"a" * 200_000, 431),
        (b"GET /" + b"a" * 200_000, 431),
        (b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 20_000, 431),
        (b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 300 + b"\r\n", 431),
    ],
    ids=[
        "text", "version", "no-host", "nul", "negative-length", "two-lengths",
        "big-header", "big-target", "20k-lines", "300-lines",
    ],
)  # fmt: skip
@runs
async def test_what_is_not_http_is_refused_in_openais_shape(data, status):
    async with live() as server:
        answer = await server.send(data)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:200]
        head, _, body = answer.partition(b"\r\n\r\n")
        code = {400: "invalid_http", 431: "headers_too_large"}[status]
        assert json.loads(body)["error"]["code"] == code
        assert b"connection: close" in head.lower()
        await server.is_sane()


@runs
async def test_line_breaks_in_a_request_id_split_no_response():
    async with live() as server:
        answer = await server.send(
            b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
            b"x-request-id: a%0d%0aset-cookie: x=1\r\n\r\n"
        )
        assert b"set-cookie" not in answer.lower()


@runs
async def test_pipelined_requests_are_answered_in_order():
    async with live() as server:
        one = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
        last = b"GET /version HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        answer = await server.send(one + one + last)
        assert answer.count(b"HTTP/1.1 200 OK") == 3
        assert answer.endswith(b"}")


@runs
async def test_each_event_is_sent_at_once():
    gate = asyncio.Event()

    def gated(engine, number, prompt, params):
        yield Output(number, [70])
        yield gate
        yield Output(number, [71], "length")

    async with live(gated) as server:
        reader, _writer = await server.post("/v1/chat/completions", STREAM)
        first = await reader.readuntil(b'{"content":')
        assert b"DONE" not in first
        gate.set()
        assert await reader.readuntil(b"[DONE]")
        _writer.close()


@pytest.fixture
def uvicorns_lines():
    """Return the messages of uvicorn's logger, which the server writes to its own log."""
    lines = []

    def note(record):
        lines.append(record.getMessage())
        return True

    logger = logging.getLogger("uvicorn.error")
    logger.addFilter(note)
    yield lines
    logger.removeFilter(note)


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
@runs
async def test_an_upgrade_to_another_protocol_is_ignored_without_advice_in_the_log(
    uvicorns_lines, protocol
):
    async with live() as server:
        head = b"GET /v1/models HTTP/1.1\r\nhost: a\r\nupgrade: %b\r\n" % protocol
        answer = await server.send(head + b"connection: upgrade, close\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 ")
        await server.is_sane()
    assert uvicorns_lines == []


REFUSED = {
    b"POST /nowhere": b"404",
    b"POST /health": b"405",
    b"POST /v1/completions": b"415",
    b"PUT /v1/completions": b"405",
}


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("line", REFUSED)
@runs
async def test_a_client_that_sends_on_reads_the_refusal_of_a_closed_connection(
    monkeypatch, line, version
):
    """Also one that sends its whole body before it reads anything."""
    monkeypatch.setattr(errors, "LINGER_S", PATIENCE_S)
    part, count = b" " * (1 << 16), 64
    head = line + b" HTTP/" + version + b"\r\nhost: a\r\ncontent-encoding: br\r\n"
    head += b"content-type: application/json\r\nconnection: Close\r\n"
    chunked = version == b"1.1"
    size = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % (len(part) * count)
    async with live() as server:
        reader, writer = await server.open()
        writer.write(head + size + b"\r\n\r\n")
        for _ in range(count):
            writer.write(b"%x\r\n%b\r\n" % (len(part), part) if chunked else part)
            await asyncio.wait_for(writer.drain(), PATIENCE_S)
        writer.write(b"0\r\n\r\n" if chunked else b"")
        answer = await asyncio.wait_for(reader.read(), PATIENCE_S)
        assert answer.startswith(b"HTTP/1.1 " + REFUSED[line])
        assert answer.endswith(b"}")
        await server.is_sane()


@pytest.mark.parametrize("limit", ["LINGER_S", "LINGER_BYTES"])
@runs
async def test_a_client_that_sends_without_end_is_disconnected(monkeypatch, limit):
    monkeypatch.setattr(errors, "LINGER_S", PATIENCE_S)
    monkeypatch.setattr(errors, limit, 0.1)
    async with live() as server:
        reader, writer = await server.open()
        writer.write(b"POST /nowhere HTTP/1.1\r\nhost: a\r\nconnection: close\r\n")
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), PATIENCE_S)
        assert head.startswith(b"HTTP/1.1 404 ")
        if limit == "LINGER_BYTES":
            writer.write(b"1\r\n \r\n")
        with suppress(ConnectionError):
            await asyncio.wait_for(reader.read(), PATIENCE_S)
        await server.is_sane()
