"""The states of a parser in an argument that is written without quotes, between tags.

The argument is reported as JSON, with the types in the function's schema.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence

from cpuserve.serving.tools.base import new_call_id
from cpuserve.serving.tools.machine import CallParser, overlap
from cpuserve.serving.tools.thoughts import Around
from cpuserve.serving.tools.values import Types, as_json, may_be_null

_SPACE = " \t\r\n"
_LONGEST = 64  # more white space after an end tag is not waited for
_TEXT_OR_NULL = {"string", "null"}


class TypedValues(CallParser):
    """A CallParser with two states: in a string value, or in a value that is converted at its end.

    A parser sets `_types` to the types of a value before it enters one of the states.
    """

    def __init__(
        self,
        index: int,
        opening: str = "",
        new_id: Callable[[], str] = new_call_id,
        around: Around | None = None,
    ) -> None:
        self._types: Types = frozenset()
        self._value: list[str] = []  # pieces of an argument that is converted at its end
        self._is_over = False  # whether the response has ended
        super().__init__(index, opening, new_id, around)

    @abstractmethod
    def _up_to_end(self) -> tuple[str, bool]:
        """Return the part of the value that no later text can change, and whether it has ended."""

    def _in_string(self) -> bool:
        value, ended = self._up_to_end()
        self._continue_call(inside(value) + ('"' if ended else ""))
        return ended

    def _in_other(self) -> bool:
        value, ended = self._up_to_end()
        self._value.append(value)
        if ended:
            self._continue_call(self._converted("".join(self._value)))
        elif self._types != _TEXT_OR_NULL or may_be_null("".join(self._value)):
            return False
        else:
            self._continue_call('"' + inside("".join(self._value)))
            self._state = self._in_string
        self._value.clear()
        return ended

    def _converted(self, text: str) -> str:
        """Return a value that has ended as JSON."""
        return as_json(text, self._types)

    def _end_value(self) -> None:
        """Read the end of a value at the end of the response; the rest of a string is reported."""
        self._is_over = True
        if self._state == self._in_other:
            self._in_other()
        elif self._state == self._in_string and not self._in_string():
            self._continue_call(inside(self._held))

    def _certain(
        self, ends: Sequence[str], *, breaks: bool, follows: Sequence[str] = ()
    ) -> tuple[str, str | None]:
        """Return the part of a value that no later text can change, and the end that was found.

        The value ends at the first of `ends`, which stays held back; None = no end has come.
        breaks: a line break before the end does not belong to the value.
        follows: ends[0] is an end only before one of these texts and white space; a value may
          contain it, for example if a model writes a file about its own format.
        """
        held = self._held
        found = self._found_end(ends, follows)
        if found is not None and found[1] is not None:
            at, end = found
            self._held = held[at:]
            return (_without_break(held[:at]) if breaks else held[:at]), end
        # Hold back text that may be the beginning of an end, and a line break before it.
        shown = len(held) - overlap(held, ends) if found is None else found[0]
        if breaks and held[:shown].endswith(("\r", "\n")):
            shown = max(0, shown - len("\r\n"))
        self._held = held[shown:]
        return held[:shown], None

    def _found_end(
        self, ends: Sequence[str], follows: Sequence[str]
    ) -> tuple[int, str | None] | None:
        """Return the place of the first end in the held text, and this end; None = there is none.

        The end is None if it depends on later text whether it is one.
        """
        held, begin = self._held, 0
        while found := [(at, end) for end in ends if (at := held.find(end, begin)) >= 0]:
            at, end = min(found)
            behind = held[at + len(end) :]
            rest = behind.lstrip(_SPACE)
            is_end = rest.startswith(tuple(follows)) or len(behind) > _LONGEST + len(rest)
            if not follows or end != ends[0] or is_end:
                return at, end
            if any(text.startswith(rest) for text in follows):
                return at, end if self._is_over else None
            begin = at + len(end)
        return None


def inside(text: str) -> str:
    """Return `text` escaped for a JSON string, without quotes around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _without_break(text: str) -> str:
    """Return `text` without one line break at its end."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text
