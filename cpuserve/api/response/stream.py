"""JSON responses and streams that are cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response

from cpuserve.api.errors.http_errors import settle_failure
from cpuserve.api.errors.record import RECORD
from cpuserve.api.request.body import ClientGone
from cpuserve.api.response.direct_body import DIRECT_BODY
from cpuserve.base.errors import NotServing
from cpuserve.serving.cancellation import CANCELLATIONS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

    from starlette.types import Receive, Scope, Send

    from cpuserve.api.response.direct_body import DirectBody
    from cpuserve.serving.generation.report import GenerationReport


@dataclass(frozen=True, slots=True)
class StreamFormat:
    """How a dialect streams: the media type, the bytes of a ping, and the last bytes."""

    media_type: bytes = b"text/event-stream; charset=utf-8"
    ping: bytes = b": keep-alive\n\n"
    done: bytes = b""


_HEADERS = [
    (b"cache-control", b"no-cache"),
    # nginx buffers responses by default, so that a stream would arrive in one piece.
    (b"x-accel-buffering", b"no"),
]


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; if the client disconnects, cancel it, wait for its end and raise ClientGone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        working.cancel()  # this has no effect if the work has ended
        await asyncio.wait((working, watching))
    if working.cancelled():
        raise ClientGone
    working.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _report_by(report: Callable[[], GenerationReport] | None, scope: Scope) -> None:
    if RECORD in scope and report is not None:
        scope[RECORD].report = report


class LastFrame(bytes):
    """The last bytes that a generator of events yields; they are sent as the end of the body.

    So that whoever watches the end of a response, as the audit log does, sees it before the client.
    """


class JsonResult(Response):
    """Sends the JSON bytes that a coroutine returns; a disconnect cancels the coroutine."""

    def __init__(
        self,
        work: Callable[[], Awaitable[bytes]],
        report: Callable[[], GenerationReport] | None = None,
    ) -> None:
        """`report`: a function that returns the tokens and times so far, for the log."""
        super().__init__()
        self._work = work
        self._report = report
        self.further_headers: Callable[[], dict[str, str]] = dict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, or raise the error of the coroutine."""
        _report_by(self._report, scope)
        await until_gone(receive, self._respond(scope, receive, send))

    async def _respond(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._work()
        headers = self.further_headers()
        await Response(body, 200, headers, media_type="application/json")(scope, receive, send)


class EventStream(Response):
    """Sends encoded events from a generator, and then `form.done`.

    The headers wait for the first event, so that an error before it has its own status. After
    `silent_s` seconds without an event the headers and a ping are sent, and then a ping after each
    further `silent_s` seconds, so that proxies do not close the connection during a long prompt.
    An error after the headers is sent as the event that `failed` returns for it. The generator is
    closed when the client disconnects.

    report: a function that returns the tokens and times so far, for the log.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        silent_s: float,
        form: StreamFormat,
        failed: Callable[[BaseException], bytes],
        report: Callable[[], GenerationReport] | None = None,
    ) -> None:
        super().__init__()
        self._report = report
        self.further_headers: Callable[[], dict[str, str]] = dict
        self._form = form
        self._failed = failed
        self._events = events
        self._silent_s = silent_s
        self._writing = False
        self._num_written = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream, or raise an error that occurs before the headers are sent."""
        _report_by(self._report, scope)
        writer = _Writer(send, scope.get(DIRECT_BODY), self._form.media_type, self.further_headers)
        await until_gone(receive, self._run(writer, scope))

    async def _run(self, writer: _Writer, scope: Scope) -> None:
        last = b""
        async with aclosing(self._events) as events:
            try:
                last = await self._send_events(events, writer)
            except CANCELLATIONS:
                raise
            except BaseException as error:
                if not writer.started:
                    raise
                settle_failure(error, scope)
                await writer.write(self._failed(error))
        try:
            await writer.end(last + self._form.done)
        except NotServing as error:  # the end must not be sent, because it cannot be audited
            settle_failure(error, scope)
            await writer.end(self._failed(error) + self._form.done)

    async def _send_events(self, events: AsyncGenerator[bytes, None], writer: _Writer) -> bytes:
        """Send all events except a LastFrame, which is returned, or b""."""
        first = await self._first(events, writer)
        if isinstance(first, LastFrame):
            return first
        await writer.write(first)
        write = writer.body.write if writer.body is not None else writer.write
        pings = asyncio.ensure_future(self._ping(write))
        try:
            async for event in events:
                if isinstance(event, LastFrame):
                    return event
                self._writing = True
                await write(event)
                self._writing = False
                self._num_written += 1
        finally:
            pings.cancel()
        return b""

    async def _ping(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write a ping if nothing was written for `silent_s` seconds, checked at that interval."""
        before = -1
        while True:
            if self._num_written == before and not self._writing:
                await write(self._form.ping)
            before = self._num_written
            await asyncio.sleep(self._silent_s)

    async def _first(self, events: AsyncGenerator[bytes, None], writer: _Writer) -> bytes:
        """Return the first event; write pings while waiting for it."""
        waiting = asyncio.ensure_future(_next(events))
        try:
            while not (await asyncio.wait((waiting,), timeout=self._silent_s))[0]:
                await writer.write(self._form.ping)
            return waiting.result()
        finally:
            if not waiting.done():
                waiting.cancel()
                await asyncio.wait((waiting,))


async def _next(events: AsyncGenerator[bytes, None]) -> bytes:
    async for event in events:
        return event
    return b""


class _Writer:
    """Sends the headers with the first bytes; EventStream writes later bytes to `body` if set.

    further: a function that returns headers which are known only when the first bytes are sent.
    """

    def __init__(
        self,
        send: Send,
        body: DirectBody | None,
        media_type: bytes,
        further: Callable[[], dict[str, str]],
    ) -> None:
        self._send = send
        self._further = further
        self._headers = [(b"content-type", media_type), *_HEADERS]
        self.body = body
        self.started = False

    async def write(self, data: bytes) -> None:
        """Send `data`; wait while the write buffer is full."""
        await self._begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """Send `data` as the final piece of the body."""
        await self._begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _begin(self) -> None:
        if self.started:
            return
        self.started = True
        more = [(name.encode(), value.encode()) for name, value in self._further().items()]
        headers = [*self._headers, *more]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
