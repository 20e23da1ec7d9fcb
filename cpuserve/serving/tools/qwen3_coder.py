"""Qwen3-Coder's format, which Qwen 3.5 and later use, too: a tag for each argument.

    <tool_call>
    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>
    </tool_call>

The arguments pass on as JSON. The schema of the function tells their types: a string passes on as
it is written, without the line breaks beside the tags; another value is read as JSON when it has
ended, and is a string if it is none. Some models omit <tool_call>. White space beside a call is
dropped. What is no call passes on as text, with its markers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from cpuserve.sampling.structured import PARAMETERS_OF, WHITE_SPACE
from cpuserve.serving.tools.base import (
    NO_SCHEMAS,
    JsonSchema,
    OptionalSchemas,
    Piece,
    Schemas,
    definitions,
    marked_calls_rule,
    new_call_id,
    text_rules,
)
from cpuserve.serving.tools.machine import CallParser

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, END = "<function=", "</function>"
PARAMETER, VALUE_END = "<parameter=", "</parameter>"
# A name ends with >, and neither it nor a line break is a part of one.
_NAME = re.compile(r"[^<>\r\n]{1,128}")
_SPACE = " \t\r\n"


class Qwen3Coder:
    """The format."""

    name = "qwen3_coder"
    markers = frozenset({OPEN, CLOSE})
    reads_schemas = True

    def matches(self, template: str) -> bool:
        """Return whether the template has the tags."""
        return FUNCTION in template and PARAMETER in template

    def opening(self, function: str | None) -> str:
        """Return the beginning of a call. It ends where the tokens of such a call do."""
        return f"{OPEN}\n{FUNCTION}" if function is None else f"{OPEN}\n{FUNCTION}{function}>\n"

    def grammar(
        self,
        schemas: OptionalSchemas,
        function: str | None,
        *,
        several: bool,
        whole: bool = False,
    ) -> str:
        """Return the Lark grammar of what follows `opening(function)`; if `whole`, with that."""
        rule = marked_calls_rule(self, len(schemas), function, CLOSE, several=several, whole=whole)
        return "\n".join([rule, *_call_rules(schemas, named=function is None)])

    def text_grammar(self, schemas: OptionalSchemas) -> str:
        """Return the Lark grammar of free text in which every call is one of these functions.

        A call begins with its function's tag, also if the model omits <tool_call>.
        """
        rules = text_rules(len(schemas), FUNCTION)
        return "\n".join([rules, *_call_rules(schemas, named=True)])

    def parser(
        self, index: int, opening: str = "", schemas: Schemas = NO_SCHEMAS
    ) -> Qwen3CoderParser:
        """Return a parser for choice `index`, whose text continues `opening`."""
        return Qwen3CoderParser(index, opening, schemas)


QWEN3_CODER = Qwen3Coder()


def _call_rules(schemas: OptionalSchemas, *, named: bool) -> list[str]:
    """Return the Lark rules of calls; named: they begin with the name."""
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
            rules.append(_value_rule(rule, of_value, schema) + PARAMETERS_OF + name)
        rules.append(f'call_{i}: {" ".join(parts)} "{END}"')
    if None in schemas.values():
        rules.append(f'free[suffix="{END}"]: /(.|\\n)*/')
    return rules


def _properties(schema: JsonSchema) -> dict[str, Any]:
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}


def _is_string(schema: Any) -> bool:
    """Whether strings are among the values that a schema allows."""
    # Schemas come from clients unchecked: nested a thousand times, or with members of any type.
    waiting: list[Any] = [schema] if isinstance(schema, dict) else []
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):  # a member of an enum
            return True
        if not isinstance(one, dict):
            continue
        kinds = one.get("type")
        if kinds is None:
            several = one.get("anyOf") or one.get("oneOf") or one.get("enum")
            waiting += several if isinstance(several, list) else []
        elif "string" in (kinds if isinstance(kinds, list) else [kinds]):
            return True
    return False


def _value_rule(rule: str, schema: Any, of_all: JsonSchema) -> str:
    """Return the rule of a value and its end tag."""
    end = json.dumps(f"\n{VALUE_END}\n")
    if not _is_string(schema):
        options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        json_rule = f"{rule}_json: %json {_dumped(schema, definitions(of_all), options)}"
        return f"{rule}: {rule}_json {end}\n{json_rule}"
    for word in ("pattern", "format", "minLength", "maxLength", "const"):
        if word in schema:
            msg = f"{word} of a string is not supported in this model's format of calls"
            raise ValueError(msg)
    choices = schema.get("enum")
    if choices:
        listed = " | ".join(json.dumps(str(choice)) for choice in choices)
        return f"{rule}: ( {listed} ) {end}"
    return f"{rule}[suffix={end}]: /(.|\\n)*/"


def _dumped(schema: Any, *more: dict[str, Any]) -> str:
    whole: dict[str, Any] = dict(schema) if isinstance(schema, dict) else {}
    for members in more:
        whole |= members
    return json.dumps(whole)


class Qwen3CoderParser(CallParser):
    """In text, behind <tool_call>, in a call between its arguments, in one, or behind the call."""

    def __init__(
        self,
        index: int,
        opening: str = "",
        schemas: Schemas = NO_SCHEMAS,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self._schemas = schemas
        self._types: dict[str, Any] = {}  # the schemas of the call's arguments
        self._lead = ""  # the marker before what may become a call
        self._num_arguments = 0
        self._key = ""
        self._begun = False  # the first line break of a string has passed
        super().__init__(index, opening, new_id)

    def flush(self) -> list[Piece]:
        """Return what was held back: text, or a call that never became one."""
        if self._state in (self._in_text, self._opened, self._named):
            text = self._lead + self._held
            if text.strip() or not self.num_calls:
                self._say(text)
        elif self._state == self._in_string:
            self._continue_call(_inside(self._held))
        self._lead = self._held = ""
        return self._take()

    @property
    def ends_with_call(self) -> bool:
        """Whether only an end marker, or a part of it, has followed a complete call."""
        return self._state in (self._behind, self._behind_all)

    def _in_text(self) -> bool:
        found = [at for marker in (OPEN, FUNCTION) if (at := self._held.find(marker)) >= 0]
        if not found:
            self._say_before(OPEN, FUNCTION)
            return False
        at = min(found)
        self._say(self._held[:at].rstrip())
        self._held = self._held[at:]
        if self._held.startswith(OPEN):
            self._lead, self._held = OPEN, self._held[len(OPEN) :]
        self._state = self._opened
        return True

    def _opened(self) -> bool:
        rest = self._held.lstrip(_SPACE)
        if rest.startswith(FUNCTION):
            self._lead += self._held[: len(self._held) - len(rest)] + FUNCTION
            self._held = rest[len(FUNCTION) :]
            self._state = self._named
            return True
        if FUNCTION.startswith(rest):  # also if nothing is left
            return False
        return self._text_again()

    def _text_again(self) -> bool:
        """Say the marker, behind which there is no call."""
        self._say(self._lead)
        self._lead, self._state = "", self._in_text
        return True

    def _named(self) -> bool:
        name, closed, rest = self._held.partition(">")
        if closed and _NAME.fullmatch(name):
            self._begin_call(name, "{")
            self._types = _properties(self._schemas.get(name, {}))
            self._lead, self._held, self._num_arguments = "", rest, 0
            self._state = self._between
            return True
        if closed or (name and not _NAME.fullmatch(name)):
            return self._text_again()
        return False

    def _between(self) -> bool:
        """Between the arguments of a call."""
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
        self._state = self._in_text  # the call is broken
        return True

    def _begin_value(self, key: str, value: str) -> None:
        comma = ", " if self._num_arguments else ""
        self._num_arguments += 1
        self._key, self._held, self._begun = key, value, False
        is_string = _is_string(self._types.get(key))
        self._continue_call(f"{comma}{json.dumps(key)}: " + ('"' if is_string else ""))
        self._state = self._in_string if is_string else self._in_other

    def _in_string(self) -> bool:
        if not self._begun:
            if self._held == "\r":
                return False
            self._begun = True
            self._held = self._held.removeprefix("\r\n" if self._held[0] == "\r" else "\n")
        at = self._held.find(VALUE_END)
        if at >= 0:
            self._continue_call(_inside(_without_break(self._held[:at])) + '"')
            self._held, self._state = self._held[at + len(VALUE_END) :], self._between
            return True
        # A line break may come before the end, whose beginning may be here already.
        kept = next(
            (n for n in range(len(VALUE_END) - 1, 0, -1) if self._held.endswith(VALUE_END[:n])), 0
        )
        shown = len(self._held) - kept
        if self._held[:shown].endswith(("\r", "\n")):
            shown = max(0, shown - len("\r\n"))
        self._continue_call(_inside(self._held[:shown]))
        self._held = self._held[shown:]
        return False

    def _in_other(self) -> bool:
        value, closed, rest = self._held.partition(VALUE_END)
        if not closed:
            return False
        self._continue_call(_as_json(value.strip(), self._types.get(self._key)))
        self._held, self._state = rest, self._between
        return True

    def _behind(self) -> bool:
        """Drop white space and the end marker; anything else is text again."""
        rest = self._held.lstrip(_SPACE)
        if rest.startswith(CLOSE):
            self._held = rest[len(CLOSE) :].lstrip(_SPACE)
            self._state = self._behind_all
            return True
        self._held = rest
        if CLOSE.startswith(rest):
            return False
        self._state = self._in_text
        return True

    def _behind_all(self) -> bool:
        self._held = self._held.lstrip(_SPACE)
        if self._held:
            self._state = self._in_text
        return bool(self._held)


def _inside(text: str) -> str:
    """Return `text` as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _without_break(text: str) -> str:
    """Return `text` without one line break at its end."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _as_json(text: str, schema: Any) -> str:
    """Return a value that is no string as JSON; a string if it is no JSON."""
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "boolean" and text.lower() in ("true", "false"):
        return text.lower()
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def _refuse(text: str) -> NoReturn:
    raise ValueError(text)  # Python reads NaN and Infinity, which are no JSON
