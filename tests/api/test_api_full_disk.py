"""A full disk: requests say so (507), batches wait for space, and nothing accepted is lost."""

import asyncio
import errno
import json
import os
from contextlib import asynccontextmanager

import anthropic
import httpx
import openai
import pytest

from cpuserve.api.stored.disk import DiskError, disk_error, writing
from cpuserve.api.webui import page
from cpuserve.base.errors import ModelError
from tests.api.fakes import Api, speak
from tests.api.live import live
from tests.clients.test_batches import CHAT, data_of, ended, line, results_of
from tests.helpers.full_disk import full_disk
from tests.helpers.patience import PATIENCE_S, until


@asynccontextmanager
async def serving(place, script=speak):
    """A server with files in `place`, with OpenAI's, Anthropic's and a plain client."""
    async with live(script, files_dir=str(place)) as server:
        url = f"http://127.0.0.1:{server.port}"
        options = {"api_key": "none", "max_retries": 0}
        async with (
            openai.AsyncOpenAI(base_url=f"{url}/v1", **options) as client,
            anthropic.AsyncAnthropic(base_url=url, **options) as claude,
            httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
        ):
            yield server, client, claude, http


def gated(gate):
    """A script whose sequences wait until the event `gate` is set."""

    def script(engine, number, prompt, params):
        yield gate
        yield from speak(engine, number, prompt, params)

    return script


async def health(http):
    answer = await http.get("/health")
    return answer.status_code, answer.json() if answer.content else None


async def created(client, *names):
    sent = await client.files.create(file=data_of(*map(line, names)), purpose="batch")
    return await client.batches.create(
        input_file_id=sent.id, endpoint=CHAT, completion_window="24h"
    )


def test_a_batch_waits_while_the_disk_is_full_and_completes_then(tmp_path, caplog):
    async def main():
        gate = asyncio.Event()
        async with serving(tmp_path, gated(gate)) as (server, client, _, http):
            names = [f"n{number}" for number in range(20)]
            batch = await created(client, *names)
            await server.until(lambda: server.engine.running)
            with full_disk():
                gate.set()
                await until(lambda: "running batches failed" in caplog.text)
                status, body = await health(http)
                assert (status, body["status"]) == (200, "degraded")
                assert "--files-dir cannot be written" in body["reasons"]["running batches"]
                shown = await client.batches.retrieve(batch.id)
                assert shown.status == "in_progress"
            batch = await ended(client, batch)
            assert (batch.status, batch.request_counts.completed) == ("completed", 20)
            results = await results_of(client, batch.output_file_id)
            assert sorted(r["custom_id"] for r in results) == sorted(names)
            later = await ended(client, await created(client, "later"))
            assert later.status == "completed"
            while await health(http) != (200, None):
                await asyncio.sleep(0.02)

    asyncio.run(main())


def test_what_a_full_disk_does_not_store_is_507_in_every_dialect(tmp_path):
    async def main():
        gate = asyncio.Event()
        async with serving(tmp_path, gated(gate)) as (server, client, claude, _):
            running, queued = await created(client, "a"), await created(client, "b")
            await server.until(lambda: server.engine.running)
            stored = sorted(path.name for path in tmp_path.rglob("*"))
            params = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
            with full_disk():
                for attempt in (
                    client.files.create(file=data_of(line("c")), purpose="batch"),
                    client.batches.create(
                        input_file_id=queued.input_file_id,
                        endpoint=CHAT,
                        completion_window="24h",
                    ),
                    client.batches.cancel(running.id),
                    client.batches.cancel(queued.id),
                ):
                    with pytest.raises(openai.InternalServerError) as error:
                        await attempt
                    assert error.value.status_code == 507
                    assert error.value.code == "insufficient_storage"
                    assert "--files-dir cannot be written, because" in str(error.value)
                with pytest.raises(anthropic.APIStatusError) as refused:
                    await claude.messages.batches.create(
                        requests=[{"custom_id": "c", "params": params}]
                    )
                assert refused.value.status_code == 507
                assert refused.value.body["error"]["type"] == "api_error"
            assert sorted(path.name for path in tmp_path.rglob("*")) == stored
            # The answers said that nothing is cancelled, so both run.
            gate.set()
            for batch in (running, queued):
                assert (await ended(client, batch)).status == "completed"

    asyncio.run(main())


def test_a_record_that_cannot_be_written_changes_no_memory(tmp_path):
    async def main():
        gate = asyncio.Event()
        async with serving(tmp_path, gated(gate)) as (server, client, *_):
            batch = await created(client, "a")
            await server.until(lambda: server.engine.running)
            with full_disk(), pytest.raises(openai.InternalServerError):
                await client.batches.cancel(batch.id)
            shown = (await client.batches.retrieve(batch.id)).status
            on_disk = json.loads((tmp_path / f"batches/{batch.id}.json").read_bytes())
            assert shown == on_disk["batch"]["status"] == "in_progress"

    asyncio.run(main())


def test_a_line_that_was_cut_by_a_full_disk_does_not_damage_the_next(tmp_path, monkeypatch):
    """The file has room for a part of a line; other lines are written before the run ends."""
    wrote = []
    write = os.write

    def cut(handle, data):
        wrote.append(len(data))
        if len(wrote) == 2:
            write(handle, bytes(data)[:10])
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(handle, data)

    async def main():
        async with serving(tmp_path) as (_, client, _, _):
            sent = await client.files.create(
                file=data_of(*(line(f"n{number}") for number in range(12))), purpose="batch"
            )
            monkeypatch.setattr("cpuserve.api.batches.directory.os.write", cut)
            batch = await client.batches.create(
                input_file_id=sent.id, endpoint=CHAT, completion_window="24h"
            )
            batch = await ended(client, batch)
            results = await results_of(client, batch.output_file_id)
            assert sorted(r["custom_id"] for r in results) == sorted(f"n{n}" for n in range(12))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "its disk is full"),
        (errno.EDQUOT, "quota"),
        (errno.EROFS, "its disk is read-only"),
        (errno.EFBIG, "larger than the system allows"),
        (errno.EIO, "error"),
    ],
)
def test_errors_of_the_disk_say_the_reason(number, reason):
    cause = OSError(number, os.strerror(number))
    with pytest.raises(DiskError, match=reason) as raised, writing("--files-dir"):
        raise cause
    assert raised.value.status == 507
    wrapped = ModelError("the download failed")
    wrapped.__cause__ = cause
    assert reason in str(disk_error(wrapped))


def test_other_errors_of_the_system_stay_what_they_are():
    with pytest.raises(FileNotFoundError), writing("--files-dir"):
        raise FileNotFoundError(errno.ENOENT, "No such file")
    assert disk_error(ValueError("x")) is None


def test_the_page_of_a_disk_with_an_error_says_that_it_cannot_be_read_or_written(monkeypatch):
    """An error of the disk may come from a read, and a full disk only from a write."""
    for number, can in ((errno.EIO, "used"), (errno.ENOSPC, "written")):

        def broken(*_, number=number):
            raise OSError(number, os.strerror(number))

        page.page_files.cache_clear()  # another test may have read the page
        monkeypatch.setattr(page, "fault", broken)
        answer = Api(webui=True).get("/")
        assert answer.status_code == 507
        assert f"cannot be {can}, because its disk" in answer.text
