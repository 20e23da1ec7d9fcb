"""Run the requests of a batch file with low priority, and write a result for each line."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.batches.lines import BatchLine, LineError
from cpuserve.api.request.headers import LOW_PRIORITY

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message

# How often a request that gets 503 is run again. The request itself may have killed the engine.
_MOST_RESTARTS = 5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 5.0


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


async def run_lines(
    app: ASGIApp,
    caller: str,
    batch: str,
    lines: Iterable[BatchLine],
    write: Write,
    *,
    most: int,
) -> None:
    """Run the requests of `lines`, at most `most` at the same time; write a result for each line.

    The first error that `write` raises ends the run; a cancelled run writes no more results.

    app: the ASGI app that serves the endpoints.
    caller: the id of the client that owns the batch.
    batch: the id of the batch.
    """
    source: Iterator[BatchLine] = iter(lines)

    async def work() -> None:
        for line in source:
            write(await _result(app, caller, batch, line))

    workers = [asyncio.create_task(work()) for _ in range(most)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _result(app: ASGIApp, caller: str, batch: str, line: BatchLine) -> LineResult:
    name = result_id(batch, line.number)
    if line.error is not None:
        await asyncio.sleep(0)
        return LineResult(name, line.custom_id, None, line.error)
    pause_s, restarts = _FIRST_PAUSE_S, 0
    while True:
        request_id = uuid.uuid4().hex
        status, body = await _respond(app, caller, line, request_id)
        restarts += status == 503
        if status != 429 and not (status == 503 and restarts <= _MOST_RESTARTS):
            response = LineResponse(status, request_id, msgspec.Raw(body or b"null"))
            return LineResult(name, line.custom_id, response, None)
        await asyncio.sleep(pause_s)
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


async def _respond(
    app: ASGIApp, caller: str, line: BatchLine, request_id: str
) -> tuple[int, bytes]:
    """Return the status and the body of the app's response to the request of a line."""
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

    with suppress(Exception):  # the app has logged it and sent status 500
        await app(_scope(caller, line, request_id), receive, send)
    return status, bytes(body)


def _scope(caller: str, line: BatchLine, request_id: str) -> dict[str, Any]:
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
        # RequestIds reads the caller from here, where other requests have the client's address.
        "client": (caller, 0),
        "server": ("127.0.0.1", 0),
        LOW_PRIORITY: True,
    }
