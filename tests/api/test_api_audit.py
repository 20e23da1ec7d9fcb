"""--audit: one line for each request, on disk before the end of its response, or no response."""

import asyncio
import hashlib
import json
import os
import re
import stat
import threading
import time
from contextlib import contextmanager

import msgspec
import openai
import pytest

from cpuserve.api.http import audit_file
from cpuserve.api.http.audit import Audit
from cpuserve.api.http.audit_file import AuditFile
from cpuserve.api.http.records import Records, records_of
from cpuserve.api.lifecycle.model_context import files_fingerprint
from cpuserve.base import fault_points
from cpuserve.base.errors import ConfigError
from cpuserve.config.server import ServerOptions
from cpuserve.serving.models.limits import ClientLimits
from tests.api.fakes import Api, speak
from tests.api.live import live, post
from tests.api.test_api_access_log import tokens_of
from tests.api.test_api_request_log import GENERATING, SECRET
from tests.clients.test_batches import CHAT, data_of, ended, line
from tests.helpers.fake_executor import fake_config
from tests.helpers.full_disk import full_disk
from tests.helpers.patience import PATIENCE_S, until

LONG = 1 << 30


@contextmanager
def audited(path, *, refuses=True, most=LONG):
    """Records with an audit file that is closed at the end."""
    records = Records(audit=Audit(AuditFile(path, most, keeps=refuses), refuses=refuses))
    yield records
    records.close()


def lines_of(path):
    data = path.read_bytes()
    assert SECRET.encode() not in data, "the prompt is in the file"
    assert not data or data.endswith(b"\n")
    return [json.loads(each) for each in data.splitlines()]


def sha(data):
    return hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", GENERATING)
def test_a_response_is_one_line_with_its_tokens_and_digests(tmp_path, path, streams):
    file = tmp_path / "audit"
    body = {**GENERATING[path], "stream": streams}
    with audited(file) as records:
        answer = Api(records=records).post(path, **body)
        (told,) = lines_of(file)  # before the records are closed
    assert answer.status_code == 200
    assert (told["route"], told["status"]) == (path, 200)
    assert told["output_sha256"] == sha(answer.content)
    assert told["input_sha256"] == sha(answer.request.content)
    assert told["id"] == answer.headers["x-request-id"]
    assert told["completion_tokens"] > 0
    assert told["end"] in (["stop"], ["length"])
    if not streams:
        assert (told["prompt_tokens"], told["completion_tokens"]) == tokens_of(path, answer.json())


def test_which_requests_have_a_line(tmp_path):
    file = tmp_path / "audit"
    with audited(file) as records:
        api = Api(records=records)
        for path in ("/health", "/metrics", "/v1/models", "/nowhere"):
            api.get(path)
        assert api.post("/tokenize", prompt=SECRET).status_code == 200
        assert api.post("/v1/embeddings", input=SECRET).status_code == 400
        assert api.complete(temperature="warm").status_code == 400
        found = [(told["route"], told["status"]) for told in lines_of(file)]
    assert found == [
        ("/v1/models", 200), ("/nowhere", 404), ("/tokenize", 200),
        ("/v1/embeddings", 400), ("/v1/completions", 400),
    ]  # fmt: skip


@contextmanager
def held(monkeypatch):
    """Let AuditFile write only after the block; yields the data that it wants to write."""
    go, wants, write = threading.Event(), [], AuditFile._append

    def append(self, data):
        wants.append(data)
        assert go.wait(PATIENCE_S)
        write(self, data)

    monkeypatch.setattr(AuditFile, "_append", append)
    try:
        yield wants
    finally:
        go.set()


