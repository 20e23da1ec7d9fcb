"""Run a response and store it, either while its client waits or in the background."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from fastapi import Response

from cpuserve.api.errors.error_json import public_message
from cpuserve.api.errors.record import RequestRecord
from cpuserve.api.openai.responses.stored_response import StoredResponse, output_items
from cpuserve.api.openai.responses.writer import ResponseWriter
from cpuserve.api.response.stream import EventStream
from cpuserve.api.response.writer import respond
from cpuserve.errors import RequestError
from cpuserve.log import get_logger
from cpuserve.serving.generation.report import report_of

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

    from cpuserve.api.openai.responses.history import ReferringRequest
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.generation.generate import Generation
    from cpuserve.serving.models.registry import Lease

log = get_logger("serve")


class Recording:
    """Stores one response, if requested, and adds its items to its conversation."""

    def __init__(
        self, request: RequestContext, turn: ReferringRequest, writer: ResponseWriter
    ) -> None:
        self._store = request.state.stored
        self._writer = writer
        # Keep no reference to the request, which may be large and is no longer needed.
        self._own, self._conversation = turn.own, turn.conversation
        self.entry: StoredResponse | None = None
        if turn.body.store:
            self.entry = entry = StoredResponse(
                request.caller,
                request.id,
                num_before=0 if turn.conversation else len(turn.history),
                num_own=len(turn.own),
                running=True,
            )
            before = [] if turn.conversation else turn.history
            self._store.add(entry, [*before, *turn.own])

    def end(self) -> None:
        """Store the finished response, and add its items to the conversation.

        Raises:
          InvalidRequest, TooManyRequests: the store has no room for the response.
        """
        final, conversation = self._writer.final, self._conversation
        assert final is not None
        if self.entry is not None and self._store.is_stored(self.entry):
            self.entry.end(self._store, final)
        if conversation is not None and final.status in ("completed", "incomplete"):
            self._store.grow(conversation, [*self._own, *output_items(final)])
            self._store.refresh(conversation)

    def release(self) -> None:
        """Remove an unfinished response from the store, and unlock its conversation."""
        if self.entry is not None and self.entry.running:
            self._store.remove(self.entry)
        if self._conversation is not None:
            self._conversation.running = False


class _Recorded(Response):
    """Sends a response, and then calls `release` of its Recording."""

    def __init__(self, sent: Response, recording: Recording) -> None:
        super().__init__()
        self._sent = sent
        self._recording = recording

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response; if the client disconnects first, the response is not stored."""
        try:
            await self._sent(scope, receive, send)
        finally:
            self._recording.release()


def respond_recorded(
    request: RequestContext, turn: ReferringRequest, generation: Generation
) -> Response:
    """Return the HTTP response that runs `generation` and stores the result if requested.

    Raises:
      InvalidRequest, TooManyRequests: the store has no room for the response.
    """
    writer = ResponseWriter(request, turn.body, generation)
    recording = Recording(request, turn, writer)
    try:
        if turn.body.background:
            return _in_background(request, turn, generation, writer, recording)
        if recording.entry is not None:
            recording.entry.show(request.state.stored, writer.begun)
        return _Recorded(respond(generation, writer, recording.end), recording)
    except RequestError:
        recording.release()
        raise


def _in_background(
    request: RequestContext,
    turn: ReferringRequest,
    generation: Generation,
    writer: ResponseWriter,
    recording: Recording,
) -> Response:
    """Start a background task for the response; return its first state or a stream of it."""
    entry, store = recording.entry, request.state.stored
    assert entry is not None
    queued = msgspec.structs.replace(writer.begun, status="queued")
    entry.show(store, queued)
    if turn.body.stream:
        entry.frames = []
        entry.add_frames(store, writer.queued())
    # The task keeps its model loaded after the end of this HTTP request.
    leases = list(request.leases)
    request.leases.clear()
    work = _Background(request, generation, writer, recording)
    if request.record is not None:
        request.record.report = partial(report_of, generation)
        request.record.ends_later = True
    entry.work = asyncio.create_task(work.run())
    entry.work.add_done_callback(lambda _: work.settle(leases))
    return stream_of(entry, request.context.limits.silent_s) if turn.body.stream else sent(entry)


class _Background:
    """A response that runs without a connected client, who reads the result from the store."""

    def __init__(
        self,
        request: RequestContext,
        generation: Generation,
        writer: ResponseWriter,
        recording: Recording,
    ) -> None:
        assert recording.entry is not None
        self._entry = recording.entry
        self._store = request.state.stored
        self._generation = generation
        self._writer = writer
        self._recording = recording
        self._record = request.record or RequestRecord()

    async def run(self) -> None:
        """Store all SSE frames of the response; an error becomes a part of the response."""
        entry, store, writer = self._entry, self._store, self._writer
        try:
            async with aclosing(self._generation.events()) as batches:
                async for events in batches:
                    if entry.status == "queued":
                        entry.show(store, writer.begun)
                    written = writer.frames(events)
                    if writer.final is not None:
                        if self._record.audited is not None:
                            await self._record.audited(msgspec.json.encode(writer.final))
                        self._recording.end()
                    entry.add_frames(store, written)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._fail(error)

    def settle(self, leases: list[Lease]) -> None:
        """Finish a response that was cancelled before its end, and release its models."""
        entry = self._entry
        try:
            if entry.running and self._store.is_stored(entry):
                written = self._writer.cancelled()
                self._recording.end()
                entry.add_frames(self._store, written)
        except Exception as error:
            self._fail(error)
        finally:
            entry.running = False
            entry.tell()
            self._recording.release()
            self._record.end()
            for lease in leases:
                lease.release()

    def _fail(self, error: Exception) -> None:
        """Store the failed response; if the store has no room for it, remove the response."""
        self._record.fail(error)
        log.warning("background response %s failed: %s", self._entry.id, error)
        entry = self._entry
        try:
            written = self._writer.failed(error)
            if self._writer.final is not None:
                self._recording.end()
            entry.add_frames(self._store, written)
        except Exception as full:
            log.warning("background response %s cannot be stored: %s", entry.id, full)
            self._store.remove(entry)
        entry.running = False


def sent(entry: StoredResponse) -> Response:
    """Return the stored Response as JSON."""
    return Response(entry.body, media_type="application/json")


def stream_of(entry: StoredResponse, silent_s: float, first: int = 0) -> Response:
    """Return a stream of a background response's frames, starting at frame number `first`."""
    frames = entry.follow(first)
    return EventStream(frames, silent_s, ResponseWriter.form, _failed)


def _failed(error: BaseException) -> bytes:
    """Return the SSE frame for an error in a stream of a background response."""
    body = {
        "type": "error",
        "code": "server_error",
        "message": public_message(error),
        "param": None,
    }
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(body)
