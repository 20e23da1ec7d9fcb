"""Calls with a tag for each argument: their parser, and their grammar.

    <tool_call>get_weather
    <arg_key>city</arg_key>
    <arg_value>Paris</arg_value>
    </tool_call>

The parser reports the arguments as JSON: a string while it is written, without the line breaks
next to the tags, another value when it has ended. The type of a value comes from its tag
or the schema (values.py). Some models omit the tag at the end of a value. A string may contain it,
if no tag of the format follows it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from cpuserve.sampling.grammar_marks import INPUT_GRAMMAR, PARAMETERS_OF, RAW_TEXT, WHITE_SPACE
from cpuserve.serving.tools.base import NO_SCHEMAS, JsonSchema, OptionalSchemas, definitions
from cpuserve.serving.tools.element_values import (
    check_size,
    json_of_elements,
    member_rules,
    nested_rule,
)
from cpuserve.serving.tools.element_values import written as elements_of
from cpuserve.serving.tools.layout import Writing, chunks, lark
from cpuserve.serving.tools.layout_parser import LayoutParser
from cpuserve.serving.tools.machine import overlap
from cpuserve.serving.tools.tag_texts import KEY, TagTexts, escaped
from cpuserve.serving.tools.value_rules import PYTHON_VALUES, ValueRules
from cpuserve.serving.tools.values import (
    Types,
    as_json,
    may_be_null,
    parts_of,
    property_schema,
    types_of,
)

_SPACE = " \t\r\n"
_TEXT = frozenset({"string"})
_TEXT_OR_NULL = {"string", "null"}
_ANY_NAME = re.compile(r"[^<>\r\n]{1,128}(?=>|\Z)")
_LONGEST_HEAD = 400
_LONGEST_SPACE = 64  # more white space after an end tag is not waited for


class TagParser(LayoutParser):
    """A LayoutParser with states in a call: between arguments, in a head, in a value.

    A value is in a string, or in text that is converted at its end.
    """

    _schema: JsonSchema = NO_SCHEMAS  # the schema of the arguments
    _of_value: Any = None  # the schema of the value that is being read
    _types: Types = frozenset()  # the types of this value
    _opened = 0  # how many chunks of `open` were read
    _is_over = False  # whether the response has ended

    def _prepare(self) -> None:
        tags = self._format.writing
        assert isinstance(tags, Tags)
        self._writing = tags
        self._open = chunks(tags.open)
        self._closes = self._format.layout.end.split()[0]
        self._key_end = tags.heads[0][1].strip()[0]
        self._value_ends = self._stops = self._ends_of("")
        # A value may contain its end tag: the tag ends the value only before one of these texts
        # and white space, so a model may write a file about its own format.
        behind = (self._open[0], self._closes, *self._format.tails)
        self._behind: tuple[str, ...] = () if tags.item else behind
        self._follows = self._behind  # these texts for the current value; () = any text
        self._breaks = tags.breaks
        self._value: list[str] = []  # pieces of an argument that is converted at its end

    def _end(self) -> None:
        self._end_value()
        super()._end()

    def _await_arguments(self) -> None:
        self._state = self._at_arguments
        if self._writing.loose:
            self._begin()

    def _at_arguments(self) -> bool:
        """Begin the call if an argument or the end of the call follows."""
        self._skip_space()
        starts = (self._open[0], self._closes)
        if self._held.startswith(starts):
            self._begin()
            return True
        if any(start.startswith(self._held) for start in starts):
            return False
        return self._text_again()

    def _begin(self) -> None:
        self._begin_arguments()
        self._schema = self._schemas.get(self._name, NO_SCHEMAS)
        self._opened = 0
        self._state = self._between

    def _between(self) -> bool:
        """Read the tag of the next argument, or the end of the call."""
        self._held = held = self._held.lstrip(_SPACE)
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
        return self._give_up()

    def _in_head(self) -> bool:
        """Read a key, and the text (head) between the key and its value."""
        head = self._held[:_LONGEST_HEAD]
        key, found, _ = head.partition(self._key_end)
        rest = head[len(key) :]
        if self._writing.loose and (key or found) and not _ANY_NAME.fullmatch(key):
            self._held = self._open[0] + self._held
            return self._give_up()
        if found:
            for shown, kind in self._writing.shown:
                match = shown.match(rest)
                if match is not None:
                    self._begin_value(key.strip(), kind, self._held[len(key) + match.end() :])
                    return True
        if len(self._held) < _LONGEST_HEAD:
            return False
        return self._give_up()

    def _begin_value(self, key: str, kind: str, value: str) -> None:
        self._of_value = property_schema(self._schema, key)
        self._types = types_of(self._of_value, self._schema)
        if KEY in self._writing.tail:
            self._value_ends = self._ends_of(key)
        if kind == "string":
            self._types = _TEXT
        elif kind:
            self._types -= _TEXT
        self._tell_key(key)
        self._held, self._stops, self._follows = value, self._value_ends, self._behind
        self._state = self._first_break

    def _ends_of(self, key: str) -> tuple[str, ...]:
        """Return the texts that end the value of `key`: its end tag (tail), or texts after it."""
        tags = self._writing
        tail = tags.of_key(key).tail.strip()
        if not tags.item:
            return tail, tags.open.strip(), self._closes
        return tail, tags.tail.partition(f"/{KEY}{tags.heads[0][1]}")[2] + self._closes

    def _first_break(self) -> bool:
        """Drop the line break before a value, and the quote that opens a string."""
        held, quote = self._held, self._writing.quote[0]
        if self._breaks:
            if held == "\r":
                return False
            self._held = held = held.removeprefix("\r\n" if held[0] == "\r" else "\n")
        if quote and held.startswith(quote):
            self._held, self._stops = held[len(quote) :], (self._writing.quote[1],)
            self._types, self._follows = _TEXT, ()
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
        value, end = self._certain()
        if end is None:
            return value, False
        if end not in self._value_ends[1:]:
            self._held = self._held[len(end) :]
        elif self._writing.item:
            self._held = self._held[len(end) - len(self._closes) :]
        self._state = self._between if self._stops is self._value_ends else self._behind_quote
        return value, True

    def _behind_quote(self) -> bool:
        """Drop the tail (end tag) of a value that ended with a quote."""
        self._held = held = self._held.lstrip(_SPACE)
        tail = self._value_ends[0]
        if not held.startswith(tail) and tail.startswith(held):
            return False
        self._held = held.removeprefix(tail)
        self._state = self._between
        return True

    def _in_string(self) -> bool:
        value, ended = self._up_to_end()
        self._continue_call(_inside(value) + ('"' if ended else ""))
        return ended

    def _in_other(self) -> bool:
        value, ended = self._up_to_end()
        self._value.append(value)
        if ended:
            self._continue_call(self._converted("".join(self._value)))
        elif self._types != _TEXT_OR_NULL or may_be_null("".join(self._value)):
            return False
        else:
            self._continue_call('"' + _inside("".join(self._value)))
            self._state = self._in_string
        self._value.clear()
        return ended

    def _converted(self, text: str) -> str:
        """Return a value that has ended as JSON."""
        if not self._writing.item:
            return as_json(text, self._types)
        return json_of_elements(text, self._writing, self._of_value, self._schema)

    def _end_value(self) -> None:
        """Read the end of a value at the end of the response; the rest of a string is reported."""
        self._is_over = True
        if self._state == self._in_other:
            self._in_other()
        elif self._state == self._in_string and not self._in_string():
            self._continue_call(_inside(self._held))

    def _certain(self) -> tuple[str, str | None]:
        """Return the part of a value that no later text can change, and the end that was found.

        The value ends at the first of `_stops`, which stays held back; None = no end has come.
        A line break before the end does not belong to the value if the format has `breaks`.
        """
        held = self._held
        found = self._found_end()
        if found is not None and found[1] is not None:
            at, end = found
            self._held = held[at:]
            return (_without_break(held[:at]) if self._breaks else held[:at]), end
        # Hold back text that may be the beginning of an end, and a line break before it.
        shown = len(held) - overlap(held, self._stops) if found is None else found[0]
        if self._breaks and held[:shown].endswith(("\r", "\n")):
            shown = max(0, shown - len("\r\n"))
        self._held = held[shown:]
        return held[:shown], None

    def _found_end(self) -> tuple[int, str | None] | None:
        """Return the place of the first end in the held text, and this end; None = there is none.

        The end is None if it depends on later text whether it is one.
        """
        held, begin, follows = self._held, 0, self._follows
        while found := [(at, end) for end in self._stops if (at := held.find(end, begin)) >= 0]:
            at, end = min(found)
            behind = held[at + len(end) :]
            rest = behind.lstrip(_SPACE)
            is_end = rest.startswith(follows) or len(behind) > _LONGEST_SPACE + len(rest)
            if not follows or end != self._stops[0] or is_end:
                return at, end
            if any(text.startswith(rest) for text in follows):
                return at, end if self._is_over else None
            begin = at + len(end)
        return None


@dataclass(frozen=True)
class Tags(TagTexts, Writing):
    """The `Writing` (layout.py) of arguments with a tag for each one."""

    reads_schemas = True
    parser_class = TagParser

    @property
    def names(self) -> re.Pattern[str]:
        """The expression of the name of a function."""
        return _ANY_NAME if self.loose else super().names

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


def _inside(text: str) -> str:
    """Return `text` escaped for a JSON string, without quotes around it."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _without_break(text: str) -> str:
    """Return `text` without one line break at its end."""
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def tag_rules(tags: TagTexts, schemas: OptionalSchemas, end: str) -> tuple[list[str], list[str]]:
    """Return a Lark expression for each function's arguments and `end`, and all Lark rules.

    Raises:
      ValueError: a grammar cannot express a schema.
    """
    found, rules = [], []
    for i, (name, schema) in enumerate(schemas.items()):
        if schema is None:
            found.append("free")
            continue
        if tags.item:
            check_size(schema)
        members, of_values = member_rules(tags, f"value_{i}", schema, schema, value_rule)
        found.append(f"arguments_{i} {lark(end)}")
        rules += [_marked(rule, name) for rule in of_values]
        rules.append(f"arguments_{i}: {members}")
    if tags.python:
        rules += PYTHON_VALUES.shared()
    if any("]: TEXT" in rule or " TEXT " in rule for rule in rules):
        rules.append(_text(tags, end))
    if None in schemas.values():
        rules.append(_free(tags, end))
    return found, rules


