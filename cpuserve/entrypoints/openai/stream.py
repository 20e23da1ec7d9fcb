"""Responses that stop working when the client goes: one JSON body, or server-sent events."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from fastapi.responses import Response

from cpuserve.entrypoints.openai.body import ClientGone
from cpuserve.entrypoints.openai.errors import error_json
from cpuserve.entrypoints.openai.http import DIRECT_BODY
from cpuserve.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

    from starlette.types import Receive, Scope, Send

    from cpuserve.entrypoints.openai.http import DirectBody

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
PING = b": keep-alive\n\n"
_SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx buffers responses unless told not to, and then a stream arrives in one piece.
    (b"x-accel-buffering", b"no"),
]


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; when the client disconnects, cancel it, wait until it has let go, ClientGone."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
    finally:
        watching.cancel()
        working.cancel()  # nothing happens if it is done
        await asyncio.wait((working, watching))
    if working.cancelled():
        raise ClientGone
    working.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class JsonResult(Response):
    """The JSON bytes of a coroutine, which is cancelled when the client disconnects."""

    def __init__(self, work: Callable[[], Awaitable[bytes]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or raise what the coroutine raises."""
        await until_gone(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._work()
        await Response(body, 200, media_type="application/json")(scope, receive, send)


class EventStream(Response):
    """Server-sent events from a generator of ready-made bytes, then [DONE].

    The headers wait for the first event, so that an error before it has its own status; after
    `silent_s` without one they go out with a comment, and again a comment after each such time,
    so that no proxy takes a long prompt for a dead connection. An error after the headers becomes
    an event. The generator is closed when the client disconnects.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], silent_s: float) -> None:
        super().__init__()
        self._events = events
        self._silent_s = silent_s
        self._writing = False
        self._num_written = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream, or raise what came before the headers were sent."""
        await until_gone(receive, self._run(_Writer(send, scope.get(DIRECT_BODY))))

    async def _run(self, writer: _Writer) -> None:
        pings: asyncio.Task[None] | None = None
        async with aclosing(self._events) as events:
            try:
                await writer.write(await self._first(events, writer))
                write = writer.body.write if writer.body is not None else writer.write
                pings = asyncio.ensure_future(self._ping(write))
                async for event in events:
                    self._writing = True
                    await write(event)
                    self._writing = False
                    self._num_written += 1
            except Exception as error:
                if not writer.started:
                    raise
                if not isinstance(error, RequestError):
                    log.exception("a stream failed")
                await writer.write(error_event(error))
            finally:
                if pings is not None:
                    pings.cancel()
        await writer.end(DONE)

    async def _ping(self, write: Callable[[bytes], Awaitable[None]]) -> None:
        """Write a comment whenever nothing was written for silent_s, twice that at most."""
        before = -1
        while True:
            if self._num_written == before and not self._writing:
                await write(PING)
            before = self._num_written
            await asyncio.sleep(self._silent_s)

    async def _first(self, events: AsyncGenerator[bytes, None], writer: _Writer) -> bytes:
        """The first event; comments are written while it takes its time."""
        waiting = asyncio.ensure_future(_next(events))
        try:
            while not (await asyncio.wait((waiting,), timeout=self._silent_s))[0]:
                await writer.write(PING)
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
    """Sends the headers with the first bytes; `body` is the short way for those that follow."""

    def __init__(self, send: Send, body: DirectBody | None) -> None:
        self._send = send
        self.body = body
        self.started = False

    async def write(self, data: bytes) -> None:
        """Send `data`; waits while the client's buffer is full."""
        if not self.started:
            self.started = True
            await self._send(
                {"type": "http.response.start", "status": 200, "headers": _SSE_HEADERS}
            )
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """Send `data` as the last of the body."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})


def error_event(error: Exception) -> bytes:
    """`error` as an event of a stream whose status has already been sent."""
    return b"data: " + error_json(error) + b"\n\n"
