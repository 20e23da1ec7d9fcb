"""The grammars that wait for compilation: a bounded queue where callers take turns.

The engine's thread adds and drops grammars, and another thread takes them.
The grammars of one caller are compiled in the order of arrival. A turn costs the time that
the compilation took, so that no caller waits for all grammars, or all slow ones, of another caller.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from cpuserve.core.turns import CallerTurns

T = TypeVar("T")

# Most grammars take 10 ms of CPU time to compile, and some take 3 s. A caller that sends more than
# MAX_OF_CALLER new grammars at a time is a batch job, which can wait until some are compiled.
MAX_WAITING = 64
MAX_OF_CALLER = 32


class QueueFull(Exception):
    """Too many grammars wait; the message says how many, and whether one client sent them."""


class GrammarQueue(Generic[T]):
    """The waiting grammars of each caller; a grammar is in the queue at most once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._turns: CallerTurns[T] = CallerTurns()
        self._taken_for = ""  # the caller of the grammar that was taken last
        self._closed = False

    def __len__(self) -> int:
        return len(self._turns)

    def check(self, caller: str) -> None:
        """Raise QueueFull if the queue is full, or the part of it that one caller may use.

        A caller with less than its share of a full queue is admitted, up to twice the limit.

        caller: "" = the program that runs the engine, which has no limit.
        """
        if not caller:
            return
        with self._changed:
            mine, num = self._turns.count(caller), len(self._turns)
            share = MAX_WAITING // (self._turns.num_callers + (not mine))
            if num >= MAX_WAITING and not (mine < share and num < 2 * MAX_WAITING):
                msg = f"{num} other forms wait to be compiled, and the limit is {MAX_WAITING}"
                raise QueueFull(msg)
            if mine >= MAX_OF_CALLER:
                msg = (
                    f"{mine} other forms of this client wait to be compiled, and a client's limit "
                    f"is {MAX_OF_CALLER}"
                )
                raise QueueFull(msg)

    def put(self, grammar: T, caller: str) -> None:
        """Add a grammar of this caller, even if the queue is full."""
        with self._changed:
            self._turns.put(caller, grammar, 0.0)
            self._changed.notify()

    def drop(self, grammar: T) -> bool:
        """Remove a grammar; False if it does not wait (any more)."""
        with self._changed:
            return self._turns.remove(grammar)

    def take(self) -> T | None:
        """Wait for the next grammar and remove it; None = the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._turns)
            if self._closed:
                return None
            self._taken_for, grammar = self._turns.take()
            return grammar

    def took(self, seconds: float) -> None:
        """Count the seconds that the grammar of the last `take` took to compile."""
        with self._changed:
            self._turns.charge(self._taken_for, seconds)

    def close(self) -> None:
        """Let `take` return None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
