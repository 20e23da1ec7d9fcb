"""Calls with arguments in JSON: a whole call is an object, or the name comes before the object.

<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>
<|tools_prefix|>[{"get_weather": {"city": "Paris"}}]<|tools_suffix|>
[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}
<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from cpuserve.serving.tools.base import OptionalSchemas, as_json_text
from cpuserve.serving.tools.json_call import (
    USUAL_SPACE,
    JsonCall,
    JsonCallParser,
    KeyedCall,
    ObjectScanner,
    arguments_rule,
    arguments_rules,
    text_call_rules,
)
from cpuserve.serving.tools.layout import BRACKETED, CallLayout, Writing, chunks, lark
from cpuserve.serving.tools.layout_parser import LayoutParser

_OBJECT = re.compile(r"\[?\s*\{")
_FIXED = re.compile(rf"<\S*|{BRACKETED}|[^\[\]{{}},\"]+")


class NamedJsonParser(LayoutParser, JsonCallParser):
    """A LayoutParser that reports the arguments as they are written."""

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
        if not self._arguments_end():
            return False
        if not self._scanner.closed:
            return self._give_up()
        self._finish_call()
        return True


class Json(Writing):
    """A `Writing` (layout.py) of arguments in JSON."""

    def written(self, arguments: Any) -> str:
        """Return arguments as JSON."""
        return as_json_text(arguments)

    def rules(self, schemas: OptionalSchemas, end: str) -> tuple[list[str], list[str]]:
        """Return Lark expressions of arguments and `end`, and all Lark rules (Writing.rules)."""
        names = [arguments_rule(i, schema) for i, schema in enumerate(schemas.values())]
        return [f"{name} {lark(end)}" for name in names], arguments_rules(schemas)


class NamedJson(Json):
    """The `Writing` of arguments as a JSON object that follows the name."""

    parser_class = NamedJsonParser


NAMED_JSON = NamedJson()


class ObjectParser(LayoutParser, JsonCallParser):
    """A LayoutParser with three states after the marker: before, in, or after an object.

    If the layout closes each call (LayoutFormat.closes_each), a marker begins one object, no list.
    """

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
        if char == "[" and not (self._is_list or self._format.closes_each):
            self._is_list = True
            self._lead.append(char)
            self._held = self._held[1:]
        elif char == "{":
            writing = self._format.writing
            is_keyed = isinstance(writing, Objects) and writing.keyed
            self._call = KeyedCall() if is_keyed else JsonCall()
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
        if call.lacks_end and self._format.closes_each:
            self._state = self._at_missing_end
            return True
        return (call.closed or call.broken) and self._leave(call)

    def _at_missing_end(self) -> bool:
        """Close the call if the text that closes it comes in place of its last brace."""
        call, close = self._call, self._format.tails[0]
        assert call is not None
        if self._held.startswith(close):
            call.close()
            self._tell(call)
        elif close.startswith(self._held):
            return False
        return self._leave(call)

    def _leave(self, call: JsonCall) -> bool:
        """Choose the state after a call that is closed, or after text that is not a call."""
        self._call = None
        if call.name and call.closed:
            self._finish_call()
        elif call.name:
            self._give_up()
        else:
            self._lead.append("".join(call.raw))
            self._text_again()
        return True

    def _after_call(self) -> bool:
        """Look for another object, or for the end of the list of calls."""
        self._skip_space()
        char = self._held[:1]
        if char in (",", ";", "{") and not self._format.closes_each:
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


@dataclass(frozen=True)
class Objects(Json):
    """The `Writing` of calls as JSON objects.

    keyed: an object has one member, and its key is the function's name.
    forces: the name comes before the arguments, so calls can be forced.
    loose: models write other members and white space too, so grammars of text allow these.
    """

    keyed: bool = False
    forces: bool = True
    loose: bool = False
    parser_class = ObjectParser

    def fixed(self, text: str) -> list[str]:
        """Return the chunks of `text`, a text around a call, that are not JSON."""
        found = (chunk.lstrip("]},") for chunk in chunks(_OBJECT.split(text, 1)[0]))
        return [chunk for chunk in found if _FIXED.fullmatch(chunk)]

    def text_calls(self, layout: CallLayout, schemas: OptionalSchemas) -> list[str]:
        """Return the Lark rules of calls in free text with any white space, if `loose`."""
        key = layout.middle.strip('", :')
        return text_call_rules(schemas, key, USUAL_SPACE) if self.loose else []
