"""Each failed request, and each client that disconnects, is one line of the log."""

import asyncio
import functools
import logging
import re
import subprocess
import sys

import pytest

from cpuserve.api.http.startup_server import StartupServer
from cpuserve.base.errors import EngineDead
from cpuserve.base.log import BURST, OneLine, is_record
from cpuserve.engine.ipc import Output
from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import Api
from tests.api.live import live, post
from tests.api.test_api_shapes import dialect_of
from tests.helpers.children import child_options
from tests.helpers.even_loop import run_even
from tests.helpers.patience import PATIENCE_S, until

SECRET = "xyzzy"
CHAT = {"messages": [{"role": "user", "content": SECRET}]}
# Every route that generates, with a request that it answers.
GENERATING = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": SECRET},
    "/v1/responses": {"input": SECRET},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/api/chat": {**CHAT, "model": "tiny"},
    "/api/generate": {"prompt": SECRET, "model": "tiny"},
}
PATHS = sorted({*Api().app.state.paths} - {"/"})
LINE = re.compile(
    r"request (?P<id>[\w.-]+) from (?P<caller>[\w.-]+): "
    r"(?P<method>\w+) (?P<path>\S+)( model (?P<model>'([^'\\]|\\.)*'|\"([^\"\\]|\\.)*\"))?: "
    r"(?P<outcome>[^,]+)(, (?P<prompt>\d+) \+ (?P<done>\d+) tokens)?, \d+\.\d{3} s"
    r"( \((cached \d+, )?(thought \d+, )?(accepted (?P<accepted>\d+), )?"
    r"(queue \d+\.\d{3} s, (waited for (?P<waits>[^,]+), )?first token \d+\.\d{3} s, )?"
    r"end (?P<end>[a-z_ ]+)(, adapter '[^']*')?\))?"
)


def runs(test):
    @functools.wraps(test)
    def wrapper(*args, **kwargs):
        run_even(asyncio.wait_for(test(*args, **kwargs), PATIENCE_S))

    return wrapper


@pytest.fixture(autouse=True)
def at_the_default_level(caplog):
    with caplog.at_level("INFO", "cpuserve"):
        yield


def lines_of(caplog):
    records = [r for r in caplog.records if r.name == "cpuserve.requests"]
    caplog.clear()
    written = [OneLine().format(record) for record in records]
    assert all(is_record(line) and "\n" not in line for line in written)
    assert not any(SECRET in line for line in written), "the prompt is in the log"
    return [re.sub(r"^\S+ \S+ \S+ ", "", line) for line in written]


def line_of(caplog):
    (line,) = lines_of(caplog)
    found = LINE.fullmatch(line)
    assert found, line
    return found


def stopping(api):
    api.state.stopping = True


def dead(api):
    api.engine.alive = False


def as_is(api):
    pass


