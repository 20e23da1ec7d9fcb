"""The format of Qwen3-Coder and of Qwen 3.5 and later: a tag for each argument.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The parser reports the arguments as JSON, with the types in the function's schema.
A string is reported as it is written, without the line breaks next to the tags;
other values are converted when they have ended (values.py). Some models omit <tool_call>
or </parameter>. A string may contain </parameter>, if no tag of the format follows it.
Text that does not follow the format is reported unchanged, with markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from cpuserve.sampling.grammar_marks import PARAMETERS_OF
from cpuserve.serving.tools.base import (
    NO_SCHEMAS,
    Calls,
    JsonSchema,
    OptionalSchemas,
    Schemas,
    marked_calls_rule,
    new_call_id,
    text_rules,
)
from cpuserve.serving.tools.tag_rules import value_rule
from cpuserve.serving.tools.tag_texts import TagTexts
from cpuserve.serving.tools.thoughts import Around
from cpuserve.serving.tools.typed_values import TypedValues
from cpuserve.serving.tools.values import types_of

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END = "<function=", "</function>"
PARAMETER, VALUE_END = "<parameter=", "</parameter>"
# A name is followed by >, and contains neither angle brackets nor line breaks.
_NAME = re.compile(r"[^<>\r\n]{1,128}")
_SPACE = " \t\r\n"
_VALUE_ENDS = (VALUE_END, PARAMETER, END)
_BEHIND_VALUES = (PARAMETER, END, CLOSE)  # other text after VALUE_END belongs to the value
_TAGS = TagTexts(PARAMETER, (("", ">\n"),), f"\n{VALUE_END}\n")
# A string value may not contain a tag, because the tag would end it.
_TEXT = r"TEXT: /(.|\n)*/ & ~/(.|\n)*(<parameter=|<\/function>)(.|\n)*/"


class Qwen3Coder:
    """The format of Qwen3-Coder: a tag for the function, and a tag for each argument."""

    name = "qwen3_coder"
    markers = frozenset({OPEN, CLOSE})
    reads_schemas = True
    forces = True

    def asks_for_calls(self, instructions: str) -> bool:
        """Return whether the prompt shows the tags to the model."""
        return OPEN in instructions and FUNCTION in instructions and PARAMETER in instructions

    def opening(self, function: str | None) -> str:
        """Return the beginning of a call, up to a place where models usually begin a new token."""
        return f"{OPEN}\n{FUNCTION}" if function is None else f"{OPEN}\n{FUNCTION}{function}>\n"

    def grammar(
        self,
        schemas: OptionalSchemas,
        function: str | None,
        *,
        several: bool,
        whole: bool = False,
    ) -> str:
        """Return the Lark grammar of the text after `opening`; `whole`: of the whole response."""
        rule = marked_calls_rule(self, len(schemas), function, CLOSE, several=several, whole=whole)
        return "\n".join([rule, *_call_rules(schemas, named=function is None)])

    def written(self, calls: Calls) -> str:
        """Return calls with a tag for each argument."""
        return "\n".join(
            f"{self.opening(name)}{_TAGS.written(args)}{END}\n{CLOSE}" for name, args in calls
        )

    def text_grammar(self, schemas: OptionalSchemas) -> str:
        """Return the Lark grammar of free text with calls of the functions in `schemas` only.

        A call begins with its function's tag, even if the model omits <tool_call>.
        """
        rules = text_rules(len(schemas), FUNCTION)
        return "\n".join([rules, *_call_rules(schemas, named=True)])

    def parser(
        self,
        index: int,
        opening: str = "",
        schemas: Schemas = NO_SCHEMAS,
        around: Around | None = None,
    ) -> Qwen3CoderParser:
        """Return a parser for the text of choice `index` after `opening` (ToolFormat.parser)."""
        return Qwen3CoderParser(index, opening, schemas, around=around)


QWEN3_CODER = Qwen3Coder()


def _call_rules(schemas: OptionalSchemas, *, named: bool) -> list[str]:
    """Return the Lark rules of calls; named: each rule begins with the function's name."""
    rules = []
    for i, (name, schema) in enumerate(schemas.items()):
        begin = json.dumps(f"{name}>\n") if named else ""
        if schema is None:
            rules.append(f"call_{i}: {begin} free")
            continue
        parts = [begin]
        required = schema.get("required") or ()
        for k, (key, of_value) in enumerate(_properties(schema).items()):
            tag, rule = json.dumps(f"{PARAMETER}{key}>\n"), f"value_{i}_{k}"
            parts.append(f"( {tag} {rule} )" + ("" if key in required else "?"))
            rules.append(value_rule(_TAGS, rule, of_value, schema) + PARAMETERS_OF + name)
        rules.append(f'call_{i}: {" ".join(parts)} "{END}"')
    if any("]: TEXT" in rule for rule in rules):
        rules.append(_TEXT)
    if None in schemas.values():
        rules.append(f'free[suffix="{END}"]: /(.|\\n)*/')
    return rules