def _marked(rules: str, name: str) -> str:
    """Return `rules` with PARAMETERS_OF and `name` after each JSON schema and the last rule."""
    *lines, last = rules.split("\n")
    return "\n".join([
        *(line + (PARAMETERS_OF + name) * (" %json " in line) for line in lines),
        last + PARAMETERS_OF + name,
    ])  # fmt: skip


def _text(tags: TagTexts, end: str) -> str:
    """Return the Lark rule of a string without tags, because a tag would end the string."""
    tail = end if tags.loose else tags.tail
    texts = [tags.tail.partition(KEY)[0]] if KEY in tags.tail else [tags.open, tail]
    ends = "|".join(escaped(end.strip()) for end in texts)
    return rf"TEXT: /(.|\n)*/ & ~/(.|\n)*({ends})(.|\n)*/"


def _free(tags: TagTexts, end: str) -> str:
    """Return the Lark rule of arguments without a schema, and of the text `end` after them."""
    if tags.item or tags.loose:  # tags inside of tags: no single tag marks the end
        return f"free[suffix={json.dumps(end)}]: /(.|\\n)*/"
    heads = " | ".join(dict.fromkeys(json.dumps(head) for _, head in tags.heads))
    stop = escaped(tags.heads[0][1].strip()[0])
    return "\n".join([
        f"free: ( {json.dumps(tags.open)} key head any_value )* {lark(end)}",
        rf"key: /[^{stop}\r\n]{{1,128}}/",
        f"head: {heads}",
        rf"any_value[suffix={json.dumps(tags.tail)}]: /(.|\n)*/",
    ])  # fmt: skip


