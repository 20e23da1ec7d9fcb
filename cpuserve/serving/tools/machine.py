"""The state machine that parsers of tool calls share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from cpuserve.serving.events import Text, ToolCall
from cpuserve.serving.tools.base import Piece, new_call_id


class CallParser(ABC):
    """A state machine over the text of one choice; it begins in text. _forced: a call begins it.

    A state looks at the text that is held, and returns whether it has changed to another one,
    which then looks at what is left.
    """

    def __init__(
        self, index: int, opening: str = "", new_id: Callable[[], str] = new_call_id
    ) -> None:
        self.num_closed = 0
        self.last_closed = False
        self.most_calls: int | None = None
        self.num_calls = 0
        self._index = index
        self._new_id = new_id
        self._state: Callable[[], bool] = self._in_text
        self._held = ""  # text that is not decided yet
        self._pieces: list[Piece] = []
        self._forced = bool(opening)
        self._unsaid = opening  # the model has not written it: it is no text, whatever follows
        self._pieces = self.push(opening)

    def push(self, text: str) -> list[Piece]:
        """Return what can be told after `text`."""
        self._held += text
        while self._held and not self.is_full and self._state():
            pass
        return self._take()

    @property
    def is_full(self) -> bool:
        """Whether most_calls are complete."""
        return self.most_calls is not None and self.num_closed >= self.most_calls

    @abstractmethod
    def _in_text(self) -> bool:
        """The first state."""

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        if not text:
            return
        text, self._unsaid = text.removeprefix(self._unsaid), ""
        if text:
            self._pieces.append(Text(self._index, text, []))

    def _say_before(self, *markers: str) -> None:
        """Say what is held, except for its end if one of `markers` may begin there or after it."""
        held, most = self._held, max(map(len, markers)) - 1
        # White space may come before a marker, whose beginning may be here already.
        kept = len(held) - len(held.rstrip())
        for size in range(min(most, len(held)), 0, -1):
            if any(len(m) > size and held.endswith(m[:size]) for m in markers):
                kept = size + len(held[:-size]) - len(held[:-size].rstrip())
                break
        self._say(held[: len(held) - kept])
        self._held = held[len(held) - kept :]

    def _begin_call(self, name: str, arguments: str) -> None:
        """Tell of a new call, whose arguments begin with `arguments`."""
        self.num_calls += 1
        self.last_closed = False
        self._unsaid = ""
        number = self.num_calls - 1
        self._pieces.append(ToolCall(self._index, number, arguments, self._new_id(), name))

    def _close_call(self) -> None:
        """Count the last call as complete."""
        self.num_closed += 1
        self.last_closed = True

    def _continue_call(self, arguments: str) -> None:
        """Tell more of the last call's arguments."""
        if arguments:
            self._pieces.append(ToolCall(self._index, self.num_calls - 1, arguments))
