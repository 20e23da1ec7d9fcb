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
from cpuserve.base.log import get_logger
from cpuserve.serving.generation.report import report_of

if TYPE_CHECKING:
    from cpuserve.api.openai.responses.history import ReferringRequest
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.generation.generate import Generation

log = get_logger("serve")


class Recording:
    """Stores one response, if requested, and adds its items to its conversation.

    If the work of the request ends before its response has been stored, the store forgets it.
    """

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
            request.work.hold(self._forget_unfinished)

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

    def _forget_unfinished(self) -> None:
        if self.entry is not None and self.entry.running:
            self._store.remove(self.entry)


def respond_recorded(
    request: RequestContext, turn: ReferringRequest, generation: Generation
) -> Response:
    """Return the HTTP response that runs `generation` and stores the result if requested.

    Raises:
      InvalidRequest, TooManyRequests: the store has no room for the response.
    """
    writer = ResponseWriter(request, turn.body, generation)
    recording = Recording(request, turn, writer)
    if turn.body.background:
        return _in_background(request, turn, generation, writer, recording)
    if recording.entry is not None:
        recording.entry.show(request.state.stored, writer.begun)
    return respond(generation, writer, recording.end)


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
    background = _Background(request, generation, writer, recording)
    if request.record is not None:
        request.record.report = partial(report_of, generation)
        request.record.ends_later = True
    entry.task = asyncio.create_task(background.run())
    entry.task.add_done_callback(background.settle)
    request.state.background.add(entry.task)
    entry.task.add_done_callback(request.state.background.discard)
    request.work.continue_in(entry.task)  # the allowance, the model and the rest stay reserved
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

    def settle(self, _task: asyncio.Task[None]) -> None:
        """Finish a response that was cancelled before its end."""
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

    def _fail(self, error: Exception) -> None:
        """Store the failed response; if the store has no room for it, remove the response."""
        self._record.fail(error)
        name = self._record.request_id
        log.warning("background response of request %s failed: %s", name, error)
        entry = self._entry
        try:
            written = self._writer.failed(error)
            if self._writer.final is not None:
                self._recording.end()
            entry.add_frames(self._store, written)
        except Exception as full:
            log.warning("background response of request %s cannot be stored: %s", name, full)
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
