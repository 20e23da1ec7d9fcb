"""Hermes' format, which Qwen and many fine-tunes use: JSON objects between two markers.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

White space beside a call belongs to the format and is dropped. The arguments pass on as they are
written, as soon as the name is known. What is no call passes on as text, with its marker.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from cpuserve.serving.events import Text, ToolCall
from cpuserve.serving.tools.base import Piece, new_call_id
from cpuserve.serving.tools.json_scan import ObjectScanner

OPEN, CLOSE = "<tool_call>", "</tool_call>"


class Hermes:
    """The format."""

    name = "hermes"
    markers = frozenset({OPEN, CLOSE})

    def matches(self, template: str) -> bool:
        """Return whether the template has the marker."""
        return OPEN in template

    def opening(self, function: str | None) -> str:
        """Return the beginning of a call. It ends where the tokens of such a call do."""
        if function is None:
            return f'{OPEN}\n{{"name": "'
        return f'{OPEN}\n{{"name": {json.dumps(function)}, "arguments":'

    def parser(self, index: int, opening: str = "") -> HermesParser:
        """Return a parser for choice `index`, whose text continues `opening`."""
        return HermesParser(index, opening)


HERMES = Hermes()


class HermesParser:
    """A state machine: in text, in a call's object, or between the object and its end marker."""

    def __init__(
        self, index: int, opening: str = "", new_id: Callable[[], str] = new_call_id
    ) -> None:
        self.num_closed = 0
        self.num_calls = 0
        self._index = index
        self._new_id = new_id
        self._state = self._in_text
        self._held = ""  # text that is not decided yet
        self._call: _Call | None = None
        self._pieces: list[Piece] = []
        self._pieces = self.push(opening)

    def push(self, text: str) -> list[Piece]:
        """Return what can be told after `text`."""
        self._held += text
        # A state returns whether it has changed to another, which then looks at what is left.
        while self._held and self._state():
            pass
        return self._take()

    def flush(self) -> list[Piece]:
        """Return what was held back: text, or a call that never became one."""
        if self._call is not None and not self._call.name:
            self._say(OPEN + "".join(self._call.raw))
        held, self._held = self._held, ""
        if self._state == self._in_text and (held.strip() or not self.num_calls):
            self._say(held)
        self._call = None
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        if text:
            self._pieces.append(Text(self._index, text, []))

    def _in_text(self) -> bool:
        held, at = self._held, self._held.find(OPEN)
        if at >= 0:
            if text := held[:at].rstrip():
                self._say(text)
            self._held = held[at + len(OPEN) :]
            self._call, self._state = _Call(), self._in_call
            return True
        # White space may come before a marker, whose beginning may be here already.
        kept = len(held) - len(held.rstrip())
        for size in range(min(len(OPEN) - 1, len(held)), 0, -1):
            if held.endswith(OPEN[:size]):
                kept = size + len(held[:-size]) - len(held[:-size].rstrip())
                break
        self._say(held[: len(held) - kept])
        self._held = held[len(held) - kept :]
        return False

    def _in_call(self) -> bool:
        call, text = self._call, self._held
        assert call is not None
        self._held = text[call.read(text) :]
        self._tell(call)
        if not (call.closed or call.broken):
            return False
        self._call = None
        if call.name and call.closed:
            self.num_closed += 1
            self._state = self._after_call
        else:
            self._state = self._in_text
            if not call.name:
                self._say(OPEN + "".join(call.raw))
        return True

    def _tell(self, call: _Call) -> None:
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

    def _after_call(self) -> bool:
        held = self._held.lstrip()
        if held.startswith(CLOSE):
            self._held = held[len(CLOSE) :].lstrip()
            self._state = self._between
            return True
        if CLOSE.startswith(held):
            self._held = held
            return False
        self._state = self._between
        return True

    def _between(self) -> bool:
        """Drop white space after a call; anything else is text again."""
        self._held = self._held.lstrip()
        if self._held:
            self._state = self._in_text
        return bool(self._held)


class _Call:
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
        written = members.get("arguments", members.get("parameters", []))
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
