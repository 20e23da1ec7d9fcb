"""The grammars that wait for compilation: a bounded queue where callers take turns.

The engine's thread adds and drops grammars, and the threads that compile take them.
The grammars of one caller are compiled one after another in the order of arrival, and another
caller's grammar meanwhile (CallerPlaces). A turn costs the time that the compilation took,
so that no caller waits for all grammars, or all slow ones, of two other callers.
"""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from cpuserve.core.places import CallerPlaces

T = TypeVar("T")

# Most grammars take 10 ms of CPU time to compile, and some take 3 s. A caller that sends more than
# MAX_OF_CALLER new grammars at a time is a batch job, which can wait until some are compiled.
MAX_WAITING = 64
MAX_OF_CALLER = 32
AT_A_TIME = 2  # how many grammars are compiled at the same time, each of another caller


class QueueFull(Exception):
    """Too many grammars wait; the message says how many, and whether one client sent them."""


class GrammarQueue(Generic[T]):
    """The waiting grammars of each caller; a grammar is in the queue at most once."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._places: CallerPlaces[T] = CallerPlaces(AT_A_TIME)
        self._closed = False

    def __len__(self) -> int:
        return len(self._places)

    def check(self, caller: str) -> None:
        """Raise QueueFull if the queue is full, or the part of it that one caller may use.

        A caller with less than its share of a full queue is admitted, up to twice the limit.

        caller: "" = the program that runs the engine, which has no limit.
        """
        if not caller:
            return
        with self._changed:
            mine, num = self._places.waiting(caller), len(self._places)
            share = MAX_WAITING // (self._places.num_callers + (not mine))
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
            self._places.put(caller, grammar, 0.0)
            self._changed.notify_all()

    def drop(self, grammar: T) -> bool:
        """Remove a grammar; False if it does not wait (any more)."""
        with self._changed:
            return self._places.remove(grammar)

    def take(self) -> tuple[str, T] | None:
        """Wait for the next grammar and remove it; return (its caller, the grammar).

        The caller has one of the places to compile until `took`. None = the queue is closed.
        """
        with self._changed:
            while not self._closed:
                if (taken := self._places.take()) is not None:
                    return taken
                self._changed.wait()
            return None

    def took(self, caller: str, seconds: float) -> None:
        """Note that the grammar of this caller was compiled, and count the seconds it took."""
        with self._changed:
            self._places.charge(caller, seconds)
            self._places.leave(caller)
            self._changed.notify_all()

    def close(self) -> None:
        """Let `take` return None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