def _properties(schema: JsonSchema) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


class Qwen3CoderParser(TypedValues):
    """A parser with states in text, after <tool_call>, between or in arguments, after a call."""

    markers = (OPEN, FUNCTION)

    def __init__(
        self,
        index: int,
        opening: str = "",
        schemas: Schemas = NO_SCHEMAS,
        new_id: Callable[[], str] = new_call_id,
        around: Around | None = None,
    ) -> None:
        self._schemas = schemas
        self._schema: JsonSchema = {}  # the schema of the call's arguments
        self._num_arguments = 0
        super().__init__(index, opening, new_id, around)

    def _end(self) -> None:
        """Report the held-back text; drop the beginning of an incomplete call."""
        self._end_value()
        if self._state in (self._in_text, self._in_thought):
            self._say_lead(self._held)

    def _at_marker(self, marker: str) -> None:
        self._state = self._opened if marker == OPEN else self._named

    def _opened(self) -> bool:
        rest = self._held.lstrip(_SPACE)
        self._lead.append(self._held[: len(self._held) - len(rest)])
        self._held = rest
        if rest.startswith(FUNCTION):
            self._lead.append(FUNCTION)
            self._held = rest[len(FUNCTION) :]
            self._state = self._named
            return True
        if FUNCTION.startswith(rest):  # more text may complete the tag
            return False
        return self._text_again()

    def _text_again(self) -> bool:
        """Report a marker as text, because no call follows it."""
        self._say_lead()
        self._state = self._in_text
        return True

    def _named(self) -> bool:
        name, closed, rest = self._held.partition(">")
        if closed and _NAME.fullmatch(name):
            self._begin_call(name, "{")
            self._schema = self._schemas.get(name, {})
            self._held, self._num_arguments = rest, 0
            self._state = self._between
            return True
        if closed or (name and not _NAME.fullmatch(name)):
            return self._text_again()
        return False

    def _between(self) -> bool:
        """Read the tag of the next argument, or the end of the call."""
        rest = self._held = self._held.lstrip(_SPACE)
        if rest.startswith(END):
            self._continue_call("}")
            self._close_call()
            self._held, self._state = rest[len(END) :], self._behind
            return True
        if rest.startswith(PARAMETER):
            key, closed, value = rest[len(PARAMETER) :].partition(">")
            if closed and _NAME.fullmatch(key):
                self._begin_value(key, value)
                return True
            if not closed and (not key or _NAME.fullmatch(key)):
                return False
        elif END.startswith(rest) or PARAMETER.startswith(rest):
            return False
        self._state = self._in_text  # the text is not a valid tool call
        return True

    def _begin_value(self, key: str, value: str) -> None:
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        self._held = value
        self._types = types_of(_properties(self._schema).get(key), self._schema)
        self._continue_call(f"{comma}{json.dumps(key)}: ")
        self._state = self._first_break

    def _first_break(self) -> bool:
        """Drop the line break before a value."""
        if self._held == "\r":
            return False
        self._held = self._held.removeprefix("\r\n" if self._held[0] == "\r" else "\n")
        if self._types == {"string"}:
            self._continue_call('"')
            self._state = self._in_string
        else:
            self._state = self._in_other
        return True

    def _up_to_end(self) -> tuple[str, bool]:
        """Return the part of the value that no later text can change, and whether it has ended.

        The value ends at its end tag or, because models forget it, at the next tag.
        """
        value, end = self._certain(_VALUE_ENDS, breaks=True, follows=_BEHIND_VALUES)
        if end is None:
            return value, False
        self._held = self._held[len(end) * (end == VALUE_END) :]
        self._state = self._between
        return value, True

    def _behind(self) -> bool:
        """Drop white space and the end marker after a call; report any other text as text."""
        if self._to_end_marker(CLOSE):
            self._state = self._in_text
            return True
        return False
