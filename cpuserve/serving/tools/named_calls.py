"""Tool calls that consist of a name and then a JSON object with the arguments.

[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
"""

from __future__ import annotations

from typing import Any

from cpuserve.serving.tools.base import OptionalSchemas, Schemas, as_json_text
from cpuserve.serving.tools.json_call import arguments_rule, arguments_rules
from cpuserve.serving.tools.json_scan import ObjectScanner
from cpuserve.serving.tools.layout import LayoutFormat, chunks, lark
from cpuserve.serving.tools.layout_parser import LayoutParser
from cpuserve.serving.tools.thoughts import Around


class NamedJson:
    """The `Writing` (layout.py) of arguments as a JSON object that follows the name."""

    reads_schemas = False
    forces = True
    markers: frozenset[str] = frozenset()

    def fixed(self, text: str) -> list[str]:
        """Return all chunks of a text around a call: this way of writing has no JSON there."""
        return chunks(text)

    def written(self, arguments: Any) -> str:
        """Return arguments as JSON."""
        return as_json_text(arguments)

    def rules(self, schemas: OptionalSchemas, end: str) -> tuple[list[str], list[str]]:
        """Return Lark expressions of arguments and `end`, and all Lark rules (Writing.rules)."""
        names = [arguments_rule(i, schema) for i, schema in enumerate(schemas.values())]
        return [f"{name} {lark(end)}" for name in names], arguments_rules(schemas)

    def parser(
        self, found: LayoutFormat, index: int, opening: str, schemas: Schemas, around: Around | None
    ) -> NamedJsonParser:
        """Return a parser for the text of choice `index` after `opening` (ToolFormat.parser)."""
        return NamedJsonParser(found, index, opening, schemas, around)


NAMED_JSON = NamedJson()


class NamedJsonParser(LayoutParser):
    """A LayoutParser that reports the arguments as they are written."""

    _scanner = ObjectScanner()

    def _at_arguments(self) -> bool:
        self._skip_space()
        if not self._held:
            return False
        ends = self._format.tails[:1]
        if self._held.startswith("{"):
            self._begin_call(self._name, "")
            self._scanner, self._state = ObjectScanner(), self._in_object
        elif any(self._held.startswith(end) for end in ends):  # a call without arguments
            self._begin_call(self._name, "{}")
            self._finish_call()
        elif any(end.startswith(self._held) for end in ends):
            return False
        else:
            self._text_again()
        return True

    def _in_object(self) -> bool:
        text, scanner = self._held, self._scanner
        told = scanner.read(text)
        self._continue_call(text[:told])
        self._held = text[told:]
        if not (scanner.broken or scanner.closed):
            return False
        if scanner.closed:
            self._finish_call()
        else:
            self._state = self._in_text  # the text is not a valid tool call
        return True
