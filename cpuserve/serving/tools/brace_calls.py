"""Calls as Gemma writes them: keys without quotes, and strings between special marks.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:[1,2]}<tool_call|>
    <start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>

The parser converts the arguments to JSON, and reports each argument when it has ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpuserve.serving.tools.base import OptionalSchemas
from cpuserve.serving.tools.layout import Writing, lark
from cpuserve.serving.tools.layout_parser import LayoutParser
from cpuserve.serving.tools.value_rules import ValueSyntax, call_rules
from cpuserve.serving.tools.values import json_of_python

_BARE_KEY = re.compile(r"(?<=[{,])\s*([^\s\"{}\[\],:]+)\s*:")


class BraceParser(LayoutParser):
    """A LayoutParser with two states in the arguments: inside or outside of a marked string."""

    _depth = 0

    def _prepare(self) -> None:
        writing = self._format.writing
        assert isinstance(writing, Braces)
        self._mark = writing.mark
        self._argument: list[str] = []  # pieces of an argument (key and value), strings as JSON
        self._words: list[str] = []  # pieces of the current string

    def _at_arguments(self) -> bool:
        self._begin_arguments()
        self._argument, self._depth = [], 0
        self._state = self._between_texts
        return True

    def _between_texts(self) -> bool:
        mark = self._mark
        for at, char in enumerate(self._held):
            rest = self._held[at : at + len(mark)]
            if mark.startswith(rest):
                self._held = self._held[at + len(rest) if rest == mark else at :]
                self._words = []
                self._state = self._in_marked if rest == mark else self._state
                return rest == mark
            if char == "}" and not self._depth:
                self._tell_argument()
                self._continue_call("}")
                self._held = self._held[at + 1 :]
                self._finish_call()
                return True
            if char == "," and not self._depth:
                self._tell_argument()
                continue
            self._depth += (char in "{[") - (char in "}]" and self._depth > 0)
            self._argument.append(char)
        self._held = ""
        return False

    def _in_marked(self) -> bool:
        """Read a string up to its closing mark."""
        text, found, rest = self._held.partition(self._mark)
        if not found:
            tail = self._held.rfind(self._mark[0])
            kept = tail if tail >= 0 and self._mark.startswith(self._held[tail:]) else len(text)
            self._words.append(text[:kept])
            self._held = text[kept:]
            return False
        self._words.append(text)
        self._argument.append(json.dumps("".join(self._words), ensure_ascii=False))
        self._held, self._state = rest, self._between_texts
        return True

    def _tell_argument(self) -> None:
        """Report the argument that has ended as JSON."""
        text = "".join(self._argument).strip()
        self._argument.clear()
        key, colon, value = text.partition(":")
        if text.startswith('"'):  # the key is a string between marks
            key, end = _leading_text(text)
            colon, value = text[end:].lstrip()[:1], text[end:].lstrip()[1:]
        if colon != ":" or not key.strip():
            return
        self._tell_key(key.strip(), _value(value))


@dataclass(frozen=True)
class Braces(Writing):
    """The `Writing` (layout.py) of arguments in braces.

    mark: the text around each string.
    sorts: whether arguments are written in alphabetical order.
    """

    mark: str
    sorts: bool = False
    parser_class = BraceParser

    @property
    def markers(self) -> frozenset[str]:
        """The mark, which the parser must see as text even if it is a special token."""
        return frozenset({self.mark})

    def written(self, arguments: Any) -> str:
        """Return arguments with marks around strings, and the brace that ends the call."""
        if not isinstance(arguments, Mapping):
            return f"{arguments}}}"
        return self._value(arguments)[1:]

    def _value(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self.mark}{value}{self.mark}"
        if isinstance(value, Mapping):
            keys = sorted(value, key=str.lower) if self.sorts else value
            return "{" + ",".join(f"{key}:{self._value(value[key])}" for key in keys) + "}"
        if isinstance(value, list):
            return "[" + ",".join(map(self._value, value)) + "]"
        return json.dumps(value)

    def rules(self, schemas: OptionalSchemas, end: str) -> tuple[list[str], list[str]]:
        """Return Lark expressions of arguments and `end`, and all Lark rules (Writing.rules)."""
        mark = json.dumps(self.mark)
        syntax = ValueSyntax(
            name="br",
            text=f"( {mark} br_text )",
            words={True: '"true"', False: '"false"', None: '( "null" | "None" )'},
            comma='","',
            colon='":"',
            key="BR_KEY",
            key_quotes=("",),
            terminals=(
                rf"br_text[suffix={mark}]: /(.|\n)*/",
                r"BR_KEY: /[A-Za-z_][^\s\"<>{}\[\],:]{0,127}/",
            ),
            quotes=(self.mark,),
            raw_mark=self.mark,
            sorts=self.sorts,
        )
        return call_rules(syntax, schemas, ":", "BR_KEY", f'"}}" {lark(end)}')


def _leading_text(text: str) -> tuple[str, int]:
    try:
        found, end = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return "", 0
    return found, end


def _value(text: str) -> str:
    """Return a value with unquoted keys and words as JSON, and any other text as a JSON string."""
    parts = re.split(r'("(?:[^"\\]|\\.)*(?:"|$))', text)
    parts[::2] = [_BARE_KEY.sub(r'"\1":', part) for part in parts[::2]]
    return json_of_python("".join(parts)) or json.dumps(text.strip(), ensure_ascii=False)
