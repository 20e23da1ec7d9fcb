"""Answer a generation in a dialect: its writer turns events into frames, or into one body."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Protocol

from cpuserve.api.response.stream import EventStream, JsonResult, StreamFormat
from cpuserve.serving.events import Event, Folded, Scored, num_entries
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from fastapi import Response

    from cpuserve.serving.generate import Generation


class Writer(Protocol):
    """The bytes of one dialect's answer."""

    @property
    def form(self) -> StreamFormat:
        """How the dialect streams."""

    def failed(self, error: BaseException) -> bytes:
        """Return the frame of an error after the beginning of the stream."""

    def frames(self, events: list[Event]) -> bytes:
        """Return the frames of one list of events (see serving/events.py); they may be b""."""

    def whole(self, answer: Folded) -> bytes:
        """Return the whole answer as JSON."""


def respond(generation: Generation, writer: Writer) -> Response:
    """Return the response that runs `generation`, as a stream if the call asks for one."""
    if not generation.call.stream:
        return respond_whole(generation, writer.whole)
    silent_s = generation.context.limits.silent_s
    frames, usage = _frames(generation, writer), generation.usage
    return EventStream(frames, silent_s, writer.form, writer.failed, usage)


def respond_whole(generation: Generation, write: Callable[[Folded], bytes]) -> Response:
    """Return the response that runs `generation` to its end and writes the whole answer."""

    async def body() -> bytes:
        answer = await generation.folded()
        return await run_sized(answer.num_shown, lambda: write(answer))

    return JsonResult(body, generation.usage)


async def _frames(generation: Generation, writer: Writer) -> AsyncGenerator[bytes, None]:
    async with aclosing(generation.events()) as batches:
        async for events in batches:
            first = events[0]
            if isinstance(first, Scored):
                size = num_entries(first.scores)
                frames = await run_sized(size, partial(writer.frames, events))
            else:
                frames = writer.frames(events)
            if frames:
                yield frames
