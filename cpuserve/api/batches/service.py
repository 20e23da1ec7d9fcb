"""BatchService: runs the batches of a FileDirectory, and resumes after a restart.

The batches of one owner run one after the other, and batches of several owners side by side.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from cpuserve.api.batches.directory import FileDirectory, UploadFacts
from cpuserve.api.batches.line_runner import LineResult, LineRunner, result_id
from cpuserve.api.batches.lines import (
    EXPIRED,
    BatchLine,
    LineError,
    check_lines,
    expired,
    read_lines,
)
from cpuserve.api.batches.part_uploads import PartUploads
from cpuserve.api.stored.disk import DiskError, limit_error, writing
from cpuserve.api.stored.owned_folder import open_plain, write_all
from cpuserve.api.stored.quota import Quota
from cpuserve.base.errors import InvalidRequest, NotFound
from cpuserve.base.fault_points import fault
from cpuserve.base.ids import guarding_id
from cpuserve.base.log import get_logger
from cpuserve.serving.callers.slots import TurnSlots
from cpuserve.serving.threads import WORKS_FOR, run_on_disk, run_waiting

if TYPE_CHECKING:
    from starlette.types import ASGIApp

log = get_logger("serve")

WINDOW_S = 24 * 3600
# How many lines of one caller's batches run at the same time: few, so that other requests are not
# delayed. At most as many batches run side by side, each of another caller.
MOST_RUNNING = 8
_ENDED = ("completed", "failed", "cancelled", "expired")
# Changes of the status that come too late: the batch is being cancelled, or has no lines left.
_TOO_LATE = {
    ("cancelling", "in_progress"),
    ("cancelling", "finalizing"),
    ("finalizing", "cancelling"),
}


class BatchErrors(msgspec.Struct):
    """The reasons why a whole batch failed."""

    data: list[LineError]
    object: str = "list"


class RequestCounts(msgspec.Struct):
    """The number of lines of a batch, and how many of them have completed or failed."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch, as responses show it."""

    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchRecord(msgspec.Struct, kw_only=True):
    """The state of a batch on disk.

    caller: the owner of the batch (Caller.owner).
    output, errors: the ids of the files with results and with errors.
    owns_files: whether the input and result files belong to the batch:
      no list of files shows them, and they are deleted together with the batch.
    expired: how many failed lines were not reached before the completion window ended.
    outputs_last_s: the seconds until the files with results expire; None = they stay.
    """

    caller: str
    batch: BatchObject
    output: str
    errors: str
    owns_files: bool = False
    expired: int = 0
    outputs_last_s: int | None = None

    @property
    def ended(self) -> bool:
        """Whether the batch has a final status, so that no more lines run."""
        return self.batch.status in _ENDED

    @property
    def contents(self) -> tuple[str, str, str]:
        """The ids of the input file, the output file and the error file."""
        return self.batch.input_file_id, self.output, self.errors


@dataclass(frozen=True, slots=True)
class BatchKind:
    """The batches of one API. prefix: the prefix of their ids. path: the route that lists them."""

    prefix: str
    path: str


FILE_BATCHES = BatchKind("batch_", "/v1/batches")
MESSAGE_BATCHES = BatchKind("msgbatch_", "/v1/messages/batches")


