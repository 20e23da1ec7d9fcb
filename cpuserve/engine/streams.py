"""Streams: pass the outputs of many requests to the coroutines that wait for them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

import msgspec

from cpuserve.base.errors import DeadlineExceeded, EngineDead, RequestError
from cpuserve.core.admission import Limits, check_request
from cpuserve.engine.client import PayloadOf
from cpuserve.engine.ipc import Abort, AddRequest, Inbound, MediaPayload, Output
from cpuserve.engine.media_checks import check_media

Post = Callable[[Inbound], None]


class OutputStream:
    """The outputs of one request that its reader has not read yet; at most max_tokens of them.

    runs: whether the engine has received the request and has not finished it.
    """

    def __init__(self) -> None:
        self.runs = False
        self._outputs: deque[Output] = deque()
        self._error: RequestError | None = None
        self._has_all = False
        # The future of a waiting reader; a plain future costs half as much as an Event.
        self._reader: asyncio.Future[None] | None = None

    def push(self, output: Output) -> None:
        """Append an output, unless the stream has been cut."""
        if self._has_all:
            return
        if output.finish is not None:
            self.runs, self._has_all = False, True
        self._outputs.append(output)
        self._wake()

    def fail(self, error: RequestError) -> None:
        """Raise `error` in the reader after the outputs so far; only the first error counts."""
        if self._error is None:
            self._error = error
        self._wake()

    def cut(self, error: RequestError) -> bool:
        """Raise `error` in the reader instead of unread and future outputs.

        Returns False, without a change, if the last output is here or the stream has an error.
        """
        if self._has_all or self._error is not None:
            return False
        self._has_all = True
        self._outputs.clear()
        self.fail(error)
        return True

    def check(self) -> None:
        """Raise the error that the reader would get next; do nothing if there is none."""
        if self._error is not None and not self._outputs:
            raise self._error

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def arrival(self) -> asyncio.Future[None]:
        """Return a future for a single reader; it is done when there is an output or an error.

        This is a plain method, because a coroutine for each token would cost more than the future.
        """
        self._reader = asyncio.get_running_loop().create_future()
        return self._reader

    def take(self) -> Output | None:
        """Return the next output, None if there is none yet; raise the error passed to `fail`."""
        if self._outputs:
            return self._outputs.popleft()
        self.check()
        return None


class Streams:
    """The unfinished requests of one client."""

    def __init__(self) -> None:
        self._streams: dict[int, OutputStream] = {}
        self._dead: str | None = None

    @property
    def waiting(self) -> bool:
        """Whether any request still waits for its last output from the engine."""
        return any(stream.runs for stream in self._streams.values())

    def dispatch(self, outputs: Iterable[Output]) -> None:
        """Pass the outputs of a step to their streams; outputs of aborted requests are dropped."""
        for output in outputs:
            stream = self._streams.get(output.id)
            if stream is not None:
                stream.push(output)

    def fail(self, how: str) -> None:
        """Raise EngineDead in all current and later streams, because the engine has ended."""
        self._dead = how
        for stream in self._streams.values():
            stream.fail(EngineDead(how, ran=stream.runs))

    async def run(
        self,
        request: AddRequest,
        post: Post,
        writable: Callable[[], Awaitable[object]],
        timeout_s: float | None = None,
        payload_of: PayloadOf | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Start `request` and yield its outputs; abort it if it is closed early or times out.

        payload_of: returns the payload of a media item of the request when the engine asks for it.
        """
        stream = self._streams[request.id] = OutputStream()
        if self._dead is not None:
            stream.fail(EngineDead(self._dead))
        timer = None
        if timeout_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(timeout_s, self._expire, request.id, stream, post, timeout_s)
        try:
            await writable()
            stream.check()
            post(request)
            stream.runs = True
            finished = False
            while not finished:
                while (output := stream.take()) is None:
                    await stream.arrival()
                for index in output.wants:
                    assert payload_of is not None, "the request has no media"
                    payload = await payload_of(index)
                    await writable()
                    if stream.runs:
                        post(MediaPayload(request.id, index, payload))
                finished = output.finish is not None
                if not output.wants:
                    yield output
        finally:
            if timer is not None:
                timer.cancel()
            del self._streams[request.id]
            self._abort(request.id, stream, post)

    def _expire(self, number: int, stream: OutputStream, post: Post, timeout_s: float) -> None:
        """End a request at its deadline, even if its reader is slow.

        Otherwise a slow reader would keep the slot until it has read all outputs.
        The outputs of a request that finished in time can still be read.
        """
        if stream.cut(too_late(timeout_s)):
            self._abort(number, stream, post)

    def _abort(self, number: int, stream: OutputStream, post: Post) -> None:
        if stream.runs and self._dead is None:
            stream.runs = False
            post(Abort([number]))


def too_late(timeout_s: float) -> DeadlineExceeded:
    """Return the error for a request that has exceeded its timeout of `timeout_s` seconds."""
    msg = (
        f"the request was not finished within its timeout of {timeout_s:g} s and has been aborted: "
        f"request fewer tokens, allow more time, or try again when the server is less busy"
    )
    return DeadlineExceeded(msg, role="timeout")


class Admission:
    """Checks requests before they are sent, and gives them increasing ids."""

    def __init__(self) -> None:
        self._ids = itertools.count()

    def admit(self, request: AddRequest, limits: Limits) -> AddRequest:
        """Return a copy with its id and arrival; InvalidRequest if the engine would refuse it.

        `params` is copied and validated again, because its fields may have been assigned later.
        """
        params = msgspec.structs.replace(request.params)
        prompt_ids = request.prompt_ids
        check_request(prompt_ids, params, limits)
        check_media(request.media, len(prompt_ids), limits)
        number, now = next(self._ids), time.monotonic()
        return msgspec.structs.replace(request, id=number, params=params, arrival=now)


def limits_of(info: dict[str, object]) -> Limits:
    """Return the limits of an engine from the info in its Ready message."""
    return msgspec.convert(
        {
            "max_model_len": info["max_model_len"],
            "kv_tokens": info["kv_tokens"],
            "vocab": info["vocab_size"],
            "max_top": info["max_top"],
            "eos_ids": info["eos_ids"],
            "max_rows": info["max_num_batched_tokens"],
            "media_rows": info.get("media_rows", {}),
        },
        Limits,
    )
