"""Calls with a tag for each argument.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

The parser reports the arguments as JSON, as in qwen3_coder.py: a string while it is written,
another value when it has ended. The type of a value comes from its tag or the schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpuserve.serving.tools.base import JsonSchema, OptionalSchemas, Schemas
from cpuserve.serving.tools.element_values import json_of_elements
from cpuserve.serving.tools.element_values import written as elements_of
from cpuserve.serving.tools.layout import LayoutFormat, chunks
from cpuserve.serving.tools.layout_parser import LayoutParser
from cpuserve.serving.tools.tag_rules import tag_rules
from cpuserve.serving.tools.tag_texts import KEY, TagTexts
from cpuserve.serving.tools.thoughts import Around
from cpuserve.serving.tools.typed_values import TypedValues
from cpuserve.serving.tools.values import types_of

_TEXT = frozenset({"string"})
_LONGEST_HEAD = 400


@dataclass(frozen=True)
class Tags(TagTexts):
    """The `Writing` (layout.py) of arguments with a tag for each one."""

    reads_schemas = True
    forces = True
    markers: frozenset[str] = frozenset()

    def fixed(self, text: str) -> list[str]:
        """Return all chunks of a text around a call: this way of writing has no JSON there."""
        return chunks(text)

    def written(self, arguments: Any) -> str:
        """Return arguments as a template writes them."""
        if self.item and isinstance(arguments, Mapping):
            # The layout's text before the arguments ends with the text that each tag begins with.
            shared = self.prefix.removesuffix(self.open)
            return f"{elements_of(dict(arguments), self)}{shared}".removeprefix(shared)
        return super().written(arguments)

    def rules(self, schemas: OptionalSchemas, end: str) -> tuple[list[str], list[str]]:
        """Return Lark expressions of arguments and `end`, and all Lark rules (Writing.rules)."""
        return tag_rules(self, schemas, end)

    def parser(
        self, found: LayoutFormat, index: int, opening: str, schemas: Schemas, around: Around | None
    ) -> TagParser:
        """Return a parser for the text of choice `index` after `opening` (ToolFormat.parser)."""
        return TagParser(self, found, index, opening, schemas, around)


class TagParser(LayoutParser, TypedValues):
    """A LayoutParser with three states in a call: between arguments, in a head, in a value."""

    def __init__(
        self,
        tags: Tags,
        found: LayoutFormat,
        index: int,
        opening: str = "",
        schemas: Schemas | None = None,
        around: Around | None = None,
    ) -> None:
        self._writing = tags
        self._open = chunks(tags.open)
        self._closes = found.layout.end.split()[0]
        self._key_end = tags.heads[0][1].strip()[0]
        self._value_ends = self._ends_of("")
        self._opened = 0  # how many chunks of `open` were read
        self._schema: JsonSchema = {}
        self._of_value: Any = None  # the schema of the value that is being read
        self._num_arguments = 0
        self._stops: tuple[str, ...] = self._value_ends
        super().__init__(found, index, opening, schemas, around)

    def _end(self) -> None:
        self._end_value()
        super()._end()

    def _at_arguments(self) -> bool:
        """Begin the call if an argument or the end of the call follows."""
        self._skip_space()
        held = self._held
        starts = (self._open[0], self._closes)
        if any(held.startswith(start) for start in starts):
            self._begin_call(self._name, "{")
            self._schema = self._schemas.get(self._name, {})
            self._num_arguments = self._opened = 0
            self._state = self._between
            return True
        if any(start.startswith(held) for start in starts):
            return False
        return self._text_again()

    def _between(self) -> bool:
        """Read the tag of the next argument, or the end of the call."""
        self._held = held = self._held.lstrip(" \t\r\n")
        if self._opened == 0 and held.startswith(self._closes):
            self._continue_call("}")
            self._held = held[len(self._closes) :]
            self._finish_call()
            return True
        if self._opened == 0 and self._closes.startswith(held):
            return False
        chunk = self._open[self._opened]
        if held.startswith(chunk):
            self._held = held[len(chunk) :]
            self._opened += 1
            if self._opened == len(self._open):
                self._opened = 0
                self._state = self._in_head
            return True
        if chunk.startswith(held):
            return False
        self._state = self._in_text  # the text is not a valid tool call
        return True

    def _in_head(self) -> bool:
        """Read a key, and the text (head) between the key and its value."""
        head = self._held[:_LONGEST_HEAD]
        key, found, _ = head.partition(self._key_end)
        rest = head[len(key) :]
        if found:
            for shown, kind in self._writing.shown:
                match = shown.match(rest)
                if match is not None:
                    self._begin_value(key.strip(), kind, self._held[len(key) + match.end() :])
                    return True
        if len(self._held) < _LONGEST_HEAD:
            return False
        self._state = self._in_text  # the text is not a valid tool call
        return True

    def _begin_value(self, key: str, kind: str, value: str) -> None:
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        properties = self._schema.get("properties")
        self._of_value = properties.get(key) if isinstance(properties, Mapping) else None
        self._types = types_of(self._of_value, self._schema)
        self._value_ends = self._ends_of(key)
        if kind == "string":
            self._types = _TEXT
        elif kind:
            self._types -= _TEXT
        self._continue_call(f"{comma}{json.dumps(key)}: ")
        self._held, self._stops = value, self._value_ends
        self._state = self._first_break

    def _ends_of(self, key: str) -> tuple[str, ...]:
        """Return the texts that end the value of `key`: its end tag (tail), or texts after it."""
        tags = self._writing
        tail = tags.of_key(key).tail.strip()
        if not tags.item:
            return tail, tags.open.strip(), self._closes
        return tail, tags.tail.partition(f"/{KEY}{tags.heads[0][1]}")[2] + self._closes

    def _converted(self, text: str) -> str:
        if not self._writing.item:
            return super()._converted(text)
        return json_of_elements(text, self._writing, self._of_value, self._schema)

    def _first_break(self) -> bool:
        """Drop the line break before a value, and the quote that opens a string."""
        held, quote = self._held, self._writing.quote[0]
        if self._writing.breaks:
            if held == "\r":
                return False
            self._held = held = held.removeprefix("\r\n" if held[0] == "\r" else "\n")
        if quote and held.startswith(quote):
            self._held, self._stops = held[len(quote) :], (self._writing.quote[1],)
            self._types = _TEXT
        elif quote and quote.startswith(held):
            return False
        if self._types == _TEXT:
            self._continue_call('"')
            self._state = self._in_string
        else:
            self._state = self._in_other
        return True

    def _up_to_end(self) -> tuple[str, bool]:
        """Return the part of the value that no later text can change, and whether it has ended.

        The value ends at its end tag (tail) or, because models forget this tag, at the next tag.
        """
        ends = self._stops
        is_tag = ends is self._value_ends and not self._writing.item
        follows = (self._open[0], self._closes, *self._format.tails) if is_tag else ()
        value, end = self._certain(ends, breaks=self._writing.breaks, follows=follows)
        if end is None:
            return value, False
        if end not in self._value_ends[1:]:
            self._held = self._held[len(end) :]
        elif self._writing.item:
            self._held = self._held[len(end) - len(self._closes) :]
        self._state = self._between if ends is self._value_ends else self._behind_quote
        return value, True

    def _behind_quote(self) -> bool:
        """Drop the tail (end tag) of a value that ended with a quote."""
        self._held = held = self._held.lstrip(" \t\r\n")
        tail = self._value_ends[0]
        if not held.startswith(tail) and tail.startswith(held):
            return False
        self._held = held.removeprefix(tail)
        self._state = self._between
        return True