class BatchService:
    """Creates, runs and lists the batches of all clients."""

    def __init__(self, directory: FileDirectory, longest_line: Callable[[], int]) -> None:
        """longest_line: a function that returns the maximum length of a line in bytes."""
        self.directory = directory
        directory.is_read = self.uses
        self.uploads = PartUploads(directory)
        self._longest_line = longest_line
        self._records = {found.batch.id: found for found in directory.records(BatchRecord)}
        for found in self._records.values():
            if (owner := directory.callers.current_owner(found.caller)) != found.caller:
                found.caller = owner
                directory.adopt(found.batch.id, found)
        directory.keep_only(
            {
                name: found.caller
                for found in self._records.values()
                if found.owns_files or not found.ended
                for name in found.contents
            }
        )
        self._adding: list[BatchRecord] = []  # batches that are being written for the first time
        self._changing = asyncio.Lock()  # held while the status of a batch is written
        self._recounting = asyncio.Lock()
        self._waiting = asyncio.Event()
        self._running: dict[str, tuple[BatchRecord, asyncio.Task[None]]] = {}  # by owner
        self._slots = TurnSlots(2 * MOST_RUNNING - 1)  # a single caller has MOST_RUNNING

    async def create(
        self,
        caller: str,
        endpoint: str,
        input_file: str,
        metadata: dict[str, str] | None,
        outputs_last_s: int | None = None,
    ) -> BatchObject:
        """Add a batch to the queue; outputs_last_s: see BatchRecord.

        Raises:
          NotFound: the caller has no such input file.
          InvalidRequest: the file has another purpose, or there is no room for another batch.
        """
        purpose = self.directory.find(caller, input_file, "input_file_id").file.purpose
        if purpose != "batch":
            msg = f"File {input_file!r} has the purpose {purpose}: upload it with the purpose batch"
            raise InvalidRequest(msg, param="input_file_id")
        self._make_room(caller)
        made = self._new(FILE_BATCHES, endpoint, input_file, RequestCounts(), metadata)
        record = self._record(caller, made)
        record.outputs_last_s = outputs_last_s
        return (await self._add(record)).batch

    async def create_of_lines(
        self, kind: BatchKind, caller: str, endpoint: str, lines: Sequence[bytes]
    ) -> BatchRecord:
        """Add a batch of `lines`, which are stored in a file that the batch owns; see `create`.

        Raises:
          InvalidRequest: the server stores too many bytes of files, or too many batches.
          DiskError: the lines cannot be written.
        """
        self._make_room(caller)
        name = self.directory.begin(caller, counts=False)
        made = self._new(kind, endpoint, name, RequestCounts(len(lines)))
        try:
            self.directory.grow(name, sum(map(len, lines)))
            record = self._record(caller, made, owns_files=True)
            return await self._add(record, lines)
        except BaseException:
            self.directory.remove(name)
            raise

    def _make_room(self, caller: str) -> None:
        """Delete an ended batch from the records if a caller has no room for another batch.

        It is the oldest of the caller, or the oldest of all if the caller has its share to claim.
        A batch that owns its files is never deleted here, because its results would be lost.
        """
        quota = Quota(self.directory.max_files, self.directory.owners)
        for record in self._all():
            quota.add(record.caller, 1)
        if quota.room(caller) > 0:
            return
        known = self._records.values()
        dropped = [r for r in known if r.ended and not r.owns_files]
        own = [r for r in dropped if r.caller == caller]
        oldest = next(iter(own), None)
        if oldest is None and quota.is_below_share(caller):
            oldest = next(iter(dropped), None)
        if oldest is None:
            msg = f"{len(self._records)} batches have not ended: wait for one, or cancel one"
            if any(found.ended for found in known):
                msg = f"the server has {len(self._records)} batches: delete one that has ended"
            raise InvalidRequest(msg, code="batches_full")
        self._forget(oldest)

    def _new(
        self,
        kind: BatchKind,
        endpoint: str,
        input_file: str,
        counts: RequestCounts,
        metadata: dict[str, str] | None = None,
    ) -> BatchObject:
        now = int(time.time())
        return BatchObject(
            id=guarding_id(kind.prefix),
            endpoint=endpoint,
            input_file_id=input_file,
            completion_window="24h",
            created_at=now,
            expires_at=now + WINDOW_S,
            request_counts=counts,
            metadata=metadata,
        )

    def _record(self, caller: str, made: BatchObject, *, owns_files: bool = False) -> BatchRecord:
        names = [self.directory.begin(caller, counts=False) for _ in range(2)]
        return BatchRecord(
            caller=caller, batch=made, output=names[0], errors=names[1], owns_files=owns_files
        )

    def _all(self) -> list[BatchRecord]:
        return [*self._records.values(), *self._adding]

    async def _add(self, record: BatchRecord, lines: Sequence[bytes] = ()) -> BatchRecord:
        """Write a new batch to disk, and put it into the queue.

        lines: the content of its input file; none = a client has uploaded it.
        """
        self._adding.append(record)
        try:
            if lines:
                await self.directory.write(record.batch.input_file_id, lines)
            await self.directory.save(record.batch.id, record)
        except BaseException:
            self.directory.delete_record(record.batch.id)
            for name in (record.output, record.errors):
                self.directory.remove(name)
            raise
        finally:
            self._adding.remove(record)
        self._records[record.batch.id] = record
        self._waiting.set()
        return record

    def _forget(self, record: BatchRecord) -> None:
        self.directory.delete_record(record.batch.id)
        del self._records[record.batch.id]
        if record.owns_files:
            for name in record.contents:
                self.directory.remove(name)

    def find(self, caller: str, batch_id: str, kind: BatchKind = FILE_BATCHES) -> BatchRecord:
        """Return the caller's batch of this kind with this id; NotFound if there is none."""
        found = self._records.get(batch_id)
        if found is None or found.caller != caller or not batch_id.startswith(kind.prefix):
            msg = f"Batch {batch_id[:80]!r} was not found: GET {kind.path} lists your batches"
            raise NotFound(msg, param="batch_id", code="batch_not_found")
        return found

    def batches(self, caller: str, kind: BatchKind = FILE_BATCHES) -> list[BatchRecord]:
        """Return the batches of a caller, oldest first."""
        known = self._records.values()
        own = [r for r in known if r.caller == caller and r.batch.id.startswith(kind.prefix)]
        return sorted(own, key=lambda found: found.batch.created_at)

    def uses(self, file_id: str) -> bool:
        """Return whether a batch that has not ended reads this file."""
        return any(
            found.batch.input_file_id == file_id and not found.ended for found in self._all()
        )

    async def cancel(
        self, caller: str, batch_id: str, kind: BatchKind = FILE_BATCHES
    ) -> BatchRecord:
        """Cancel a batch; the results of the lines that have ended are kept.

        Raises:
          InvalidRequest: all lines of the batch have ended.
          DiskError: the record cannot be written; the batch is not cancelled.
        """
        found = self.find(caller, batch_id, kind)
        if not await self._set(found, "cancelling"):
            msg = f"Batch {batch_id!r} is {found.batch.status}, so it cannot be cancelled"
            raise InvalidRequest(msg, param="batch_id")
        running = self._running.get(caller)
        if running is not None and running[0] is found:
            running[1].cancel()
        else:  # this batch waits in the queue
            try:
                await self._recount(found)
                await self._end(found, "cancelled")
            except DiskError as error:  # the runner ends it later
                log.error("batch %s cannot be ended now: %s", batch_id, error)
                self._waiting.set()
        return found

    def delete(self, caller: str, batch_id: str, kind: BatchKind) -> None:
        """Delete a batch with the files that it owns.

        Raises:
          InvalidRequest: the batch has not ended.
        """
        found = self.find(caller, batch_id, kind)
        if not found.ended:
            msg = f"Batch {batch_id!r} has not ended: cancel it, and delete it then"
            raise InvalidRequest(msg, param="batch_id")
        self._forget(found)

    async def run(self, app: ASGIApp) -> None:
        """Run batches until this task is cancelled. app: the ASGI app that serves the endpoints.

        Raises:
          DiskError, ServiceUnavailable: results or records cannot be written, or the system
            refuses files or memory. No batch has failed because of this: the next call goes on
            with the same batches.
        """
        try:
            while True:
                self._waiting.clear()
                self._start(app)
                await self._waiting.wait()
                ended = [(name, *had) for name, had in self._running.items() if had[1].done()]
                for owner, record, work in ended:
                    del self._running[owner]
                    await self._settle(record, work)
        finally:  # the server stops, and resumes the batches at its next start
            works = [work for _, work in self._running.values()]
            self._running.clear()
            for work in works:
                work.cancel()
            await asyncio.gather(*works, return_exceptions=True)

    def _start(self, app: ASGIApp) -> None:
        """Start the oldest batch of each owner that has none running."""
        waiting = [found for found in self._records.values() if not found.ended]
        for record in sorted(waiting, key=lambda found: found.batch.created_at):
            if record.caller not in self._running and len(self._running) < MOST_RUNNING:
                work = asyncio.create_task(self._run(app, record))
                work.add_done_callback(lambda _: self._waiting.set())
                self._running[record.caller] = record, work

    async def _settle(self, record: BatchRecord, work: asyncio.Task[None]) -> None:
        """Set the final status of a batch after its task has ended; see `run` for errors."""
        if not work.cancelled() and (error := work.exception()) is not None:
            if isinstance(error, DiskError):
                raise error
            if (limited := limit_error(error)) is not None:
                raise limited from error
            message = error.strerror if isinstance(error, OSError) else str(error)
            log.error("batch %s failed: %s", record.batch.id, message)
            await self._end(record, "failed", [LineError("batch_failed", str(message))])
        elif record.batch.status == "cancelling":
            await self._end(record, "cancelled")

    async def _run(self, app: ASGIApp, record: BatchRecord) -> None:
        batch, directory = record.batch, self.directory
        WORKS_FOR.set(record.caller)
        if batch.status == "cancelling":
            await self._recount(record)
            return
        longest = self._longest_line()
        path = directory.path_of(batch.input_file_id)
        with os.fdopen(open_plain(path), "rb") as source:
            urls = (batch.endpoint,)
            total, errors = await run_waiting(lambda: check_lines(source, urls, longest))
            if errors:
                await self._end(record, "failed", errors)
                return
            batch.request_counts = RequestCounts(total)
            if not await self._set(record, "in_progress"):
                return
            source.seek(0)
            results = await _Results.opened(directory, record)
            try:
                lines = self._left(record, source, results.done)
                sender = partial(directory.callers.of_owner, record.caller)
                runner = LineRunner(
                    app, sender, batch.id, until=batch.expires_at, slots=self._slots
                )
                await runner.run(lines, results.write, most=MOST_RUNNING)
            finally:
                await run_on_disk(results.close)
        if await self._set(record, "finalizing"):
            expired = time.time() >= batch.expires_at
            await self._end(record, "expired" if expired else "completed")

    def _left(self, record: BatchRecord, source: BinaryIO, done: set[str]) -> Iterator[BatchLine]:
        """Yield the lines without a result, with an error if the completion window has ended."""
        batch = record.batch
        for line in read_lines(source, (batch.endpoint,), self._longest_line()):
            if result_id(batch.id, line.number) in done:
                continue
            if time.time() >= batch.expires_at:
                line.error = expired()
            yield line

    async def _recount(self, record: BatchRecord) -> None:
        """Count the results that an earlier server process wrote for this batch."""
        async with self._recounting:  # a client and the runner may end a batch at the same time
            if record.ended:  # it may be deleted already
                return
            results = await _Results.opened(self.directory, record)
            await run_on_disk(results.close)

    async def _end(
        self, record: BatchRecord, status: str, errors: list[LineError] | None = None
    ) -> None:
        """Make files of the results that clients can read, and set the final status.

        errors: why the whole batch failed.
        """
        batch, directory = record.batch, self.directory
        shown: dict[str, Any] = {"errors": BatchErrors(errors)} if errors else {}
        for name, suffix in ((record.output, "output"), (record.errors, "error")):
            path = directory.path_of(name)
            if record.owns_files:
                continue
            if not path.exists() or path.stat().st_size == 0:
                directory.remove(name)
                continue
            filename = f"{batch.id}_{suffix}.jsonl"
            facts = UploadFacts(filename, "batch_output", lasts_s=record.outputs_last_s)
            await directory.add(record.caller, name, facts)
            shown[f"{suffix}_file_id"] = name
        await self._set(record, status, **shown)

    async def _set(self, record: BatchRecord, status: str, **more: Any) -> bool:
        """Set the status and more fields of a batch, on disk before in memory.

        Returns whether the batch has the status now. A client may have cancelled the batch, or all
        its lines may have ended, while another change was being written.
        """
        async with self._changing:
            if status == record.batch.status:
                return True
            if record.ended or (record.batch.status, status) in _TOO_LATE:
                return False
            now = {"status": status, f"{status}_at": int(time.time())}
            changed = msgspec.structs.replace(record.batch, **now, **more)
            try:
                written = msgspec.structs.replace(record, batch=changed)
                await self.directory.save(changed.id, written)
            except asyncio.CancelledError:  # the disk has the record
                record.batch = changed
                raise
            record.batch = changed
            return True


