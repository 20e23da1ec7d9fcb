"""A slow disk delays the batches whose records it writes, and not the event loop."""

import asyncio
import json
import os
import threading

import msgspec
import pytest

from cpuserve.api.batches.directory import FileDirectory, UploadFacts
from cpuserve.api.batches.line_runner import LineResult
from cpuserve.api.batches.service import FILE_BATCHES, MESSAGE_BATCHES, BatchService
from cpuserve.base.errors import InvalidRequest
from tests.helpers.patience import PATIENCE_S


@pytest.fixture
def service(tmp_path):
    directory = FileDirectory(str(tmp_path), 10_000, 3)
    yield BatchService(directory, lambda: 1000)
    directory.close()


class SlowDisk:
    """Holds each fsync until the event loop lets it go on; a test fails if the loop runs one.

    on_loop: how many the loop has run.

    call: another function of `os` that it holds instead.
    """

    def __init__(self, monkeypatch, call="fsync"):
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)
        self.on_loop = 0
        self._call = getattr(os, call)
        monkeypatch.setattr(os, call, self._slow)

    def _slow(self, *given):
        self.begun.release()
        if threading.current_thread() is threading.main_thread():
            self.on_loop += 1
        else:
            assert self.go_on.acquire(timeout=PATIENCE_S)
        self._call(*given)

    async def let(self, count=1):
        """Wait until `count` calls have begun, one after the other, and let each go on."""
        for _ in range(count):
            await self.has_begun()
            self.go_on.release()

    async def has_begun(self):
        while not self.begun.acquire(blocking=False):
            await asyncio.sleep(0.001)


def on_disk(tmp_path, name):
    return json.loads((tmp_path / "batches" / f"{name}.json").read_bytes())["batch"]["status"]


def made_of_a_line(service):
    return service.create_of_lines(MESSAGE_BATCHES, "me", "/v1/messages", [b"{}\n"])


def test_the_event_loop_goes_on_while_files_and_records_are_written(service, tmp_path, monkeypatch):
    disk = SlowDisk(monkeypatch)

    async def main():
        made = asyncio.create_task(made_of_a_line(service))
        await disk.let(2)  # the lines, and the record
        name = (await made).batch.id
        cancelled = asyncio.create_task(service.cancel("me", name, MESSAGE_BATCHES))
        await disk.let(4)  # cancelling, two files of results, and cancelled
        assert (await cancelled).batch.status == on_disk(tmp_path, name) == "cancelled"

        directory = service.directory
        file_id = directory.begin("me")
        directory.path_of(file_id).write_bytes(b"{}")
        added = asyncio.create_task(directory.add("me", file_id, UploadFacts("a", "batch")))
        await disk.let()
        made_file = await added
        assert [each.file for each in directory.files("me")] == [made_file]

    asyncio.run(main())
    assert disk.on_loop == 0


def test_the_event_loop_goes_on_while_the_results_of_an_earlier_process_are_read(
    service, monkeypatch
):
    directory = service.directory
    whole = msgspec.json.encode(LineResult("a", "b", response=None, error=None)) + b"\n"
    damaged = b'{"id": "c", "cus'

    async def main():
        record = await made_of_a_line(service)
        path = directory.path_of(record.output)
        used = directory.used_bytes()
        path.write_bytes(whole + damaged)
        directory.grow(record.output, len(whole + damaged))
        disk = SlowDisk(monkeypatch, "ftruncate")
        counting = [asyncio.create_task(service._recount(record)) for _ in range(2)]
        await disk.let(4)  # the output and the errors, for each
        await asyncio.gather(*counting)
        assert disk.on_loop == 0
        counts = record.batch.request_counts
        assert (counts.completed, counts.failed) == (0, 1)
        assert path.read_bytes() == whole
        assert directory.used_bytes() == used + len(whole)

        path.write_bytes(2 * whole + damaged)
        directory.grow(record.output, len(whole + damaged))
        counting = asyncio.create_task(service._recount(record))
        await disk.has_begun()
        counting.cancel()
        for _ in range(2):
            disk.go_on.release()
        with pytest.raises(asyncio.CancelledError):
            await counting
        counts = record.batch.request_counts
        assert (counts.completed, counts.failed) == (0, 2)
        assert directory.used_bytes() == used + 2 * len(whole)

    asyncio.run(main())


