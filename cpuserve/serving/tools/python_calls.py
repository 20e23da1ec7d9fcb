"""Calls as Python writes them, which several families use.

    <|tool_call_start|>[get_weather(city="Paris", days=[1, 2]), other()]<|tool_call_end|>

The parser converts the arguments to JSON, and reports each argument when it has ended.
Templates do not escape strings, so a quotation mark ends a string only where the value may end.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cpuserve.serving.tools.base import OptionalSchemas
from cpuserve.serving.tools.layout import Writing, lark
from cpuserve.serving.tools.layout_parser import LayoutParser
from cpuserve.serving.tools.value_rules import PYTHON_VALUES, call_rules
from cpuserve.serving.tools.values import (
    as_json,
    json_of_python,
    property_schema,
    text_of_python,
    types_of,
)

_SPACE = " \t\r\n"
_LONGEST_KEY = 160


class PythonParser(LayoutParser):
    """A LayoutParser with two states in the arguments: in a key (or before it), or in a value."""

    _depth = 0
    _quote = ""  # the quotation mark that ends the current string
    _escaped = False
    _is_begun = False  # True: the value has a character that is not white space
    _may_end = False  # True: the last character was a quote that may end the string
    _has_begun = False  # True: a text has begun, so no call can follow if _is_bare

    def _prepare(self) -> None:
        self._key: list[str] = []
        self._value: list[str] = []
        self._is_bare = self._format.opens[0] == "["  # if true, calls can only begin a response

    def _in_text(self) -> bool:
        if not self._is_bare:
            return super()._in_text()
        self.markers = ()
        rest = self._held.lstrip(_SPACE)
        if not self._has_begun and not rest.startswith(self._tags.open):
            if not rest:
                self._say(self._held)
                self._held = ""
            if self._tags.open.startswith(rest):
                return False
            if rest[0] == "[":
                self._say(self._held[: len(self._held) - len(rest)])
                self._held = rest[1:]
                self._lead.append("[")
                self._at_marker("[")
                return True
            self._has_begun = True
        return super()._in_text()

    def _text_again(self) -> bool:
        self._has_begun = True
        return super()._text_again()

    def _after_call(self) -> bool:
        """Begin another call at a comma, or at a name if the layout has no commas."""
        self._skip_space()
        char = self._held[:1]
        has_commas = "," in self._format.layout.between
        if char == "," or (char.isalpha() and not has_commas and not self._is_bare):
            if char == ",":
                self._lead.append(char)
                self._held = self._held[1:]
            self._state = self._at_call
            return True
        return super()._after_call()

    def _at_arguments(self) -> bool:
        if self._is_bare and self._schemas and self._name not in self._schemas:
            return self._text_again()
        self._begin_arguments()
        self._key, self._state = [], self._in_key
        return True

    def _in_key(self) -> bool:
        """Read up to the value of an argument, or to the end of the call."""
        for at, char in enumerate(self._held):
            if char == ")" and not self._key:
                self._held = self._held[at + 1 :]
                self._continue_call("}")
                self._finish_call()
                return True
            if char == "=" and self._key:
                self._held = self._held[at + 1 :]
                self._value, self._depth, self._quote = [], 0, ""
                self._escaped = self._may_end = self._is_begun = False
                self._state = self._in_value
                return True
            if char.isalnum() or char in "_-.$":
                self._key.append(char)
            if not (char.isalnum() or char in "_-.$, \t\r\n") or len(self._key) > _LONGEST_KEY:
                self._held = self._held[at:]
                return self._give_up()
        self._held = ""
        return False

    def _in_value(self) -> bool:
        for at, char in enumerate(self._held):
            if self._is_over(char):
                self._tell_value()
                self._held = self._held[at:]
                self._key, self._state = [], self._in_key
                return True
            self._value.append(char)
        self._held = ""
        return False

    def _is_over(self, char: str) -> bool:
        """Read a character of a value; return whether `char` is the first one after the value."""
        if self._quote:
            if not self._may_end:
                self._may_end = char == self._quote and not self._escaped
                self._escaped = char == "\\" and not self._escaped
                return False
            if char in _SPACE:
                return False
            self._may_end = char == self._quote  # the string goes on after any other character
            if char not in ",)]}:":
                return False
            self._quote, self._may_end = "", False
        is_first, self._is_begun = not self._is_begun, self._is_begun or char not in _SPACE
        if char in "'\"" and (self._depth or is_first):
            self._quote, self._escaped = char, False
        elif char in "([{":
            self._depth += 1
        elif char in ")]}":
            if not self._depth:
                return char == ")"
            self._depth -= 1
        return char == "," and not self._depth

    def _tell_value(self) -> None:
        """Report an argument as JSON of the type that its schema requires."""
        schema, key = self._schemas.get(self._name, {}), "".join(self._key)
        types = types_of(property_schema(schema, key), schema)
        self._tell_key(key, _value("".join(self._value).strip(), types))


class Python(Writing):
    """The `Writing` (layout.py) of arguments as key=value in parentheses."""

    reads_schemas = True
    parser_class = PythonParser

    def written(self, arguments: Any) -> str:
        """Return arguments as Python writes them, with the parenthesis that ends the call."""
        if not isinstance(arguments, Mapping):
            return f"{arguments})"
        return ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"

    def rules(self, schemas: OptionalSchemas, end: str) -> tuple[list[str], list[str]]:
        """Return Lark expressions of arguments and `end`, and all Lark rules (Writing.rules)."""
        return call_rules(PYTHON_VALUES, schemas, "=", "PY_NAME", f'")" {lark(end)}')


PYTHON = Python()


def _value(text: str, types: frozenset[str]) -> str:
    """Return a value in Python syntax as JSON. types: the types that the schema allows."""
    if len(text) > 1 and text[0] in "'\"" and text.endswith(text[0]):
        inside = text_of_python(text[1:-1])
        if "string" in types or not types:
            return json.dumps(inside, ensure_ascii=False)
        return as_json(inside, types)  # some templates put all values into quotes
    return json_of_python(text) or as_json(text, types)
