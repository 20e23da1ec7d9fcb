"""Read a JSON object character by character, and keep its members as they are written."""

from __future__ import annotations

_SPACE = " \t\r\n"


class ObjectScanner:
    """Finds the members of one object. It checks the structure of the text, not its values.

    members: the characters of each value so far, by key, without white space around the value.
    ended: the key whose value ended with the last character, or None. closed: the object has
    ended. broken: the last character cannot be there.
    """

    def __init__(self) -> None:
        self.members: dict[str, list[str]] = {}
        self.ended: str | None = None
        self.closed = False
        self.broken = False
        self._key = ""
        self._value: list[str] = []
        self._expects = "{"  # the characters that may come, or "key" or "value"
        self._depth = 0
        self._quoted = False
        self._escaped = False

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
            self._expects, self._key, self._escaped = "key", "", False
        elif char == ":":
            self._expects = "value"
            self._value = self.members[self._key] = []
        else:
            self._expects = '"}'

    def _in_key(self, char: str) -> None:
        if char == '"' and not self._escaped:
            self._expects = ":"
            return
        self._escaped = char == "\\" and not self._escaped
        self._key += char

    def _in_value(self, char: str) -> None:
        if self._quoted:
            self._quoted = self._escaped or char != '"'
            self._escaped = char == "\\" and not self._escaped
        elif self._depth:
            self._depth += (char in "{[") - (char in "}]")
            self._quoted, self._escaped = char == '"', False
        elif char in ",}":
            self.broken = not self._value
            self.ended, self._expects, self.closed = self._key, '"', char == "}"
            return
        elif char in _SPACE:
            return
        else:
            self.broken = char == "]"
            self._depth = int(char in "{[")
            self._quoted, self._escaped = char == '"', False
        self._value.append(char)