# The last event of a stream of each route.
LAST = {
    "/v1/chat/completions": b"data: [DONE]",
    "/v1/completions": b"data: [DONE]",
    "/v1/responses": b"response.completed",
    "/v1/messages": b"message_stop",
    "/api/chat": b'"done":true',
    "/api/generate": b'"done":true',
}


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("path", GENERATING)
def test_the_end_of_a_response_waits_for_the_disk(tmp_path, monkeypatch, path, streams):
    file = tmp_path / "audit"

    async def main():
        async with live(audit=str(file)) as server:
            with held(monkeypatch) as wants:
                reader, _ = await server.post(path, {**GENERATING[path], "stream": streams})
                await until(lambda: wants)
                early = await arrived(reader)
                assert lines_of(file) == []
                assert early if streams else not early
                assert LAST[path] not in early
            received = early
            while LAST[path] not in received if streams else not received:
                received += await asyncio.wait_for(reader.read(1 << 16), PATIENCE_S)
            assert len(lines_of(file)) == 1

    asyncio.run(main())


async def arrived(reader):
    """Return what has arrived at a reader, without waiting for more."""
    for _ in range(50):  # turns of the event loop, in which it reads the socket
        await asyncio.sleep(0)
    return bytes(reader._buffer) and await reader.read(1 << 16)


def test_a_client_that_leaves_has_one_line(tmp_path):
    file = tmp_path / "audit"

    async def main():
        gate = asyncio.Event()

        def script(engine, number, prompt, params):
            outputs = speak(engine, number, prompt, params)
            yield next(outputs)
            yield gate

        # A client that closes is noticed by writing to it, at the latest a ping.
        async with live(script, limits=ClientLimits(silent_s=0.05), audit=str(file)) as server:
            body = {**GENERATING["/v1/chat/completions"], "stream": True}
            reader, writer = await server.post("/v1/chat/completions", body)
            await asyncio.wait_for(reader.readuntil(b'"content"'), PATIENCE_S)
            writer.close()
            await server.until(lambda: lines_of(file))
        (told,) = lines_of(file)
        assert told["outcome"] == "client disconnected during the response"
        assert told["completion_tokens"] == 1
        assert told["end"] == ["abort"]

    asyncio.run(main())


def test_each_line_of_a_batch_has_a_line(tmp_path):
    file = tmp_path / "audit"

    async def main():
        async with live(files_dir=str(tmp_path / "files"), audit=str(file)) as server:
            url = f"http://127.0.0.1:{server.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
                lines = [line(f"n{number}") for number in range(5)]
                sent = await client.files.create(file=data_of(*lines), purpose="batch")
                batch = await client.batches.create(
                    input_file_id=sent.id, endpoint=CHAT, completion_window="24h"
                )
                assert (await ended(client, batch)).request_counts.completed == 5
        told = lines_of(file)
        ran = [each for each in told if each["route"] == CHAT]
        assert len(ran) == len({each["id"] for each in ran}) == 5
        assert all(each["completion_tokens"] > 0 for each in ran)
        assert {each["route"] for each in told} >= {"/v1/files", "/v1/batches"}

    asyncio.run(main())


@pytest.mark.parametrize("streams", [False, True])
def test_a_background_response_has_one_line_at_its_end(tmp_path, streams):
    file = tmp_path / "audit"

    async def main():
        gate = asyncio.Event()

        def script(engine, number, prompt, params):
            yield gate
            yield from speak(engine, number, prompt, params)

        async with live(script, audit=str(file)) as server:
            body = {"input": SECRET, "background": True, "stream": streams}
            reader, _ = await server.post("/v1/responses", body)
            await asyncio.wait_for(reader.readuntil(b"queued"), PATIENCE_S)
            assert lines_of(file) == []
            gate.set()
            await server.until(lambda: lines_of(file))
            await server.until(lambda: server.engine.running == 0)
        (told,) = lines_of(file)
        assert (told["route"], told["status"]) == ("/v1/responses", 200)
        assert told["completion_tokens"] > 0
        assert told["end"] == ["stop"]

    asyncio.run(main())


async def sent(server, path, body):
    """Send a request; return the status and the rest of the response."""
    answer = await server.send(post(path, body, close=True))
    head, _, rest = answer.partition(b"\r\n\r\n")
    return int(head.split(b" ")[1]), rest


CHATS = "/v1/chat/completions"