JSON = {"content-type": "application/json"}
REFUSED = {
    "not JSON": (as_is, "POST", b"{" + SECRET.encode(), JSON),
    "wrong type": (as_is, "POST", b"{}", {"content-type": "text/html"}),
    "too large": (as_is, "POST", b"x", {**JSON, "content-length": "99999999999"}),
    "wrong method": (as_is, "PUT", b"", {}),
    "no such method": (as_is, "DELETE", b"", {}),
    "no such model": (as_is, "POST", b'{"model": "nope"}', JSON),
    "wrong fields": (as_is, "POST", b'{"temperature": "warm", "prompt": 1}', JSON),
    "both lengths": (as_is, "POST", b"{}", {**JSON, "transfer-encoding": "chunked"}),
    "many headers": (as_is, "GET", b"", {f"x-{i}": "1" for i in range(200)}),
    "wrong host": (as_is, "POST", b"{}", {**JSON, "host": "evil.example"}),
    "stopping": (stopping, "POST", b"{}", JSON),
    "engine dead": (dead, "POST", b"{}", JSON),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_every_refusal_of_every_route_is_one_line(caplog, kind):
    prepare, method, body, headers = REFUSED[kind]
    api = Api(host_names=())
    prepare(api)
    for path in PATHS:
        sent = {"host": "localhost", **headers, "x-request-id": "r-1.7"}
        answer = api.request(method, path, content=body, headers=sent)
        if answer.status_code < 400 or (answer.status_code == 503 and path in ("/health", "/ping")):
            assert lines_of(caplog) == []
            continue
        found = line_of(caplog)
        assert found["id"] == "r-1.7"
        assert found["method"] == method
        assert found["path"] in (path, "/v1/responses/{response_id}")
        status, _, code = found["outcome"].partition(" ")
        assert int(status) == answer.status_code
        assert code, "an error has a code"
        error = answer.json().get("error")
        if isinstance(error, dict) and "code" in error:
            is_status = dialect_of(path) == "llamacpp"  # the codes of its errors are numbers
            assert error["code"] == (answer.status_code if is_status else code)


def test_a_missing_key_is_one_line_on_every_route(caplog):
    api = Api(api_keys=("k",))
    for path in PATHS:
        answer = api.get(path)
        if answer.status_code == 401:
            assert line_of(caplog)["outcome"] == "401 invalid_api_key"
        caplog.clear()


@pytest.mark.parametrize("path", GENERATING)
def test_what_is_answered_is_no_line(caplog, path):
    for stream in (False, True):
        assert Api().post(path, **GENERATING[path], stream=stream).status_code == 200
    assert lines_of(caplog) == []


@pytest.mark.parametrize("path", GENERATING)
def test_a_full_queue_is_one_line(caplog, path):
    api = Api()
    api.context.backlog.requests = 1 << 30
    assert api.post(path, **{**GENERATING[path], "model": "tiny"}).status_code == 429
    found = line_of(caplog)
    assert found["outcome"] == "429 rate_limit_exceeded"
    assert found["model"] == "'tiny'"


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_a_model_that_is_to_be_unloaded_and_does_not_exist_is_in_the_line(caplog, path):
    assert Api().post(path, model="nope", keep_alive=0).status_code == 404
    assert line_of(caplog)["model"] == "'nope'"


def dies_at_once(engine, number, prompt, params):
    yield EngineDead("the engine was killed by SIGKILL")


def dies_later(engine, number, prompt, params):
    yield Output(number, [70])
    yield Output(number, [71])
    yield EngineDead("the engine was killed by SIGKILL")


def breaks(engine, number, prompt, params):
    yield ZeroDivisionError("a bug")


@pytest.mark.matrix
@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [dies_at_once, dies_later, breaks])
def test_a_failure_of_the_engine_is_one_line_with_its_tokens(caplog, path, stream, script):
    Api(script).post(path, **{**GENERATING[path], "model": "tiny", "stream": stream})
    found = line_of(caplog)
    wanted = "500 server_error" if script is breaks else "503 service_unavailable"
    if stream and script is dies_later:
        wanted += " during the response"
    assert found["outcome"] == wanted
    assert found["model"] == "'tiny'"
    assert int(found["prompt"]) > 0
    assert int(found["done"]) == (2 if script is dies_later else 0)


def silent(engine, number, prompt, params):
    engine.info["silent"] = True
    yield asyncio.Event()


def two_and_silent(engine, number, prompt, params):
    yield Output(number, [70])
    yield Output(number, [71])
    engine.info["silent"] = True
    yield asyncio.Event()


@pytest.mark.matrix
@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", [silent, two_and_silent])
@runs
async def test_a_client_that_vanishes_is_one_line(caplog, path, stream, script):
    # A stream that has begun notices at its second keep-alive ping that the client is gone.
    limits = ClientLimits(silent_s=0.05) if script is two_and_silent else None
    async with live(script, limits=limits) as server:
        _, writer = await server.post(path, {**GENERATING[path], "stream": stream, "model": "tiny"})
        tokens = 2 if script is two_and_silent else 0
        await until(lambda: "silent" in server.engine.info)
        writer.close()
        await until(lambda: caplog.records)
    found = line_of(caplog)
    when = "during" if stream and tokens else "before"
    assert found["outcome"] == f"client disconnected {when} the response"
    assert (found["model"], int(found["done"])) == ("'tiny'", tokens)
    assert int(found["prompt"]) > 0


@runs
async def test_a_client_that_vanishes_in_its_body_is_one_line(caplog):
    async with live() as server:
        _, writer = await server.open()
        writer.write(post("/v1/completions", {"prompt": SECRET})[:-5])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()
        await until(lambda: caplog.records)
    assert line_of(caplog)["outcome"] == "client disconnected before the response"


