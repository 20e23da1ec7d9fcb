"""The grammars that wait for compilation: a bounded queue where callers take turns.

The engine's thread adds and drops grammars, and another thread takes them.
The grammars of one caller are compiled in the order of arrival.
The callers are served in turn, so that no caller waits for all grammars of another caller.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Generic, TypeVar

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
        self._of: OrderedDict[str, deque[T]] = OrderedDict()
        self._num = 0
        self._closed = False

    def check(self, caller: str) -> None:
        """Raise QueueFull if the queue is full, or the part of it that one caller may use.

        caller: "" = the program that runs the engine, which has no limit.
        """
        if not caller:
            return
        with self._changed:
            mine = len(self._of.get(caller, ()))
            if self._num >= MAX_WAITING:
                msg = f"{self._num} other forms wait to be compiled, and the limit is {MAX_WAITING}"
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
            self._of.setdefault(caller, deque()).append(grammar)
            self._num += 1
            self._changed.notify()

    def drop(self, grammar: T) -> bool:
        """Remove a grammar; False if it does not wait (any more)."""
        with self._changed:
            for caller, waiting in self._of.items():
                if grammar in waiting:
                    waiting.remove(grammar)
                    self._num -= 1
                    if not waiting:
                        del self._of[caller]
                    return True
        return False

    def take(self) -> T | None:
        """Wait for the next grammar and remove it; None = the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._of)
            if self._closed:
                return None
            caller, waiting = next(iter(self._of.items()))
            grammar = waiting.popleft()
            self._num -= 1
            if waiting:
                self._of.move_to_end(caller)
            else:
                del self._of[caller]
            return grammar

    def close(self) -> None:
        """Let `take` return None from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
