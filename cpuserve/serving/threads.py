"""Run long work on another thread, so that it does not delay streams on the event loop.

Work waits for a thread in turns of the callers (core/turns.py), and no caller can take all threads
of a kind (core/places.py). Short work on the event loop has turns too if many requests arrive.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from cpuserve.base.errors import ServiceUnavailable, TooManyRequests
from cpuserve.core.places import CallerPlaces
from cpuserve.core.turns import CallerTurns
from cpuserve.serving.work import CURRENT_WORK, note_wait, waiting_for
from cpuserve.tokenizer.rendering.client import RENDERER
from cpuserve.tokenizer.unlocked import LONG_CHARS

T = TypeVar("T")

# Rendering waits for another process, for seconds if a request is hostile. Large requests have
# separate threads, so that they do not delay small requests, which render quickly.
_SMALL_BYTES = 1 << 16

# Only two texts of a caller with more characters than this are tokenized at the same time, and
# three of all callers, because tokenizing takes much memory.
_LARGE_TEXT_CHARS = 1 << 17

# The name of the caller that the current task works for.
WORKS_FOR: ContextVar[str] = ContextVar("works_for", default="")


class TurnThreads:
    """Threads for work of many callers: a caller with much work does not delay another's.

    The callers take turns, and a caller with a thread cannot take the last free one (CallerPlaces).

    count: how many there are at most; a single caller has (count + 1) // 2 of them.
    name: each thread is called NAME_0, NAME_1 and so on.
    most_waiting: how much work of one caller may wait; None = any number.
    """

    def __init__(self, count: int, name: str, most_waiting: int | None = None) -> None:
        self.count, self.name = count, name
        self._most_waiting = most_waiting
        self._pool = ThreadPoolExecutor(count, name)
        self._lock = threading.Lock()
        self._places: CallerPlaces[tuple[Future[Any], Callable[[], Any]]] = CallerPlaces(count)

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Return the result of `work`, when a thread has run it in the turn of WORKS_FOR.

        size: how much work it is, in any unit that is the same for all work of these threads.

        Raises:
          TooManyRequests: as much work of this caller waits as may wait.
        """
        future: Future[T] = Future()
        context, caller, begin = copy_context(), WORKS_FOR.get(), time.monotonic()

        def begin_work() -> T:
            note_wait("thread", begin)
            return work()

        job = future, lambda: context.run(begin_work)
        with self._lock:
            self._check_waiting(caller)
            self._places.put(caller, job, float(size))
            self._start_next()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if future.cancel():
                with self._lock:
                    self._places.remove(job)
            elif (request := CURRENT_WORK.get()) is not None:
                request.wait_for(_end_of(future))  # a thread cannot be stopped
            raise

    def charge(self, size: int) -> None:
        """Count work of WORKS_FOR that was not known before it ran; for `size` see `run`."""
        with self._lock:
            self._places.charge(WORKS_FOR.get(), float(size))

    def _check_waiting(self, caller: str) -> None:
        waiting = self._places.waiting(caller)
        if caller and self._most_waiting is not None and waiting >= self._most_waiting:
            msg = (
                f"The queue is full: {waiting} other requests of this client wait for a thread. "
                "Try again later"
            )
            raise TooManyRequests(msg)

    def _start_next(self) -> None:
        """Start all waiting work that may have a thread now; the lock is held."""
        while (taken := self._places.take()) is not None:
            caller, (future, work) = taken
            if not future.set_running_or_notify_cancel():
                self._places.leave(caller)
                continue
            try:
                self._pool.submit(self._run, caller, future, work)
            except RuntimeError as error:  # the system refuses to start a thread
                self._places.leave(caller)
                future.set_exception(error)

    def _run(self, caller: str, future: Future[Any], work: Callable[[], Any]) -> None:
        with self._lock:
            if future.done():  # `submit` has failed after it added this call
                return
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        with self._lock:
            self._places.leave(caller)
            self._start_next()


