"""Calls as JSON objects: reading one, and what the parsers of formats with such calls share."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from cpuserve.sampling.structured import WHITE_SPACE
from cpuserve.serving.events import Text, ToolCall
from cpuserve.serving.tools.base import JsonSchema, Piece, new_call_id
from cpuserve.serving.tools.json_scan import ObjectScanner

# The members that may hold the arguments; the first one counts.
_ARGUMENTS = ("arguments", "parameters")


def call_grammar(schemas: Mapping[str, JsonSchema], function: str | None, key: str) -> str:
    """Return the Lark grammar of the rest of an object whose arguments are its member `key`.

    It follows `"KEY":` if `function` is named, else the quotation mark before the name.
    """
    options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    rules = ["start: " + " | ".join(f"call_{i}" for i in range(len(schemas)))]
    for i, (name, schema) in enumerate(schemas.items()):
        begin = "" if function is not None else json.dumps(f'{name}", "{key}":')
        rules.append(f'call_{i}: {begin} " "? arguments_{i} "}}"')
        rules.append(f"arguments_{i}: %json {json.dumps({'type': 'object', **schema, **options})}")
    return "\n".join(rules)


class JsonCallParser(ABC):
    """A state machine over the text of one choice; it begins in text. _forced: a call begins it.

    A state looks at the text that is held, and returns whether it has changed to another one,
    which then looks at what is left.
    """

    def __init__(
        self, index: int, opening: str = "", new_id: Callable[[], str] = new_call_id
    ) -> None:
        self.num_closed = 0
        self.num_calls = 0
        self._index = index
        self._new_id = new_id
        self._state: Callable[[], bool] = self._in_text
        self._held = ""  # text that is not decided yet
        self._call: JsonCall | None = None
        self._pieces: list[Piece] = []
        self._forced = bool(opening)
        self._pieces = self.push(opening)

    def push(self, text: str) -> list[Piece]:
        """Return what can be told after `text`."""
        self._held += text
        while self._held and self._state():
            pass
        return self._take()

    @abstractmethod
    def _in_text(self) -> bool:
        """The first state."""

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(Text(self._index, text, []))

    def _say_before(self, marker: str) -> None:
        """Say what is held, except for its end if `marker` may begin there or after it."""
        held = self._held
        # White space may come before a marker, whose beginning may be here already.
        kept = len(held) - len(held.rstrip())
        for size in range(min(len(marker) - 1, len(held)), 0, -1):
            if held.endswith(marker[:size]):
                kept = size + len(held[:-size]) - len(held[:-size].rstrip())
                break
        self._say(held[: len(held) - kept])
        self._held = held[len(held) - kept :]

    def _tell(self, call: JsonCall) -> None:
        """Pass on what is new of a call whose name is known."""
        if not call.name:
            return
        new = call.take_arguments()
        if not call.told:
            call.told = True
            self.num_calls += 1
            number = self.num_calls - 1
            self._pieces.append(ToolCall(self._index, number, new, self._new_id(), call.name))
        elif new:
            self._pieces.append(ToolCall(self._index, self.num_calls - 1, new))


class JsonCall:
    """The object of one call: {"name": ..., "arguments": ...} in any order.

    broken: the text so far is no such object.
    """

    def __init__(self) -> None:
        self.raw: list[str] = []
        self.name = ""
        self.told = False
        self.broken = False
        self._scanner = ObjectScanner()
        self._num_taken = 0

    @property
    def closed(self) -> bool:
        """Whether the object has ended."""
        return self._scanner.closed

    @property
    def has_arguments(self) -> bool:
        """Whether the arguments have begun."""
        return not self._scanner.members.keys().isdisjoint(_ARGUMENTS)

    def read(self, text: str) -> int:
        """Read `text` up to the end of the object, or to what cannot be there; return where."""
        # One character at a time, so that nothing depends on where the text is cut.
        for at, char in enumerate(text):
            self._push(char)
            if self.broken:
                return at
            self.raw.append(char)
            if self.closed:
                return at + 1
        return len(text)

    def _push(self, char: str) -> None:
        scanner = self._scanner
        scanner.push(char)
        self.broken = scanner.broken
        if scanner.ended == "name" and not self.name:
            name = _decoded("".join(scanner.members["name"]))
            self.name = name if isinstance(name, str) else ""
            self.broken = self.broken or not self.name

    def take_arguments(self) -> str:
        """Return the part of the arguments that was not taken yet; "{}" if there are none."""
        members = self._scanner.members
        written = next((members[key] for key in _ARGUMENTS if key in members), [])
        if not written or written[0] != "{":
            # Some models write a string of JSON, or nothing: that is known at the end.
            return _unpacked("".join(written)) if self.closed else ""
        new, self._num_taken = written[self._num_taken :], len(written)
        return "".join(new)


def _unpacked(written: str) -> str:
    value = _decoded(written)
    return value if isinstance(value, str) and value else "{}"


def _decoded(text: str) -> object:
    try:
        value: object = json.loads(text)
    except ValueError:
        return None
    return value
