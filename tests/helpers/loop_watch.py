"""LoopWatch: for how long an event loop ran nothing else, in seconds of CPU time.

The wall clock would also count what other programs on a busy machine take. Two measures hold on
any machine, and the greater one counts:

- the CPU time of the loop's thread in one callback;
- by how much a heartbeat was late, less the time that the loop's thread waited for a CPU, and at
  most the CPU time that this process used meanwhile. A heartbeat is late when another thread keeps
  the GIL, for example in a function in C.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from asyncio import events
from types import FrameType

_BEAT_S = 0.005
_SAMPLE_S = 0.02


class LoopWatch:
    """Watches the event loop that calls `start`; `take` returns the longest stop since the last."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.where = ""
        self._thread = 0
        self._beat = time.monotonic()
        self._stack = ""

    def start(self, *, beats: bool) -> None:
        """Begin to watch the running event loop.

        beats: measure heartbeats too, on a quiet machine: where the kernel does not count the time
          that a thread waits for a CPU, other programs make heartbeats late.
        """
        self._thread = threading.get_ident()
        run = events.Handle._run

        def timed(handle: events.Handle) -> None:
            begun = time.thread_time()
            run(handle)
            self._note(time.thread_time() - begun, "a callback of the loop")

        events.Handle._run = timed  # type: ignore[method-assign]
        self._task = asyncio.create_task(self._beats()) if beats else None
        threading.Thread(target=self._sample, daemon=True).start()

    def take(self) -> tuple[float, str]:
        """Return the longest stop in seconds and where it was, and forget them."""
        found = self.longest_s, self.where
        self.longest_s, self.where = 0.0, ""
        return found

    def _note(self, seconds: float, what: str) -> None:
        if seconds > self.longest_s:
            self.longest_s, self.where = seconds, f"{what}\n{self._stack}"

    async def _beats(self) -> None:
        waits = _QueueTime()
        while True:
            begun, used, waited = time.monotonic(), time.process_time(), waits.read()
            await asyncio.sleep(_BEAT_S)
            self._beat = time.monotonic()
            late = self._beat - begun - _BEAT_S - (waits.read() - waited)
            self._note(min(late, time.process_time() - used), "a late heartbeat")
            self._stack = ""

    def _sample(self) -> None:
        """Keep the stacks of busy threads, if this thread gets the GIL while the loop is late."""
        while True:
            time.sleep(_SAMPLE_S)
            if time.monotonic() - self._beat > 2 * _SAMPLE_S:
                self._stack = _stacks(self._thread)


class _QueueTime:
    """For how long the thread that made this has waited for a CPU, in seconds."""

    def __init__(self) -> None:
        path = f"/proc/self/task/{threading.get_native_id()}/schedstat"
        self._file = os.open(path, os.O_RDONLY)

    def read(self) -> float:
        return int(os.pread(self._file, 100, 0).split()[1]) / 1e9


def _stacks(first: int) -> str:
    """Return the last calls of the thread `first`, and of others that do not wait for work."""
    # A frame keeps what its function used, for example the body of a request, so none stays here.
    found = {number: _calls(frame) for number, frame in sys._current_frames().items()}
    found.pop(threading.get_ident())
    order = sorted(found, key=lambda number: number != first)
    idle = ("_worker", "report")
    return "\n".join(str(found[each]) for each in order if found[each][0][1] not in idle)


def _calls(frame: FrameType | None) -> list[tuple[str, str, int]]:
    """Return the innermost calls of a thread as (file, function, line), the innermost first."""
    found = []
    while frame is not None and len(found) < 8:
        code = frame.f_code
        found.append((code.co_filename.rpartition("/src/")[2], code.co_name, frame.f_lineno))
        frame = frame.f_back
    return found
