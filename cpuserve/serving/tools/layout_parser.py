"""The state machine that parsers of LayoutFormats share; it reads the layout's texts."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from cpuserve.serving.tools.layout import ID, NAME
from cpuserve.serving.tools.machine import CallParser
from cpuserve.serving.tools.thoughts import Around

if TYPE_CHECKING:
    from cpuserve.serving.tools.base import Schemas
    from cpuserve.serving.tools.layout import LayoutFormat

SPACE = " \t\r\n"
_NAME = re.compile(r"[A-Za-z0-9_.:-]*")
_INDEXED = re.compile(r"(.+):(\d+)")
_LONGEST = 160


class LayoutParser(CallParser):
    """A parser with four states: in text, in the layout's texts, in a name, or in arguments.

    If the text differs from the layout before the arguments begin, it is reported as text.
    """

    def __init__(
        self,
        found: LayoutFormat,
        index: int,
        opening: str = "",
        schemas: Schemas | None = None,
        around: Around | None = None,
    ) -> None:
        self._format = found
        self._schemas = schemas or {}
        self.markers = (found.opens[0],)
        self._todo: list[str] = []  # chunks of the layout that must follow now
        self._then: Callable[[], bool] = self._in_text  # the state after these chunks
        self._name = ""
        self._given = ""  # the id of the call, if the model has written one
        self._is_in_section = False  # True: a further call may follow without the section's text
        super().__init__(index, opening, self._id, around)

    def may_stop(self, char: str) -> bool:
        """Return whether the next character may be a part of a stop string; False in headers."""
        is_header = self._state in (self._in_fixed, self._at_call)
        return not (is_header and self._around.turns is not None) and super().may_stop(char)

    def _id(self) -> str:
        if self._given and self._format.layout.ids in ("given", "indexed"):
            return self._given
        if self._format.layout.ids == "indexed":
            return f"functions.{self._name}:{self.num_calls - 1}"
        return self._format.layout.new_id()

    def _end(self) -> None:
        """Report the held-back text; drop the beginning of an incomplete call."""
        undecided = (self._in_fixed, self._at_call, self._at_arguments)
        if self._state in (self._in_text, self._in_thought) or (
            self._state in undecided and not self._begins_call()
        ):
            self._say_lead(self._held)

    def _begins_call(self) -> bool:
        """Return whether the held-back text, which has a marker, begins a call.

        Texts may begin with the marker too if it is "[", or the header that the prompt has begun.
        Then a call is a header with the beginning of an offered function's name.
        """
        layout, turns = self._format.layout, self._around.turns
        marker = "" if turns is None else turns.begun
        if not marker and self._format.opens != ["["]:
            return True
        written = ("".join(self._lead) + self._held).lstrip().removeprefix(marker)
        before, names = layout.opening, self._around.functions or frozenset(self._schemas)
        if not written.startswith(before):
            return bool(written.strip()) and before.startswith(written)
        name = written.removeprefix(before)
        return any(one.startswith(name) or name.startswith(one) for one in names)

    def _at_marker(self, marker: str) -> None:  # noqa: ARG002
        self._expect(self._format.opens[1:], self._at_call)

    def _expect(self, todo: list[str], then: Callable[[], bool]) -> None:
        """Read the chunks `todo`, then go on with the state `then`."""
        self._todo, self._then, self._state = list(todo), then, self._in_fixed
        if not todo:
            self._state = then

    def _in_fixed(self) -> bool:
        """Read the first of the chunks `_todo`, which must follow now."""
        self._skip_space()
        held, chunk = self._held, self._todo[0]
        if chunk == NAME:
            chunk = self._name
        if chunk == ID:
            found = _NAME.match(held)
            chunk = found[0] if found is not None else ""
            if chunk == held and len(chunk) < _LONGEST:
                return False
            self._given = chunk
        if not held.startswith(chunk) or not chunk:
            return not chunk.startswith(held) and self._text_again()
        self._lead.append(chunk)
        self._held = held[len(chunk) :]
        del self._todo[0]
        if not self._todo:
            self._state = self._then
        return True

    def _skip_space(self) -> None:
        """Skip white space before a part of a call; `_lead` keeps it in case it becomes text."""
        rest = self._held.lstrip(SPACE)
        if len(rest) < len(self._held):
            self._lead.append(self._held[: len(self._held) - len(rest)])
            self._held = rest

    def _text_again(self) -> bool:
        """Report the possible beginning of a call as text, because no call follows."""
        self._is_in_section = False
        self._say_lead()
        self._state = self._in_text
        return True

    def _at_call(self) -> bool:
        """Read the name, which follows the beginning of a call."""
        self._skip_space()
        found = _NAME.match(self._held)
        name = found[0] if found is not None else ""
        if name == self._held and len(name) < _LONGEST:
            return False
        if not name or len(name) >= _LONGEST:
            return self._text_again()
        self._lead.append(name)
        self._held = self._held[len(name) :]
        todo = self._format.writing.fixed(self._format.layout.middle)
        if self._format.layout.ids == "indexed":
            indexed = _INDEXED.fullmatch(name)
            self._given = f"functions.{name}" if indexed else ""
            name, todo = indexed[1] if indexed else name, todo[2:]
        self._name = name
        self._expect(todo, self._at_arguments)
        return True

    @abstractmethod
    def _at_arguments(self) -> bool:
        """Report the beginning of the call, and read its arguments."""

    def _finish_call(self) -> None:
        """Count the call as complete, and choose the next state."""
        self._close_call()
        self._given = ""
        self._is_in_section = bool(self._format.again)
        self._state = self._after_call

    def _after_call(self) -> bool:
        """Drop the chunks that the layout has after a call; report any other text as text."""
        self._skip_space()
        held, found = self._held, self._format
        if not held:
            return False
        again = found.again[0] if self._is_in_section and found.again else ""
        for chunk in (again, *found.tails):
            if chunk and held.startswith(chunk):
                self._lead.clear()
                self._held = held[len(chunk) :]
                if chunk == again:
                    self._lead.append(chunk)
                    self._expect(found.again[1:], self._at_call)
                return True
        if any(chunk.startswith(held) for chunk in (again, *found.tails) if chunk):
            return False  # more text may complete the chunk
        return self._text_again()
