"""The Writer protocol of dialects: a writer encodes events as stream frames, or as one body."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Protocol, cast

import msgspec
from fastapi import Response

from cpuserve.api.response.cache_miss import cache_headers
from cpuserve.api.response.stream import EventStream, JsonResult, LastFrame, StreamFormat
from cpuserve.serving.calls.events import (
    Event,
    PromptScores,
    TokenUsage,
    WholeResponse,
    num_entries,
)
from cpuserve.serving.generation.report import report_of
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from cpuserve.serving.generation.generate import Generation


class Writer(Protocol):
    """Writes the response to one request in the format of a dialect."""

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON, for a request that does not stream."""


class StreamWriter(Writer, Protocol):
    """A writer that can also write a stream of frames."""

    @property
    def form(self) -> StreamFormat:
        """The stream format of the dialect."""

    def failed(self, error: BaseException) -> bytes:
        """Return the stream frame for an error after the stream has begun."""

    def frames(self, events: list[Event]) -> bytes:
        """Return the stream bytes for `events` (calls/events.py); b"" if they show nothing."""


def respond(
    generation: Generation, writer: Writer, ended: Callable[[], None] | None = None
) -> Response:
    """Return the response that runs `generation`, as a stream if the call requests one.

    writer: must be a StreamWriter if the call can request a stream.
    ended: called after the writer has encoded the whole response, before its end is sent.
    """
    report = partial(report_of, generation)
    if generation.call.stream:
        streams = cast("StreamWriter", writer)
        frames, silent_s = _frames(generation, streams, ended), generation.context.limits.silent_s
        made = EventStream(frames, silent_s, streams.form, streams.failed, report)
        made.further_headers = partial(cache_headers, generation)
        return made

    async def body() -> bytes:
        response = await generation.folded()
        written = await run_sized(response.num_shown, lambda: writer.whole(response))
        if ended is not None:
            ended()
        return written

    result = JsonResult(body, report)
    result.further_headers = partial(cache_headers, generation)
    return result


def json_response(body: object) -> Response:
    """Return a JSON response with the encoded `body`."""
    return Response(msgspec.json.encode(body), media_type="application/json")


async def _frames(
    generation: Generation, writer: StreamWriter, ended: Callable[[], None] | None
) -> AsyncGenerator[bytes, None]:
    async with aclosing(generation.events()) as batches:
        async for events in batches:
            first = events[0]
            if isinstance(first, PromptScores):
                size = num_entries(first.scores)
                frames = await run_sized(size, partial(writer.frames, events))
            else:
                frames = writer.frames(events)
            if ended is not None and isinstance(events[-1], TokenUsage):
                ended()
            if len(events) == 1 and isinstance(first, TokenUsage):  # the end of Generation.events
                yield LastFrame(frames)
            elif frames:
                yield frames