def _end_of(running: Future[Any]) -> asyncio.Future[None]:
    """Return a future of the event loop that ends when `running` does, whatever its result."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def tell(_: Future[Any]) -> None:
        with suppress(RuntimeError):  # the loop may have been closed meanwhile
            loop.call_soon_threadsafe(ended.set_result, None)

    running.add_done_callback(tell)
    return ended


# The most requests of a caller that wait for a thread of one kind.
_MOST_WAITING = 4096
# A single caller has half of the threads: 4 small renders, 2 large renders and 2 large texts.
_SMALL_RENDERS = TurnThreads(7, "cpuserve-render", _MOST_WAITING)
_LARGE_RENDERS = TurnThreads(3, "cpuserve-render-large", _MOST_WAITING)
_WORKERS = TurnThreads(min(32, (os.cpu_count() or 1) + 4), "cpuserve-work")
_LARGE_TEXTS = TurnThreads(3, "cpuserve-text-large", _MOST_WAITING)
# Tokenizers that are not plain (tokenizer/limited) encode in other processes, for seconds if a
# text is hostile. So they have threads of their own, and texts of other models never wait for them.
_LIMITED_TEXTS = TurnThreads(4, "cpuserve-text-limited", _MOST_WAITING)
# How many texts are tokenized at the same time.
TOKENIZING = _WORKERS.count + _LARGE_TEXTS.count
# Large bodies have one thread: decoding keeps the lock of the interpreter (GIL), so that a second
# thread would make none faster, and the event loop would wait for both before each of its steps.
_DECODING = TurnThreads(1, "cpuserve-decode")
# A disk takes 5 to 80 ms to keep the bytes of a write, longer under load.
_DISK = TurnThreads(3, "cpuserve-disk")
# Reading files and syncing large ones takes seconds on a slow disk, and no CPU time.
_WAITING = TurnThreads(15, "cpuserve-wait", _MOST_WAITING)


class _LoopTurns:
    """Lets one request go on in each iteration of an event loop, in turns of the callers.

    Between two of them the loop reads sockets, so that new requests of other callers can be next.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_soon = loop.call_soon
        self._make_future = loop.create_future
        self._turns: CallerTurns[asyncio.Future[None]] = CallerTurns()
        self._one_goes_on = False

    async def wait(self, size: float) -> None:
        """Return in the turn of WORKS_FOR; at once if nobody else has gone on in this iteration."""
        if not self._one_goes_on:
            self._one_goes_on = True
            self._call_soon(self._go_on)
            return
        mine = self._make_future()
        self._turns.put(WORKS_FOR.get(), mine, size)
        with waiting_for("loop"):
            await mine

    def _go_on(self) -> None:
        while self._turns:
            _, waiting = self._turns.take()
            if not waiting.done():  # its request may have been cancelled
                waiting.set_result(None)
                self._call_soon(self._go_on)
                return
        self._one_goes_on = False


_LOOPS: WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopTurns] = WeakKeyDictionary()


async def loop_turn(size: float) -> None:
    """Wait until the event loop may work on this request, in the turns of the callers.

    A thousand requests that a client sends together take the event loop a second or two. Another
    client's request waits for one of them at a time, and not for all.

    size: how much work it is, in bytes of the body.
    """
    loop = asyncio.get_running_loop()
    turns = _LOOPS.get(loop)
    if turns is None:
        turns = _LOOPS[loop] = _LoopTurns(loop)
    await turns.wait(size)


async def run_sized(size: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs on another thread if it is long.

    size: the estimated time of `work` in microseconds, about 1 for each character to tokenize
    or object to create. Work longer than LONG_CHARS would delay the tokens of running streams.
    """
    return work() if size <= LONG_CHARS else await _WORKERS.run(size, work)


async def run_limited(size: int, work: Callable[[], T]) -> T:
    """Return the result of `work`; its tokenizer waits for another process."""
    return await _LIMITED_TEXTS.run(size, work)


async def run_tokenizing(num_chars: int, work: Callable[[], T], *, waits: bool) -> T:
    """Return the result of `work`, which tokenizes `num_chars` characters.

    waits: whether the tokenizer waits for another process (Tokenizer.waits).
    """
    if waits:
        return await run_limited(num_chars, work)
    if num_chars <= _LARGE_TEXT_CHARS:
        return await run_sized(num_chars, work)
    return await _LARGE_TEXTS.run(num_chars, work)


async def run_decoding(num_bytes: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, which decodes a body of this size on another thread."""
    return await _DECODING.run(num_bytes, work)


async def run_on_disk(work: Callable[[], T]) -> T:
    """Return the result of `work`, which writes to a disk, on another thread.

    Work that has begun ends, even if the current task is cancelled meanwhile. CancelledError then
    comes after its end, so it says that the disk has what `work` writes.
    """
    writing = asyncio.ensure_future(_DISK.run(1, work))
    cancelled = None
    while not writing.done():
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError as error:
            cancelled = error
    result = writing.result()
    if cancelled is not None:
        raise cancelled
    return result


async def run_waiting(work: Callable[[], T]) -> T:
    """Return the result of `work`, which may wait for a disk or take seconds, on another thread.

    Requests must not use `asyncio.to_thread`: all callers and the server share its threads.
    """
    return await _WAITING.run(1, work)


async def run_rendering(num_bytes: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, which renders a request of this size on another thread.

    Raises ServiceUnavailable if the renderer was closed while `work` waited for a thread:
    `work` would start the renderer again, and delay the exit of the server.
    """
    closings = RENDERER.closings

    def unless_closed() -> T:
        if RENDERER.closings != closings:
            msg = "the server is stopping"
            raise ServiceUnavailable(msg)
        return work()

    threads = _SMALL_RENDERS if num_bytes <= _SMALL_BYTES else _LARGE_RENDERS
    return await threads.run(num_bytes, unless_closed)