def test_a_batch_that_is_being_written_counts_as_one_and_uses_its_file(service, monkeypatch):
    disk = SlowDisk(monkeypatch)
    directory = service.directory

    async def main():
        file_id = directory.begin("me")
        directory.path_of(file_id).write_bytes(b"{}")
        added = asyncio.create_task(directory.add("me", file_id, UploadFacts("a", "batch")))
        await disk.let()
        await added
        creating = [
            asyncio.create_task(service.create("me", "/v1/completions", file_id, None))
            for _ in range(3)
        ]
        await disk.has_begun()
        assert service.batches("me", FILE_BATCHES) == []
        assert service.uses(file_id)
        with pytest.raises(InvalidRequest, match="have not ended"):
            await service.create("me", "/v1/completions", file_id, None)
        disk.go_on.release()
        await disk.let(2)
        await asyncio.gather(*creating)
        assert len(service.batches("me", FILE_BATCHES)) == 3

    asyncio.run(main())


def test_a_client_that_leaves_while_its_batch_is_written_leaves_nothing(
    service, tmp_path, monkeypatch
):
    disk = SlowDisk(monkeypatch)

    async def main():
        made = asyncio.create_task(made_of_a_line(service))
        await disk.let()
        await disk.has_begun()  # the record
        made.cancel()
        await asyncio.sleep(0.01)
        assert not made.done()
        disk.go_on.release()
        with pytest.raises(asyncio.CancelledError):
            await made
        assert service.batches("me", MESSAGE_BATCHES) == []

    asyncio.run(main())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "lock"]
    assert service.directory.used_bytes() == 0


def test_memory_has_the_status_that_the_disk_took_before_a_task_was_cancelled(
    service, tmp_path, monkeypatch
):
    async def main():
        name = (await made_of_a_line(service)).batch.id
        disk = SlowDisk(monkeypatch)
        cancelling = asyncio.create_task(service.cancel("me", name, MESSAGE_BATCHES))
        await disk.has_begun()
        cancelling.cancel()
        disk.go_on.release()
        with pytest.raises(asyncio.CancelledError):
            await cancelling
        found = service.find("me", name, MESSAGE_BATCHES)
        assert found.batch.status == on_disk(tmp_path, name) == "cancelling"

    asyncio.run(main())


def test_a_batch_cannot_be_cancelled_once_its_last_line_has_ended(service, tmp_path, monkeypatch):
    async def main():
        record = await made_of_a_line(service)
        disk = SlowDisk(monkeypatch)
        finalizing = asyncio.create_task(service._set(record, "finalizing"))
        await disk.has_begun()
        late = asyncio.create_task(service.cancel("me", record.batch.id, MESSAGE_BATCHES))
        await asyncio.sleep(0.01)
        disk.go_on.release()
        assert await finalizing
        with pytest.raises(InvalidRequest, match="is finalizing, so it cannot be cancelled"):
            await late
        assert on_disk(tmp_path, record.batch.id) == "finalizing"

    asyncio.run(main())


def test_a_batch_is_finalized_no_more_once_a_client_has_cancelled_it(service, monkeypatch):
    async def main():
        record = await made_of_a_line(service)
        disk = SlowDisk(monkeypatch)
        cancelling = asyncio.create_task(service._set(record, "cancelling"))
        await disk.has_begun()
        late = asyncio.create_task(service._set(record, "finalizing"))
        await asyncio.sleep(0.01)
        disk.go_on.release()
        assert await cancelling
        assert not await late
        assert record.batch.status == "cancelling"

    asyncio.run(main())
