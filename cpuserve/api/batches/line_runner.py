"""Run the requests of a batch file, and write a result for each line.

LineRunner runs them with low priority, and run_file without a server, in the order of lines.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from cpuserve.api.batches.lines import (
    ENDPOINTS,
    BatchLine,
    LineError,
    check_lines,
    expired,
    read_lines,
)
from cpuserve.api.errors.record import RECORD, RequestRecord
from cpuserve.api.request.headers import CALLER, LOW_PRIORITY
from cpuserve.base.errors import ConfigError, EngineDead, NotServing, ServiceUnavailable
from cpuserve.serving.callers.allowance import LimitReached
from cpuserve.serving.callers.caller import Caller
from cpuserve.serving.callers.slots import TurnSlots
from cpuserve.serving.threads import WORKS_FOR

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message


# How often a line runs again after its engine has ended, and after other refusals with 503.
_MOST_DEATHS = _MOST_REFUSALS = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# How long a line waits at most for a limit of its caller, which a reload of its file may raise.
_LONGEST_WAIT_S = 5.0


class LineResponse(msgspec.Struct):
    """The HTTP response to the request of one line, as the endpoint sent it."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineResult(msgspec.Struct):
    """A line of an output or error file. id: derived from the batch and the input line number."""

    id: str
    custom_id: str | None
    response: LineResponse | None
    error: LineError | None

    @property
    def succeeded(self) -> bool:
        """Whether the result belongs in the output file rather than in the error file."""
        return self.response is not None and self.response.status_code < 400


# A function that is called with the result of each line, when its request has ended.
Write = Callable[[LineResult], None]


def result_id(batch: str, number: int) -> str:
    """Return the id of the result of line `number`; it is the same in each run of the batch."""
    return f"batch_req_{batch}_{number}"


class LineRunner:
    """Runs lines of one batch as requests to the app.

    A line waits while no engine serves. A line that was running when its engine ended may have
    caused this, so it runs again, _MOST_DEATHS times at most, and never beside another such line:
    otherwise a line that ends every engine would use up the tries of the lines beside it.
    """

    def __init__(
        self,
        app: ASGIApp,
        sender: Callable[[], Caller],
        batch: str,
        *,
        until: float = math.inf,
        slots: TurnSlots | None = None,
    ) -> None:
        """app: the ASGI app that serves the endpoints.

        sender: returns who owns the batch; a reload of --api-key-file may change its limits.
        batch: the id of the batch.
        until: the end of the completion window, as time.time(): lines that still wait then expire.
        slots: the slots that the lines of all batches share, in turns of WORKS_FOR that cost the
          bytes of a line; None = as many as run() may use.
        """
        self._app = app
        self._sender = sender
        self._batch = batch
        self._until = until
        self._slots = slots
        self._suspects = asyncio.Lock()
        self._ended = False

    async def run(self, lines: Iterable[BatchLine], write: Write, *, most: int) -> None:
        """Run the requests of `lines`, at most `most` at the same time; write their results.

        The first error that `write` raises ends the run; a cancelled run writes no more results.
        """
        source: Iterator[BatchLine] = iter(lines)

        async def work() -> None:
            for line in source:
                size, slots = float(len(line.body)), self._slots
                async with slots.slot(WORKS_FOR.get(), size) if slots else nullcontext():
                    result = await self._result(line)
                write(result)

        workers = [asyncio.create_task(work()) for _ in range(most)]
        try:
            done, _ = await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
            for worker in done:
                worker.result()
        finally:
            # A worker may miss the cancellation: before Python 3.12, asyncio.wait_for drops one
            # that comes together with its result.
            self._ended = True
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _result(self, line: BatchLine) -> LineResult:
        name = result_id(self._batch, line.number)
        if line.error is not None:
            await asyncio.sleep(0)
            return LineResult(name, line.custom_id, None, line.error)
        tried = _Tried()
        while True:
            async with self._suspects if tried.deaths else nullcontext():
                request_id = uuid.uuid4().hex
                status, body, error = await self._respond(line, request_id)
            if self._ended:
                raise asyncio.CancelledError
            if tried.is_final(status, error):
                response = LineResponse(status, request_id, msgspec.Raw(body or b"null"))
                return LineResult(name, line.custom_id, response, None)
            if time.time() >= self._until:
                return LineResult(name, line.custom_id, None, expired())
            await asyncio.sleep(tried.pause_s(error))

    async def _respond(
        self, line: BatchLine, request_id: str
    ) -> tuple[int, bytes, BaseException | None]:
        """Return the status, the body and the error of the app's response to a line's request."""
        status, body = 500, bytearray()
        told = asyncio.Event()
        messages: list[Message] = [{"type": "http.request", "body": line.body, "more_body": False}]

        async def receive() -> Message:
            if messages:
                return messages.pop()
            await told.wait()  # a batch has no client that could disconnect
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                body.extend(message.get("body", b""))

        record = RequestRecord()
        scope = _scope(self._sender(), line, request_id) | {RECORD: record}
        with suppress(Exception):  # the app has logged it and sent status 500
            await self._app(scope, receive, send)
        return status, bytes(body), record.error


