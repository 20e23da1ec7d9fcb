"""InlineClient: an EngineClient with its engine on a thread of this process, for LLM and tests."""

from __future__ import annotations

import asyncio
import queue
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from cpuserve.base.errors import EngineDead, StartupError
from cpuserve.base.log import get_logger
from cpuserve.config.engine import EngineConfig
from cpuserve.core.admission import Limits
from cpuserve.engine.build import build_engine, run_engine
from cpuserve.engine.client import PayloadOf, ReplicaStatus
from cpuserve.engine.core import EngineCore
from cpuserve.engine.interrupt import Interrupt
from cpuserve.engine.ipc import (
    Abort,
    AddRequest,
    Ask,
    Inbound,
    MediaPayload,
    Outbound,
    Output,
    Reply,
    Shutdown,
    StageProgress,
    Stats,
    StepOutput,
)
from cpuserve.engine.loop import run_loop
from cpuserve.engine.streams import Admission, Streams, limits_of

Build = Callable[[EngineConfig, Callable[[str, int, int], None], Any], EngineCore]
Sink = queue.SimpleQueue[Output | EngineDead]

JOIN_S = 10.0
log = get_logger("engine")


class InlineClient:
    """EngineClient of an engine on a thread of this process, with additional synchronous methods.

    The synchronous methods are start, submit, abort, ask_now and shutdown.
    Only the engine's thread uses the executor.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        on_progress: Callable[[StageProgress], None] | None = None,
        build: Build = build_engine,
    ) -> None:
        self.info: dict[str, object] = {}
        self._admission = Admission()
        self._limits: Limits | None = None
        self._router = _Router()
        self._channel = _QueueChannel(self._router)
        self._started: Future[dict[str, object]] = Future()
        self._num_asked = 0
        self._thread = threading.Thread(
            target=_engine_thread,
            args=(config, build, on_progress, self._channel, self._started),
            name="cpuserve-engine",
            daemon=True,
        )
        self._thread.start()
        # _stop runs when this client is garbage-collected, or before the interpreter shuts down.
        self._stop = weakref.finalize(self, _stop, self._channel, self._thread)

    # --- synchronous methods ------------------------------------------------------------------

    def start(self) -> None:
        """Wait until the engine is ready; raise its StartupError if it cannot start."""
        self._take_info(self._started.result())

    def submit(self, request: AddRequest, sink: Sink) -> int:
        """Start one sequence and return its id; `sink` gets its outputs, or an EngineDead.

        Raises:
            InvalidRequest: the engine could never run the request.
            EngineDead: the engine has ended.
        """
        message = self._admission.admit(request, self._serving())
        self._router.add(message.id, sink)
        self._channel.post(message)
        return message.id

    def send_payload(self, number: int, index: int, payload: bytes) -> None:
        """Send the payload of a media item that an output of sequence `number` has asked for."""
        self._channel.post(MediaPayload(number, index, payload))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Let the engine receive all requests that this block submits in one step.

        Without this, a busy machine could split them. Only one thread may use it at a time.
        """
        self._channel.hold()
        try:
            yield
        finally:
            self._channel.release()

    def abort(self, ids: Iterable[int]) -> None:
        """Stop the sequences `ids`; no output of them arrives after the current step."""
        ids = list(ids)
        for number in ids:
            self._router.remove(number)
        self._channel.post(Abort(ids))

    def ask_now(self, what: str, **details: Any) -> dict[str, object]:
        """Return the reply of `ask`; EngineDead if the engine has ended."""
        return self._ask(what, details).result()

    def shutdown(self) -> None:
        """Stop the engine and wait until its memory has been freed."""
        self._stop()

    # --- EngineClient -------------------------------------------------------------------------

    async def wait_ready(self) -> None:
        """Wait until the engine is ready; raise its StartupError if it cannot start."""
        self._take_info(await asyncio.wrap_future(self._started))

    def generate(
        self,
        request: AddRequest,
        *,
        timeout_s: float | None = None,
        payload_of: PayloadOf | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Generate one sequence. Closing the iterator aborts it.

        Raises InvalidRequest and EngineDead like submit, and DeadlineExceeded after timeout_s.
        """
        message = self._admission.admit(request, self._serving())
        streams = self._router.streams(asyncio.get_running_loop())
        return streams.run(message, self._channel.post, _at_once, timeout_s, payload_of)

    async def ask(self, what: str, **details: Any) -> dict[str, object]:
        """Return a report of the engine, or the result of a change (`Ask`)."""
        return await asyncio.wrap_future(self._ask(what, details))

    @property
    def stats(self) -> Stats:
        """The engine's gauges and counters after the last step."""
        return self._router.stats

    @property
    def alive(self) -> bool:
        """Whether the engine is ready and has not died."""
        return self._limits is not None and self._router.dead is None

    @property
    def ended(self) -> bool:
        """Whether the engine was ready and has died, or was closed."""
        return self._limits is not None and not self.alive

    @property
    def trouble(self) -> str:
        """Why the engine does not serve now."""
        return self._router.dead or "the engine is not ready"

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        """Return no replicas, because this engine is never restarted."""
        return ()

    async def close(self) -> None:
        """Stop the engine and wait until its memory has been freed."""
        await asyncio.to_thread(self.shutdown)

    # --- helpers of the methods above ---------------------------------------------------------

    def _ask(self, what: str, details: dict[str, Any]) -> Future[dict[str, object]]:
        self._serving()
        self._num_asked += 1
        reply: Future[dict[str, object]] = Future()
        self._router.expect(self._num_asked, reply)
        self._channel.post(Ask(self._num_asked, what, details))
        return reply

    def _take_info(self, info: dict[str, object]) -> None:
        self.info, self._limits = info, limits_of(info)

    def _serving(self) -> Limits:
        if self._limits is None or self._router.dead is not None:
            raise EngineDead(self.trouble)
        return self._limits


async def _at_once() -> None:
    """Return immediately, because the inbox of a thread is never full."""


class _Router:
    """Passes the outputs of a step to the sinks and event loops that wait for them; thread-safe."""

    def __init__(self) -> None:
        self.dead: str | None = None
        self.stats = Stats()
        self._lock = threading.Lock()
        self._sinks: dict[int, Sink] = {}
        self._streams: dict[asyncio.AbstractEventLoop, Streams] = {}
        self._replies: dict[int, Future[dict[str, object]]] = {}

    def add(self, number: int, sink: Sink) -> None:
        with self._lock:
            if self.dead is not None:
                raise EngineDead(self.dead)
            self._sinks[number] = sink

    def remove(self, number: int) -> None:
        with self._lock:
            self._sinks.pop(number, None)

    def streams(self, loop: asyncio.AbstractEventLoop) -> Streams:
        """Return the streams of `loop`, and drop loops that have been closed.

        Raises:
            EngineDead: the engine has ended, so a new stream would never get an output.
        """
        with self._lock:
            if self.dead is not None:
                raise EngineDead(self.dead)
            for closed in [known for known in self._streams if known.is_closed()]:
                del self._streams[closed]
            return self._streams.setdefault(loop, Streams())

    def expect(self, number: int, reply: Future[dict[str, object]]) -> None:
        with self._lock:
            if self.dead is not None:
                raise EngineDead(self.dead)
            self._replies[number] = reply

    def step(self, message: StepOutput) -> None:
        """Pass on the outputs of a step; the engine's thread calls this."""
        with self._lock:
            others: list[Output] = []
            for output in message.outputs:
                sink = self._sinks.get(output.id)
                if sink is None:
                    others.append(output)
                    continue
                if output.finish is not None:
                    del self._sinks[output.id]
                sink.put(output)
            loops = list(self._streams.items()) if others else []
        self.stats = message.stats
        for loop, streams in loops:
            _call(loop, streams.dispatch, others)

    def reply(self, message: Reply) -> None:
        with self._lock:
            reply = self._replies.pop(message.id, None)
        if reply is not None and reply.set_running_or_notify_cancel():
            reply.set_result(message.value)

    def fail(self, how: str) -> None:
        """Raise EngineDead in all waiting requests, because the engine has ended."""
        with self._lock:
            if self.dead is not None:
                return
            self.dead = how
            sinks, self._sinks = list(self._sinks.values()), {}
            replies, self._replies = list(self._replies.values()), {}
            loops = list(self._streams.items())
        for sink in sinks:
            sink.put(EngineDead(how))
        for reply in replies:
            if reply.set_running_or_notify_cancel():
                reply.set_exception(EngineDead(how))
        for loop, streams in loops:
            _call(loop, streams.fail, how)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], argument: object) -> None:
    try:
        loop.call_soon_threadsafe(function, argument)
    except RuntimeError:
        # The loop was closed while requests were running, so nothing can read their outputs.
        log.debug("outputs for an event loop that has been closed are dropped")


