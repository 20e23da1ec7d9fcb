"""Calls that are JSON objects: a reader of one object, grammars, and a base class of parsers."""

from __future__ import annotations

import json
import re
import string

from cpuserve.sampling.grammar_marks import PARAMETERS_OF, WHITE_SPACE
from cpuserve.serving.tools.base import JsonSchema, OptionalSchemas
from cpuserve.serving.tools.machine import CallParser

_SPACE = " \t\r\n"
# The members that may hold the arguments; the member that the model writes first counts.
_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")  # Cohere writes tool_name
USUAL_SPACE = f"({WHITE_SPACE})?"
# The characters of numbers and of words: true, false, null, and the Python None.
_PLAIN = frozenset(string.ascii_letters + string.digits + "+-.")


def text_call_rules(
    schemas: OptionalSchemas, key: str, before: str, inside: str = USUAL_SPACE
) -> list[str]:
    """Return the Lark rules of calls in text: objects with the arguments as member `key`.

    before, inside: regular expressions of the white space before an object,
    and inside it before the name. Some models write `"type": "function"` before the name.
    """
    space = USUAL_SPACE
    kind = f'("type"{inside}:{inside}"function"{inside},{inside})?'
    rules = [
        f'middle: /{space},{space}"{key}"{space}:{space}/',
        rf"end: /{space}\}}/",
        *arguments_rules(schemas),
    ]
    for i, (name, schema) in enumerate(schemas.items()):
        named = f'"name"{inside}:{inside}"{re.escape(name)}"'
        rules.append(f"call_{i}: head_{i} middle {arguments_rule(i, schema)} end")
        rules.append(rf"head_{i}[lazy]: /{before}\{{{inside}{kind}{named}/")
    return rules


def arguments_rule(index: int, schema: JsonSchema | None) -> str:
    """Return the name of the Lark rule for the arguments of function number `index`."""
    return "free" if schema is None else f"arguments_{index}"


def arguments_rules(schemas: OptionalSchemas) -> list[str]:
    """Return the Lark rules of the arguments of all functions in `schemas`."""
    rules = [
        object_rule(arguments_rule(i, schema), schema) + PARAMETERS_OF + name
        for i, (name, schema) in enumerate(schemas.items())
        if schema is not None
    ]
    if None in schemas.values():  # many functions share this rule, which makes the grammar small
        rules.append(object_rule("free", {}))
    return rules


def object_rule(name: str, schema: JsonSchema) -> str:
    """Return the Lark rule of a JSON object of a schema."""
    options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f"{name}: %json {json.dumps({'type': 'object', **schema, **options})}"


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


class JsonCall:
    """The object of one call: {"name": ..., "arguments": ...} in any order.

    broken: whether the text so far cannot be the beginning of such an object.
    """

    def __init__(self) -> None:
        self.raw: list[str] = []
        self.name = ""
        self.told = False
        self.broken = False
        self._scanner = ObjectScanner()
        self._arguments: list[str] | None = None
        self._num_taken = 0

    @property
    def closed(self) -> bool:
        """Whether the object has ended."""
        return self._scanner.closed

    @property
    def lacks_end(self) -> bool:
        """Whether another character came where "}" could have ended the object."""
        return self.broken and self._scanner.may_close

    @property
    def has_arguments(self) -> bool:
        """Whether the arguments have begun."""
        return self._arguments is not None

    def read(self, text: str) -> int:
        """Read up to the object's end or an invalid character; return how many are valid."""
        # The text is read by single characters, so that the result does not depend on its pieces.
        for at, char in enumerate(text):
            self._push(char)
            if self.broken:
                return at
            self.raw.append(char)
            if self.closed:
                return at + 1
        return len(text)

    def close(self) -> None:
        """End an object although its last "}" is missing (`lacks_end`)."""
        self._push("}")

    def _push(self, char: str) -> None:
        scanner = self._scanner
        scanner.push(char)
        self.broken = scanner.broken
        if self._arguments is None:
            members = scanner.members
            self._arguments = next((members[key] for key in _ARGUMENTS if key in members), None)
        if scanner.ended in _NAMES and not self.name:
            name = _decoded("".join(scanner.members[scanner.ended]))
            self.name = name if isinstance(name, str) else ""
            self.broken = self.broken or not self.name

    def take_arguments(self) -> str:
        """Return the part of the arguments that was not taken yet; "{}" if there are none."""
        written = self._arguments
        if not written or written[0] != "{":
            # Some models write the arguments as a JSON string, or leave them out.
            # Which of these cases applies is known only when the object has ended.
            return _unpacked("".join(written or ())) if self.closed else ""
        new, self._num_taken = written[self._num_taken :], len(written)
        return "".join(new)


class KeyedCall(JsonCall):
    """The object {NAME: arguments} of one call."""

    def _push(self, char: str) -> None:
        scanner = self._scanner
        scanner.push(char)
        self.broken = scanner.broken
        if scanner.members and not self.name:
            self.name, self._arguments = next(iter(scanner.members.items()))
            self.broken = self.broken or not self.name


class JsonCallParser(CallParser):
    """A parser of calls that are JSON objects, or that have JSON objects as arguments."""

    _call: JsonCall | None = None  # the object of the current call
    _scanner = ObjectScanner()  # reads the object of the current arguments

    def _arguments_end(self) -> bool:
        """Report the next part of arguments; return whether the object ended, or is broken."""
        text, scanner = self._held, self._scanner
        told = scanner.read(text)
        self._continue_call(text[:told])
        self._held = text[told:]
        return scanner.broken or scanner.closed

    def _tell(self, call: JsonCall) -> None:
        """Report the new part of a call's arguments, once the function name is known."""
        if not call.name:
            return
        new = call.take_arguments()
        if call.told:
            self._continue_call(new)
        else:
            call.told = True
            self._begin_call(call.name, new)


def _unpacked(written: str) -> str:
    value = _decoded(written)
    return value if isinstance(value, str) and value else "{}"


def _decoded(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):  # a model may nest lists thousands of times
        return None
    return value
