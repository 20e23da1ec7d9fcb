"""Read a JSON object character by character, and keep its members as they are written."""

from __future__ import annotations

import string

_SPACE = " \t\r\n"
# The characters of numbers and of words: true, false, null, and the Python None.
_PLAIN = frozenset(string.ascii_letters + string.digits + "+-.")


class ObjectScanner:
    """Finds the members of one JSON object; checks the structure of the text, but no values.

    members: the characters of each value so far, by key, without white space around the value.
    ended: the key of the value that ended with the last character, or None.
    closed: whether the object has ended.
    broken: whether the last character cannot follow the characters before it.
    may_close: whether "}" may end the object here.
    """

    def __init__(self) -> None:
        self.members: dict[str, list[str]] = {}
        self.ended: str | None = None
        self.closed = False
        self.broken = False
        self._key: list[str] = []
        self._value: list[str] = []
        self._expects = "{"  # characters that may follow, or "key" or "value"
        self._depth = 0
        self._quoted = False
        self._escaped = False

    @property
    def may_close(self) -> bool:
        """Whether the last value is whole, or a number or word, so that "}" may follow."""
        inside = self._quoted or self._depth
        return self._expects == "value" and bool(self._value) and not inside

    def read(self, text: str) -> int:
        """Read up to the object's end or an invalid character; return how many are valid."""
        # The text is read by single characters, so that the result does not depend on its pieces.
        for at, char in enumerate(text):
            self.push(char)
            if self.broken:
                return at
            if self.closed:
                return at + 1
        return len(text)

    def push(self, char: str) -> None:
        """Read the next character."""
        self.ended = None
        if self._expects == "value":
            self._in_value(char)
        elif self._expects == "key":
            self._in_key(char)
        elif char not in _SPACE:
            self._between(char)

    def _between(self, char: str) -> None:
        if char not in self._expects:
            self.broken = True
        elif char == "}":
            self.closed = True
        elif char == '"':
            self._expects, self._key, self._escaped = "key", [], False
        elif char == ":":
            self._expects = "value"
            self._value = self.members["".join(self._key)] = []
        else:
            self._expects = '"}'

    def _in_key(self, char: str) -> None:
        if char == '"' and not self._escaped:
            self._expects = ":"
            return
        self._escaped = char == "\\" and not self._escaped
        self._key.append(char)

    def _in_value(self, char: str) -> None:
        if self._quoted:
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif self._depth:
            self._depth += (char in "{[") - (char in "}]")
            self._quoted, self._escaped = char == '"', False
        elif char in ",}":
            self.broken = not self._value
            self.ended, self._expects, self.closed = "".join(self._key), '"', char == "}"
            return
        elif char in _SPACE:
            return
        else:
            self.broken = not self._may_follow(char)
            if self.broken:
                return
            self._depth = int(char in "{[")
            self._quoted, self._escaped = char == '"', False
        self._value.append(char)

    def _may_follow(self, char: str) -> bool:
        """Return whether `char` begins a value, or continues a number or word."""
        if not self._value:
            return char in '"{[' or char in _PLAIN
        return char in _PLAIN and self._value[0] in _PLAIN