class _Results:
    """Appends results to the output file and the error file of a batch.

    done: the ids of the results that have been written.
    """

    def __init__(self, directory: FileDirectory, record: BatchRecord) -> None:
        self.done: set[str] = set()
        self._directory = directory
        self._record = record
        self._counts = RequestCounts(record.batch.request_counts.total)
        self._expired = 0
        self._removed: dict[str, int] = {}  # bytes of each file
        self._outputs = self._errors = -1

    @classmethod
    async def opened(cls, directory: FileDirectory, record: BatchRecord) -> _Results:
        """Open the files of a batch, and count the results that they have; DiskError if not."""
        results = cls(directory, record)
        for name in (record.output, record.errors):
            directory.resume(name, record.caller)
        try:
            await run_on_disk(results._open)
        except asyncio.CancelledError:
            results._show_counts()
            await run_on_disk(results.close)
            raise
        finally:
            for name, num_bytes in results._removed.items():
                directory.shrink(name, num_bytes)
        results._show_counts()
        return results

    def _show_counts(self) -> None:
        """Show the counts of the files in the record; later results change them there."""
        found, self._counts = self._counts, self._record.batch.request_counts
        self._counts.completed, self._counts.failed = found.completed, found.failed
        self._record.expired = self._expired

    def _open(self) -> None:
        with writing("--files-dir"), ExitStack() as undo:
            self._outputs = self._opened(self._record.output, undo)
            self._errors = self._opened(self._record.errors, undo)
            undo.pop_all()

    def write(self, result: LineResult) -> None:
        """Append a result with its line in one piece, so that a killed server leaves whole lines.

        Raises:
          InvalidRequest: the stored files would exceed --files-bytes.
          DiskError: the line cannot be written.
        """
        data = msgspec.json.encode(result) + b"\n"
        name = self._record.output if result.succeeded else self._record.errors
        handle = self._outputs if result.succeeded else self._errors
        self._directory.grow(name, len(data))
        before = os.fstat(handle).st_size
        with writing("--files-dir"):
            try:
                write_all(handle, data)
            except OSError:
                try:
                    fault("content.cut")
                    os.ftruncate(handle, before)  # other workers may write lines before they end
                finally:
                    written = os.fstat(handle).st_size - before
                    self._directory.shrink(name, len(data) - written)
                raise
        self._count(result)
        self._record.expired = self._expired

    def close(self) -> None:
        """Flush both files to disk, and close them; DiskError if the disk does not take all."""
        handles = self._outputs, self._errors
        with writing("--files-dir"), ExitStack() as closing:
            for handle in handles:
                closing.callback(os.close, handle)
            for handle in handles:
                fault("content.sync")
                os.fsync(handle)

    def _count(self, result: LineResult) -> None:
        self.done.add(result.id)
        self._counts.completed += result.succeeded
        self._counts.failed += not result.succeeded
        self._expired += result.error is not None and result.error.code == EXPIRED

    def _opened(self, name: str, undo: ExitStack) -> int:
        """Open a file for appending, and remove an incomplete or damaged line with all after it.

        undo: closes the file again.
        """
        path = self._directory.path_of(name)
        handle = open_plain(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        undo.callback(os.close, handle)
        end = 0
        with os.fdopen(os.dup(handle), "rb") as known:
            for data in known:
                try:
                    result = msgspec.json.decode(data, type=LineResult)
                except msgspec.DecodeError:
                    break
                if not data.endswith(b"\n"):
                    break
                end += len(data)
                self._count(result)
        removed = os.fstat(handle).st_size - end
        os.ftruncate(handle, end)
        self._removed[name] = removed
        return handle