def value_rule(tags: TagTexts, rule: str, schema: Any, of_all: JsonSchema) -> str:
    """Return the Lark rule of a value and of the end tag (tail) after it."""
    end = json.dumps(tags.tail)
    types = types_of(schema, of_all)
    if tags.item and not types:
        return rf"{rule}[suffix={end}]: /(.|\n)*/"
    if tags.item and types & {"array", "object"}:
        return nested_rule(tags, rule, schema, of_all, value_rule)
    if "string" not in types:
        return _other_value_rule(tags, rule, schema, of_all, types)
    choices: list[Any] = []
    for part in parts_of(schema, of_all):
        for word in ("pattern", "format", "minLength", "maxLength"):
            if word in part:
                msg = f"{word} of a string is not supported in this model's format of calls"
                raise ValueError(msg)
        choices += [part["const"]] if "const" in part else part.get("enum") or ()
    if choices:
        return f"{rule}: ( {_listed(tags, choices, types)} ) {end}"
    before, behind = tags.quote
    begin = f"{rule}: {json.dumps(before)} {rule}_text\n{rule}_text" if before else rule
    if isinstance(schema, dict) and INPUT_GRAMMAR in schema:  # the input of a custom tool
        asked = {**schema[INPUT_GRAMMAR], "end": behind + tags.tail}
        return f"{begin}: {RAW_TEXT} {json.dumps(asked)}"
    return f"{begin}[suffix={json.dumps(behind + tags.tail)}]: TEXT"


def _other_value_rule(
    tags: TagTexts, rule: str, schema: Any, of_all: JsonSchema, types: Types
) -> str:
    """Return the Lark rule of a value that is no string, and of the end tag after it."""
    end = json.dumps(tags.tail)
    if tags.python:
        values = ValueRules(PYTHON_VALUES, f"{rule}_v", of_all)
        with suppress(ValueError):  # these rules allow JSON too, but not all keywords of schemas
            return "\n".join([f"{rule}: {values.value(schema)} {end}", *values.lines])
    options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    json_rule = f"{rule}_json: %json {_dumped(schema, definitions(of_all), options)}"
    is_free = not any({"enum", "const"} & part.keys() for part in parts_of(schema, of_all))
    words = ["True", "False"] * ("boolean" in types) + ["None"] * ("null" in types)
    # Templates write these words as Python does, also where lists and objects are JSON.
    more = "".join(f" | {json.dumps(word)}" for word in words) if is_free else ""
    return f"{rule}: ( {rule}_json{more} ) {end}\n{json_rule}"


def _listed(tags: TagTexts, choices: list[Any], types: Types) -> str:
    """Return Lark alternatives for `choices` as the format writes them, and null if allowed."""
    before, behind = tags.quote
    texts = [f"{before}{c}{behind}" if isinstance(c, str) else json.dumps(c) for c in choices]
    return " | ".join(map(json.dumps, dict.fromkeys([*texts, *(["null"] * ("null" in types))])))


def _dumped(schema: Any, *more: dict[str, Any]) -> str:
    whole: dict[str, Any] = dict(schema) if isinstance(schema, dict) else {}
    for members in more:
        whole |= members
    return json.dumps(whole)