async def figures_of(server):
    """Return {name: value} of the metrics of the audit file."""
    text = await server.send(b"GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
    found = re.findall(r"^cpuserve:(audit_\w+) (\S+)\r?$", text.decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_requests_fail_while_the_file_cannot_be_written(tmp_path, caplog):
    file = tmp_path / "audit"

    async def main():
        async with live(audit=str(file)) as server:
            assert (await sent(server, CHATS, GENERATING[CHATS]))[0] == 200
            with full_disk():
                status, body = await sent(server, CHATS, GENERATING[CHATS])
                assert (status, json.loads(body)["error"]["code"]) == (503, "audit_unavailable")
                assert "File too large" in json.loads(body)["error"]["message"]
                assert len(server.engine.asked) == 2
                status, body = await sent(server, "/v1/messages", GENERATING["/v1/messages"])
                assert (status, json.loads(body)["type"]) == (503, "error")
                assert len(server.engine.asked) == 2, "a refused request ran"
                get = b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
                health = await server.send(get)
                assert health.startswith(b"HTTP/1.1 503 ")
                assert b"audit file cannot be written" in health
                assert len(lines_of(file)) == 1
                failed = await figures_of(server)
                assert failed["audit_up"] == 0
                assert failed["audit_failures_total"] > 0
            await server.until(lambda: len(lines_of(file)) == 2)
            assert (await figures_of(server))["audit_up"] == 1
            await server.until(lambda: server.state.unhealthy() is None)
            await server.is_sane()
        outcomes = [(told["status"], told["outcome"]) for told in lines_of(file)]
        assert outcomes == [(200, "200"), (503, "503 audit_unavailable"), (200, "200")]

    asyncio.run(main())
    assert "cannot be written: File too large" in caplog.text
    assert "can be written again" in caplog.text


def test_a_stream_that_cannot_be_audited_ends_with_an_error(tmp_path):
    file = tmp_path / "audit"

    async def main():
        async with live(audit=str(file)) as server:
            assert (await sent(server, CHATS, GENERATING[CHATS]))[0] == 200
            with full_disk():
                status, body = await sent(server, CHATS, {**GENERATING[CHATS], "stream": True})
                assert status == 200
                assert b"audit_unavailable" in body
                assert b'"finish_reason":"stop"' in body or b"audit file" in body
            await server.until(lambda: len(lines_of(file)) == 2)
        told = lines_of(file)[1]
        assert told["outcome"] == "503 audit_unavailable during the response"
        assert told["completion_tokens"] > 0

    asyncio.run(main())


def test_requests_are_served_unaudited_if_the_server_may_do_this(tmp_path, caplog):
    file = tmp_path / "audit"

    async def main():
        async with live(audit=str(file), audit_on_failure="log") as server:
            with full_disk():
                for _ in range(3):
                    assert (await sent(server, CHATS, GENERATING[CHATS]))[0] == 200
                await server.until(lambda: caplog.text.count("unaudited request: {") == 3)
            assert server.state.unhealthy() is None
            assert (await sent(server, CHATS, GENERATING[CHATS]))[0] == 200
            await server.until(lambda: len(lines_of(file)) == 1)

    asyncio.run(main())
    assert SECRET not in caplog.text


def test_a_disk_that_hangs_fails_requests(tmp_path, monkeypatch):
    monkeypatch.setattr(audit_file, "LONGEST_S", 0.05)
    file = tmp_path / "audit"

    async def main():
        async with live(audit=str(file)) as server:
            with held(monkeypatch):
                status, body = await sent(server, CHATS, GENERATING[CHATS])
                assert (status, json.loads(body)["error"]["code"]) == (503, "audit_unavailable")
            await server.until(lambda: len(lines_of(file)) == 1)
            await server.until(lambda: server.state.unhealthy() is None)

    asyncio.run(main())


@pytest.mark.parametrize("failure", [MemoryError, ValueError("unexpected")])
def test_the_thread_goes_on_after_any_failure_of_a_write(tmp_path, monkeypatch, failure):
    file, append = tmp_path / "audit", AuditFile._append
    failures = [failure]

    def fails_once(self, data):
        if failures:
            raise failures.pop()
        append(self, data)

    monkeypatch.setattr(AuditFile, "_append", fails_once)

    async def main():
        async with live(audit=str(file)) as server:
            status, body = await sent(server, CHATS, GENERATING[CHATS])
            assert (status, json.loads(body)["error"]["code"]) == (503, "audit_unavailable")
            await server.until(lambda: server.state.unhealthy() is None)
            assert (await sent(server, CHATS, GENERATING[CHATS]))[0] == 200

    asyncio.run(main())
    assert failures == []
    assert len(lines_of(file)) == 2, "the refused request has its line, too"


def test_requests_share_writes(tmp_path, monkeypatch):
    """100 requests at the same time: each has a line, and few of them an fsync of their own."""
    file, calls, fsync = tmp_path / "audit", [], os.fsync
    monkeypatch.setattr(audit_file.os, "fsync", lambda fd: (calls.append(fd), fsync(fd)))

    async def main():
        async with live(audit=str(file)) as server:
            with held(monkeypatch) as wants:
                tasks = [
                    asyncio.create_task(sent(server, CHATS, GENERATING[CHATS])) for _ in range(100)
                ]
                waiting = server.state.records.audit._file
                await until(lambda: wants and len(waiting._waiting) == 100 - wants[0].count(b"\n"))
                calls.clear()
            assert {status for status, _ in await asyncio.gather(*tasks)} == {200}
        told = lines_of(file)
        assert len({each["id"] for each in told}) == len(told) == 100

    asyncio.run(main())
    assert len(calls) <= 2


def test_lines_of_one_turn_of_the_event_loop_share_one_write(tmp_path, monkeypatch):
    calls, fsync = [], os.fsync
    file = AuditFile(tmp_path / "audit", LONG, keeps=True)
    monkeypatch.setattr(audit_file.os, "fsync", lambda fd: (calls.append(fd), fsync(fd)))

    async def write(number):
        time.sleep(0.005)  # as a call of the system: the thread may run meanwhile
        await file.write(b'{"time": "%d"}\n' % number)

    async def main():
        for turns in (1, 2):
            await asyncio.gather(*map(write, range(16)))
            assert len(calls) == turns

    asyncio.run(main())
    file.close()
    assert len(lines_of(tmp_path / "audit")) == 32


def test_a_line_of_a_turn_that_has_not_ended_is_written_at_the_end_of_the_server(tmp_path):
    file = AuditFile(tmp_path / "audit", LONG, keeps=True)

    async def main():
        file.put(b'{"time": "0"}\n')
        file.close()

    asyncio.run(main())
    assert len(lines_of(tmp_path / "audit")) == 1


def test_a_new_file_is_private_and_an_old_one_is_continued(tmp_path, caplog):
    file = tmp_path / "audit"
    for _ in range(2):
        with audited(file) as records:
            assert Api(records=records).complete().status_code == 200
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert len(lines_of(file)) == 2
    assert not caplog.text
    file.chmod(0o644)
    with audited(file):
        pass
    assert "other users can read" in caplog.text


TORN = ['{"time": "2026', '{"ti', "\x00\x00\x00", '{"time": "x", "a": "' + "b" * 5000]


@pytest.mark.parametrize("torn", TORN)
@pytest.mark.parametrize("count", [0, 2])
def test_a_torn_last_line_is_cut_off(tmp_path, caplog, torn, count):
    file = tmp_path / "audit"
    with audited(file) as records:
        for _ in range(count):
            Api(records=records).complete()
    before = file.read_bytes()
    file.write_bytes(before + torn.encode())
    with audited(file) as records:
        assert file.read_bytes() == before
        Api(records=records).complete()
    assert len(lines_of(file)) == count + 1
    assert "was incomplete" in caplog.text


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/null")


def other_file(path):
    path.write_text("root:x:0:0:root:/root:/bin/bash\nuser")


def folder(path):
    path.mkdir()


def nothing(path):
    path.parent.rmdir()


BAD = {
    fifo: "not a regular file", device: "not a regular file", other_file: "not of an audit file",
    folder: "not a regular file", nothing: "No such file",
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_file_that_cannot_be_used_ends_the_start(tmp_path, kind):
    file = tmp_path / "folder" / "audit"
    file.parent.mkdir()
    kind(file)
    with pytest.raises(ConfigError, match=BAD[kind]) as error:
        records_of(ServerOptions(audit=str(file)))
    assert "\n" not in str(error.value)
    if kind is other_file:
        assert file.read_text().endswith("user"), "a file of others was changed"


def test_a_file_of_another_server_is_refused(tmp_path):
    with audited(tmp_path / "audit"), pytest.raises(ConfigError, match="another server uses it"):
        records_of(ServerOptions(audit=str(tmp_path / "audit")))


def test_a_full_file_gets_another_name_and_no_line_is_lost(tmp_path):
    file = tmp_path / "audit"
    with audited(file, most=2000) as records:
        api = Api(records=records)
        ids = [api.complete().headers["x-request-id"] for _ in range(12)]
    parts = sorted(tmp_path.iterdir(), key=lambda part: part.stat().st_mtime_ns)
    assert len(parts) > 3
    assert [told["id"] for part in parts for told in lines_of(part)] == ids
    assert all(stat.S_IMODE(part.stat().st_mode) == 0o600 for part in parts)
    assert all(part.stat().st_size <= 2000 for part in parts)


def test_a_file_that_cannot_be_renamed_goes_on_growing(tmp_path, monkeypatch, caplog):
    def refuse(point, size):
        if point == "audit.rename":
            raise PermissionError(13, "Permission denied")
        return size

    monkeypatch.setattr(fault_points, "_hook", refuse)
    file = tmp_path / "audit"
    with audited(file, most=1000) as records:
        for _ in range(4):
            assert Api(records=records).complete().status_code == 200
    assert len(lines_of(file)) == 4
    assert "cannot be renamed" in caplog.text


def test_logrotate_may_move_or_empty_the_file(tmp_path):
    file, moved = tmp_path / "audit", tmp_path / "audit.1"
    with audited(file) as records:
        api = Api(records=records)
        api.complete()
        file.rename(moved)
        api.complete()
        assert (len(lines_of(file)), len(lines_of(moved))) == (1, 1)
        os.truncate(file, 0)
        api.complete()
        api.complete()
        assert len(lines_of(file)) == 2


def test_lines_at_the_end_of_the_server_are_written_or_logged(tmp_path, caplog):
    file = tmp_path / "audit"
    with audited(file, refuses=False) as records:
        for number in range(50):
            records.audit.put(b'{"time": "%d"}\n' % number)
    assert len(lines_of(file)) == 50
    with full_disk(), audited(file) as records:
        records.audit.put(b'{"time": "lost"}\n')
    assert len(lines_of(file)) == 50
    assert 'unaudited request: {"time": "lost"}' in caplog.text


def test_the_fingerprint_follows_the_files_and_the_settings(tmp_path):
    weights, template = tmp_path / "model.safetensors", tmp_path / "chat.jinja"
    weights.write_bytes(b"a" * 100)
    template.write_text("{{ messages }}")
    config = fake_config(model_path=str(tmp_path), chat_template=str(template))
    before = files_fingerprint(config)
    assert len(before) == 64
    placed = msgspec.structs.replace(config, threads=config.threads + 1, kv_blocks=9)
    assert files_fingerprint(placed) == before
    changes = {"default_sampling": {"temperature": 0.5}, "dtype": "f32", "reasoning_parser": "x"}
    found = {before}
    for name, value in changes.items():
        found.add(files_fingerprint(msgspec.structs.replace(config, **{name: value})))
    template.write_text("{{ messages[0] }}")
    found.add(files_fingerprint(config))
    weights.write_bytes(b"b" * 100)
    found.add(files_fingerprint(config))
    assert len(found) == 2 + len(changes) + 1


def test_a_line_has_the_fingerprint_of_its_model(tmp_path):
    file = tmp_path / "audit"
    with audited(file) as records:
        api = Api(records=records)
        api.context.files_fingerprint = "f" * 64
        api.complete()
        api.get("/v1/models")
        assert [told["fingerprint"] for told in lines_of(file)] == ["f" * 64, None]