@dataclass(slots=True)
class _Tried:
    """How often a line has run without a final response.

    deaths: how often its engine ended while the line ran.
    refusals: how often in a row it got 503 for a reason that may last, as a model that cannot load.
    waits: how often in a row it has waited.
    """

    deaths: int = 0
    refusals: int = 0
    waits: int = 0

    def is_final(self, status: int, error: BaseException | None) -> bool:
        """Return whether a response with this status and error is the result of the line."""
        if status == 429:  # the queue is full, or the caller has reached a limit
            self.refusals = 0
            return False
        if status != 503:
            return True
        if isinstance(error, EngineDead) and error.ran:
            self.deaths, self.waits = self.deaths + 1, 0
            return self.deaths > _MOST_DEATHS
        if not isinstance(error, EngineDead | NotServing):
            self.refusals += 1
        return self.refusals > _MOST_REFUSALS

    def pause_s(self, error: BaseException | None) -> float:
        """Return how many seconds to wait before the next try."""
        pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self.waits, 16))
        self.waits += 1
        if isinstance(error, ServiceUnavailable) and not isinstance(error, NotServing):
            return max(pause_s, error.retry_after_s)
        if isinstance(error, LimitReached):
            return max(pause_s, min(error.retry_after_s, _LONGEST_WAIT_S))
        return pause_s


def _scope(sender: Caller, line: BatchLine, request_id: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "raw_path": line.url.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(line.body)).encode()),
            (b"x-request-id", request_id.encode()),
        ],
        "client": (sender.name, 0),
        "server": ("127.0.0.1", 0),
        CALLER: sender,
        LOW_PRIORITY: True,
    }


# The endpoints that lines may request; lines of one file may request different endpoints.
FILE_ENDPOINTS = (
    *ENDPOINTS,
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
)
# The batch id that the ids of results contain, and the caller of the requests.
_NAME = "offline"

# A function that is called with each line of the output file, and whether its request succeeded.
WriteLine = Callable[[bytes, bool], None]


def count_lines(source: BinaryIO, longest: int) -> int:
    """Return the number of lines of a batch file, after reading and checking the whole file.

    longest: the maximum length of a line in bytes.

    Raises:
      ConfigError: the file has no lines, or two of them have the same custom_id.
    """
    total, errors = check_lines(source, FILE_ENDPOINTS, longest, most_lines=None)
    for error in errors:
        place = "" if error.line is None else f"line {error.line}: "
        msg = f"the input file cannot run: {place}{error.message}"
        raise ConfigError(msg)
    return total


def count_results(source: BinaryIO, out: BinaryIO, longest: int) -> int:
    """Return how many lines have a result in `out`, which an earlier run wrote.

    An incomplete last result is cut off; `out` is then at its end.

    Raises:
      ConfigError: a result does not belong to its line.
    """
    done, end = 0, 0
    lines = read_lines(source, FILE_ENDPOINTS, longest)
    for data in out:
        if not data.endswith(b"\n"):
            break
        line = next(lines, None)
        try:
            found = msgspec.json.decode(data, type=LineResult)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        if line is None or found is None or not _is_of(found, line):
            msg = (
                f"result {done + 1} of the output file does not belong to line {done + 1} of the "
                "input: choose another output file"
            )
            raise ConfigError(msg)
        done, end = done + 1, end + len(data)
    out.truncate(end)
    out.seek(end)
    return done


def _is_of(found: LineResult, line: BatchLine) -> bool:
    return found.id == result_id(_NAME, line.number) and found.custom_id == line.custom_id


async def run_file(
    app: ASGIApp, source: BinaryIO, write: WriteLine, *, longest: int, most: int, skip: int = 0
) -> None:
    """Run the requests of all lines of a file, at most `most` at the same time.

    app: the ASGI app that serves the endpoints.
    write: called with the result of each line, in the order of the lines;
      the first error that it raises ends the run.
    longest: the maximum length of a line in bytes.
    skip: how many lines have a result already.
    """
    ordered = _InOrder(write)
    left = islice(read_lines(source, FILE_ENDPOINTS, longest), skip, None)
    lines = ordered.noted(left)
    sender = Caller.of_address(_NAME)
    await LineRunner(app, lambda: sender, _NAME).run(lines, ordered.take, most=most)


class _InOrder:
    """Writes results in the order of their lines, though requests end in any order."""

    def __init__(self, write: WriteLine) -> None:
        self._write = write
        self._begun: deque[str] = deque()
        self._ended: dict[str, LineResult] = {}

    def noted(self, lines: Iterable[BatchLine]) -> Iterator[BatchLine]:
        """Yield the lines, and remember their order for `take`."""
        for line in lines:
            self._begun.append(result_id(_NAME, line.number))
            yield line

    def take(self, result: LineResult) -> None:
        """Store a result until the results of all earlier lines have been written."""
        self._ended[result.id] = result
        while self._begun and self._begun[0] in self._ended:
            first = self._ended.pop(self._begun.popleft())
            self._write(msgspec.json.encode(first) + b"\n", first.succeeded)
