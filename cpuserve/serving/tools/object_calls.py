"""Calls as JSON objects that follow a marker, alone or in a list.

<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>
<|tools_prefix|>[{"get_weather": {"city": "Paris"}}]<|tools_suffix|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cpuserve.serving.tools.atoms import BRACKETED
from cpuserve.serving.tools.base import OptionalSchemas, Schemas, as_json_text
from cpuserve.serving.tools.json_call import (
    JsonCall,
    JsonCallParser,
    arguments_rule,
    arguments_rules,
)
from cpuserve.serving.tools.layout import LayoutFormat, chunks, lark
from cpuserve.serving.tools.layout_parser import LayoutParser
from cpuserve.serving.tools.thoughts import Around

_OBJECT = re.compile(r"\[?\s*\{")
_FIXED = re.compile(rf"<\S*|{BRACKETED}|[^\[\]{{}},\"]+")


@dataclass(frozen=True)
class Objects:
    """The `Writing` (layout.py) of calls as JSON objects.

    keyed: an object has one member, and its key is the function's name.
    forces: the name comes before the arguments, so calls can be forced.
    """

    keyed: bool = False
    forces: bool = True
    reads_schemas = False
    markers: frozenset[str] = frozenset()

    def fixed(self, text: str) -> list[str]:
        """Return the chunks of `text`, a text around a call, that are not JSON."""
        found = (chunk.lstrip("]},") for chunk in chunks(_OBJECT.split(text, 1)[0]))
        return [chunk for chunk in found if _FIXED.fullmatch(chunk)]

    def written(self, arguments: Any) -> str:
        """Return arguments as JSON."""
        return as_json_text(arguments)

    def rules(self, schemas: OptionalSchemas, end: str) -> tuple[list[str], list[str]]:
        """Return Lark expressions of arguments and `end`, and all Lark rules (Writing.rules)."""
        names = [arguments_rule(i, schema) for i, schema in enumerate(schemas.values())]
        return [f"{name} {lark(end)}" for name in names], arguments_rules(schemas)

    def parser(
        self, found: LayoutFormat, index: int, opening: str, schemas: Schemas, around: Around | None
    ) -> ObjectParser:
        """Return a parser for the text of choice `index` after `opening` (ToolFormat.parser)."""
        return ObjectParser(found, index, opening, schemas, around)


class ObjectParser(LayoutParser, JsonCallParser):
    """A LayoutParser with three states after the marker: before, in, or after an object."""

    _is_list = False

    def _at_marker(self, marker: str) -> None:
        self._is_list = False
        super()._at_marker(marker)

    def _at_call(self) -> bool:
        """Read the beginning of a list of calls, or of the object of one call."""
        self._skip_space()
        if not self._held:
            return False
        char = self._held[0]
        if char == "[" and not self._is_list:
            self._is_list = True
            self._lead.append(char)
            self._held = self._held[1:]
        elif char == "{":
            keyed = isinstance(self._format.writing, Objects) and self._format.writing.keyed
            self._call = KeyedCall() if keyed else JsonCall()
            self._state = self._at_arguments
        else:
            self._text_again()
        return True

    def _at_arguments(self) -> bool:
        """Read the JSON object of a call."""
        call, text = self._call, self._held
        assert call is not None
        self._held = text[call.read(text) :]
        self._tell(call)
        if not (call.closed or call.broken):
            return False
        self._call = None
        if call.name and call.closed:
            self._finish_call()
        elif call.name:
            self._state = self._in_text  # the text is not a valid tool call
        else:
            self._lead.append("".join(call.raw))
            self._text_again()
        return True

    def _after_call(self) -> bool:
        """Look for another object, or for the end of the list of calls."""
        self._skip_space()
        char = self._held[:1]
        if char in (",", ";", "{"):
            self._lead.append(char)
            self._held = self._held[char != "{" :]
            self._state = self._between
            return True
        if char == "]" and self._is_list:
            self._is_list = False
            self._lead.clear()
            self._held = self._held[1:]
            return True
        return super()._after_call()

    def _between(self) -> bool:
        """Begin another object after a comma; if no object follows, report the comma as text."""
        self._skip_space()
        if not self._held:
            return False
        if self._held[0] == "{":
            self._lead.clear()
            self._state = self._at_call
            return True
        return self._text_again()


class KeyedCall(JsonCall):
    """The object {NAME: arguments} of one call."""

    def _push(self, char: str) -> None:
        scanner = self._scanner
        scanner.push(char)
        self.broken = scanner.broken
        if scanner.members and not self.name:
            self.name, self._arguments = next(iter(scanner.members.items()))
            self.broken = self.broken or not self.name