class _QueueChannel:
    """The engine's channel: an inbox of messages, and a router for the outputs."""

    def __init__(self, router: _Router) -> None:
        self.router = router
        self._inbox: queue.SimpleQueue[Inbound | list[Inbound]] = queue.SimpleQueue()
        self._interrupt: Interrupt | None = None
        # The messages of the thread that is inside `together`, and the id of this thread.
        self._held: tuple[int, list[Inbound]] | None = None

    def watch(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt

    def post(self, message: Inbound) -> None:
        """Put a message into the inbox; any thread may call this."""
        if self._interrupt is not None:
            self._interrupt.see(message)
        held = self._held
        if held is not None and held[0] == threading.get_ident():
            held[1].append(message)
        else:
            self._inbox.put(message)

    def hold(self) -> None:
        """Hold back the messages that this thread posts, until `release`."""
        self._held = threading.get_ident(), []

    def release(self) -> None:
        """Put the messages that `hold` held back into the inbox together."""
        held, self._held = self._held, None
        if held is not None and held[1]:
            self._inbox.put(held[1])

    def receive(self, *, block: bool) -> list[Inbound]:
        taken = [self._inbox.get()] if block else []
        while not self._inbox.empty():
            taken.append(self._inbox.get())
        return [m for some in taken for m in (some if isinstance(some, list) else [some])]

    def wake(self) -> None:
        self._inbox.put(Abort([]))  # an Abort without ids has no effect but wakes the engine

    def send(self, message: Outbound) -> None:
        if isinstance(message, StepOutput):
            self.router.step(message)
        elif isinstance(message, Reply):
            self.router.reply(message)


def _stop(channel: _QueueChannel, thread: threading.Thread) -> None:
    channel.post(Shutdown())
    if threading.current_thread() is not thread:
        thread.join(JOIN_S)
    channel.router.fail("the engine has been shut down")


def _engine_thread(
    config: EngineConfig,
    build: Build,
    on_progress: Callable[[StageProgress], None] | None,
    channel: _QueueChannel,
    started: Future[dict[str, object]],
) -> None:
    """Build and run the engine without a reference to the client, which can then be freed."""

    def progress(stage: str, done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(StageProgress(stage, done, total))

    def main(team: Any) -> None:
        core = build(config, progress, team)
        started.set_result(core.info())
        try:
            run_loop(core, channel)
        finally:
            core.close()

    how = "the engine has been shut down"
    try:
        run_engine(config, main)
    except BaseException as error:
        how = f"the engine ended with {type(error).__name__}: {error}"
        if started.done():
            log.exception("the engine thread ended")
        else:
            started.set_exception(error if isinstance(error, StartupError) else StartupError(how))
    channel.router.fail(how)