@pytest.mark.parametrize(
    ("data", "status", "told"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 80, 400, "looks like TLS"),
        (b"hello\r\n\r\n", 400, "invalid_http"),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 20_000, 431, "headers_too_large"),
        (b"GET / HTT", 408, "request_timeout"),
    ],
    ids=["TLS", "words", "long", "slow"],
)
@runs
async def test_what_is_no_request_is_one_line_with_the_address(caplog, data, status, told):
    async with live(header_timeout_s=0.2) as server:
        _, writer = await server.open()
        port = writer.get_extra_info("sockname")[1]
        writer.write(data)
        await until(lambda: caplog.records)
        await asyncio.sleep(0.05)
        (line,) = lines_of(caplog)
    assert line.startswith(f"invalid HTTP request from 127.0.0.1:{port}: {status} ")
    assert told in line


@runs
async def test_a_connection_without_a_request_is_no_line(caplog):
    async with live(header_timeout_s=0.1) as server:
        reader, writer = await server.open()
        assert b" 408 " in await reader.readline()
        writer.close()
    assert lines_of(caplog) == []


@pytest.mark.parametrize("rest", [b"", b"zz\r\n"], ids=["slow", "no chunk"])
@runs
async def test_a_body_that_stalls_or_is_no_body_is_one_line(caplog, rest):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    async with live(header_timeout_s=0.2) as server:
        _, writer = await server.open()
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n" + rest)
        await until(lambda: caplog.records)
        await asyncio.sleep(0.05)
    wanted = "400 invalid_http" if rest else "408 request_timeout"
    assert line_of(caplog)["outcome"] == wanted


@runs
async def test_a_bad_end_of_a_body_does_not_change_why_the_request_was_refused(caplog):
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    async with live(limits=ClientLimits(max_body_bytes=10)) as server:
        reader, writer = await server.open()
        writer.write(head + b"transfer-encoding: chunked\r\n\r\n14\r\n" + b" " * 20 + b"\r\n")
        assert b" 413 " in await reader.readline()
        writer.write(b"zz\r\n")
        await until(lambda: caplog.records)
        await asyncio.sleep(0.05)
    assert line_of(caplog)["outcome"] == "413 request_too_large"


@runs
async def test_a_request_before_the_server_is_ready_is_one_line(caplog):
    listener = __import__("socket").create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    server = StartupServer(listener)
    try:
        for path in ("/health", "/live", "/v1/models", "/"):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET %b HTTP/1.1\r\n\r\n" % path.encode())
            await reader.read()
            writer.close()
    finally:
        server.stop()
        listener.close()
    for path, line in zip(("/v1/models", "/"), lines_of(caplog), strict=True):
        assert line == f"request GET {path}: 503 service_unavailable, the server is not ready"


FORGED = "2026-01-01 00:00:00 ERROR forged"


def test_no_path_model_or_id_can_write_a_line_of_its_own(caplog):
    api = Api()
    api.request("POST", f"/x%0a{FORGED}", content=b"{}", headers=JSON)
    api.complete(model=f"a\n{FORGED}\x1b[2J" + "b" * 5000)
    api.request("GET", "/y", headers={"x-request-id": "a b\x0bc"})
    lines = lines_of(caplog)
    assert len(lines) == 3
    assert all(len(line) < 400 for line in lines)
    assert "a b" not in lines[2]


FLOOD = """
import asyncio, httpx, sys
from cpuserve.base import log
from tests.api.fakes import Api
log.configure()
api = Api()
async def main():
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api.app), base_url="http://t") as c:
        for i in range(3000):
            await c.get(f"/nothing/{i}")
            if i == 2000:
                api.state.stopping = True
                await c.post("/v1/completions", json={"prompt": "x"})
asyncio.run(main())
"""


@pytest.mark.deep
def test_a_flood_is_counted_and_does_not_hide_other_failures():
    done = subprocess.run(
        [sys.executable, "-c", FLOOD], **child_options(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    told = [line for line in lines if ": 404 " in line]
    counts = [int(m[1]) for m in re.finditer(r"INFO (\d+) further lines", done.stderr)]
    assert len(told) + sum(counts) == 3000
    assert BURST <= len(told) < 3000 / 2
    assert len([line for line in lines if ": 503 " in line]) == 1
    assert all(is_record(line) for line in lines)


def test_an_unexpected_error_keeps_its_traceback_and_is_one_line_more(caplog):
    assert Api(breaks).complete().status_code == 500
    assert [r.levelno for r in caplog.records] == [logging.ERROR, logging.WARNING]
