"""The state machine that parsers of LayoutFormats share; it reads the layout's texts."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Callable, Sequence

from cpuserve.serving.tools.layout import ID, NAME, LayoutFormat
from cpuserve.serving.tools.machine import CallParser

_SPACE = " \t\r\n"
_ID = re.compile(r"[A-Za-z0-9_.:-]*")
_INDEXED = re.compile(r"(.+):(\d+)")
_LONGEST = 160


class LayoutParser(CallParser):
    """A parser with four states: in text, in the layout's texts, in a name, or in arguments.

    If the text differs from the layout before the arguments begin, it is reported as text.
    """

    _format: LayoutFormat
    _todo: Sequence[str] = ()  # chunks of the layout that must follow now
    _name = ""
    _given = ""  # the id of the call, if the model has written one
    _is_in_section = False  # True: a further call may follow without the section's text
    _num_arguments = 0  # how many keys `_tell_key` has reported

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

    def _at_marker(self, marker: str) -> None:
        opens = self._format.opens
        self._expect(opens[opens.index(marker) + 1 :], self._await_call)

    def _await_call(self) -> None:
        self._state = self._at_call

    def _await_arguments(self) -> None:
        self._state = self._at_arguments

    def _expect(self, todo: Sequence[str], then: Callable[[], None]) -> None:
        """Read the chunks `todo`, then call `then`, which chooses the next state."""
        self._todo, self._then, self._state = todo, then, self._in_fixed
        if not todo:
            then()

    def _in_fixed(self) -> bool:
        """Read the first of the chunks `_todo`, which must follow now."""
        self._skip_space()
        held, chunk = self._held, self._todo[0]
        if chunk == NAME:
            chunk = self._name
        if chunk == ID:
            found = _ID.match(held)
            chunk = found[0] if found is not None else ""
            if len(chunk) >= _LONGEST:  # wherever the text is divided
                return self._text_again()
            if chunk == held:
                return False
            self._given = chunk
        if not held.startswith(chunk) or not chunk:
            return not chunk.startswith(held) and self._text_again()
        self._lead.append(chunk)
        self._held = held[len(chunk) :]
        self._todo = self._todo[1:]
        if not self._todo:
            self._then()
        return True

    def _skip_space(self) -> None:
        """Skip white space before a part of a call; `_lead` keeps it in case it becomes text."""
        rest = self._held.lstrip(_SPACE)
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
        found = self._format.names.match(self._held)
        name = found[0] if found is not None else ""
        if name == self._held and len(name) < _LONGEST:
            return False
        if not name or len(name) >= _LONGEST:
            return self._text_again()
        self._lead.append(name)
        self._held = self._held[len(name) :]
        todo = self._format.middle
        if self._format.layout.ids == "indexed":
            indexed = _INDEXED.fullmatch(name)
            self._given = f"functions.{name}" if indexed else ""
            name, todo = indexed[1] if indexed else name, todo[2:]
        self._name = name
        self._expect(todo, self._await_arguments)
        return True

    @abstractmethod
    def _at_arguments(self) -> bool:
        """Report the beginning of the call, and read its arguments."""

    def _begin_arguments(self) -> None:
        """Report the beginning of a call, with arguments that the parser converts to JSON."""
        self._begin_call(self._name, "{")
        self._num_arguments = 0

    def _tell_key(self, key: str, value: str = "") -> None:
        """Report the key of the next argument, and `value`: its value in JSON, if it is known."""
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        self._continue_call(f"{comma}{json.dumps(key)}: {value}")

    def _give_up(self) -> bool:
        """Leave a call that has begun, because it does not follow the format; the rest is text."""
        self._state = self._in_text
        return True

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
        tails = [again, *found.tails] if again else found.tails
        for chunk in tails:
            if held.startswith(chunk):
                self._lead.clear()
                self._held = held[len(chunk) :]
                if chunk == again:
                    self._lead.append(chunk)
                    self._expect(found.again[1:], self._await_call)
                elif found.closes_each:
                    self._state = self._in_text
                return True
        if any(chunk.startswith(held) for chunk in tails):
            return False  # more text may complete the chunk
        return self._text_again()
