"""Grammars of values that are written in another way than JSON: as Python, or in braces.

JSON schemas become rules of Lark. A keyword that a rule cannot express is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from cpuserve.sampling.grammar_marks import INPUT_GRAMMAR, PARAMETERS_OF, RAW_TEXT
from cpuserve.serving.tools.base import JsonSchema, OptionalSchemas
from cpuserve.serving.tools.values import referred

_MOST_RULES = 2000
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# Keywords that no rule can express. Unknown keywords are ignored, as in JSON schemas.
_REFUSED = (
    "contains", "dependencies", "dependentRequired", "dependentSchemas", "else", "if",
    "maxProperties", "minProperties", "not", "patternProperties", "prefixItems", "propertyNames",
    "then", "unevaluatedItems", "unevaluatedProperties",
)  # fmt: skip
_OF_TEXT = ("pattern", "format", "minLength", "maxLength")
_OF_TYPE = {
    "string": _OF_TEXT,
    "number": _NUMBERS,
    "integer": _NUMBERS,
    "array": ("items", "minItems", "maxItems", "uniqueItems"),
    "object": ("properties", "required", "additionalProperties"),
}
_TYPES = ("string", "number", "boolean", "null", "array", "object")


@dataclass(frozen=True)
class ValueSyntax:
    """How a format writes values. All members but `name` and `sorts` are Lark.

    name: the beginning of the names of all rules.
    text: a string with any content.
    words: true, false and null.
    comma, colon: the text between two values, and between a key and its value.
    keys: the texts around a key of an object, and around the key of an argument of a call.
    key: a terminal of any key of an object.
    terminals: further rules and terminals.
    quotes: the texts around a string, one for each way of writing; a fixed string has no escapes,
      so a string that contains one of these texts is written with another one.
    raw_mark: the text around strings, if they have no escapes; "" = strings have some.
    sorts: whether keys are written in alphabetical order, not in the order of the schema.
    """

    name: str
    text: str
    words: Mapping[Any, str]
    comma: str
    colon: str
    key: str
    key_quotes: Sequence[str]
    terminals: Sequence[str]
    quotes: Sequence[str]
    raw_mark: str = ""
    sorts: bool = False

    @property
    def any_value(self) -> str:
        """The name of the rule of any value."""
        return f"{self.name}_any"

    def shared(self) -> list[str]:
        """Return the rules that the rules of all schemas refer to."""
        any_, of, comma = self.any_value, self.name, self.comma
        words = " | ".join(self.words.values())
        return [
            f"{any_}: {self.text} | {of}_number | {words} | {of}_list | {of}_object",
            f'{of}_number: %json {{"type": "number"}}',
            f'{of}_list: "[" ( {any_} ( {comma} {any_} )* )? "]"',
            f'{of}_object: "{{" ( {of}_member ( {comma} {of}_member )* )? "}}"',
            f"{of}_member: {self.key} {self.colon} {any_}",
            *self.terminals,
        ]

    def literal(self, value: Any) -> str:
        """Return the Lark expression of one fixed value; ValueError if it cannot be written."""
        if isinstance(value, bool) or value is None:
            return self.words[value]
        if isinstance(value, str):
            return _either(self._quoted(value))
        if isinstance(value, list):
            return f'"[" {f" {self.comma} ".join(map(self.literal, value))} "]"'
        if isinstance(value, dict):
            members = (
                f"{self.key_of(key)} {self.colon} {self.literal(inner)}"
                for key, inner in self.ordered(value)
            )
            return f'"{{" {f" {self.comma} ".join(members)} "}}"'
        return json.dumps(json.dumps(value))

    def key_of(self, key: str) -> str:
        """Return the Lark expression of an object's key."""
        return _either([f"{quote}{key}{quote}" for quote in self.key_quotes])

    def ordered(self, members: Mapping[str, Any]) -> list[tuple[str, Any]]:
        """Return the members of an object as they are ordered in calls."""
        found = list(members.items())
        return sorted(found, key=lambda member: member[0].lower()) if self.sorts else found

    def _quoted(self, text: str) -> list[str]:
        found = [f"{q}{text}{q}" for q in self.quotes if q not in text and "\\" not in text]
        if '"' in self.quotes:
            found.append(json.dumps(text, ensure_ascii=False))
        if not found:
            _refuse(f"the text {text[:40]!r}")
        return list(dict.fromkeys(found))


_ESCAPE = r"\\(['\"\\\/nrtbf]|u[0-9a-fA-F]{4})"
PYTHON_VALUES = ValueSyntax(
    name="py",
    text="PY_TEXT",
    # Some models write the words of JSON.
    words={
        True: '( "True" | "true" )',
        False: '( "False" | "false" )',
        None: '( "None" | "null" )',
    },
    comma='"," " "?',
    colon='":" " "?',
    key="PY_TEXT",
    key_quotes=("'", '"'),
    terminals=(
        rf"""PY_TEXT: /'([^'\\]|{_ESCAPE})*'/ | /"([^"\\]|{_ESCAPE})*"/""",
        r"PY_NAME: /[A-Za-z_][A-Za-z0-9_]{0,63}/",
    ),
    quotes=("'", '"'),
)


class ValueRules:
    """Collects the Lark rules of the schemas of one function.

    mark: the beginning of the names of the rules.
    function: its name, which is written after each rule for messages about errors.
    """

    def __init__(
        self, syntax: ValueSyntax, mark: str, root: JsonSchema, function: str | None = None
    ) -> None:
        self.lines: list[str] = []
        self._syntax, self._mark, self._root = syntax, mark, root
        self._of = "" if function is None else PARAMETERS_OF + function
        self._known: dict[str, str] = {}  # the rules of references
        self._count = 0

    def arguments(self, schema: JsonSchema, equals: str, key: str) -> str:
        """Return the Lark expression of the arguments of a call, in place of an object.

        equals: the text between the name of an argument and its value.
        key: the Lark expression of the name of an argument that the schema does not have.
        """
        keys = [*(schema.get("properties") or ()), *(schema.get("required") or ())]
        heads = {name: json.dumps(f"{name}{equals}") for name in keys}
        further = self.value(schema.get("additionalProperties") or True)
        return self.members(schema, heads, "", f"{key} {json.dumps(equals)} {further}")

    def value(self, schema: Any) -> str:
        """Return the name of the rule of a value; ValueError if no rule can express its schema."""
        if schema is True or schema is None or schema == {}:
            return self._syntax.any_value
        if not isinstance(schema, Mapping):
            _refuse("a schema that allows no value")
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return self._rule(schema)
        if reference not in self._known:
            self._known[reference] = name = self._new()
            target = referred(reference, self._root)
            if not isinstance(target, Mapping):
                msg = f"the reference {reference[:80]!r} leads nowhere"
                raise ValueError(msg)
            self._add(f"{name}: {self._expression(target)}")
        return self._known[reference]

    def members(
        self, schema: JsonSchema, heads: Mapping[str, str], colon: str, any_member: str
    ) -> str:
        """Return the Lark expression of the members of an object of this schema.

        heads: the Lark expression of each key.
        any_member: the expression of a further member, if the schema allows some.
        """
        properties = schema.get("properties")
        known = self._syntax.ordered(properties) if isinstance(properties, Mapping) else []
        required = [key for key in schema.get("required") or () if isinstance(key, str)]
        for key in required:
            if key not in dict(known):
                known.append((key, True))
        comma, further = self._syntax.comma, schema.get("additionalProperties", False)
        more = "" if further is False else f"( {comma} {any_member} )*"
        first = "" if further is False else f"( {any_member} {more} )?"
        for key, inner in reversed(known):
            head = heads.get(key) or self._syntax.key_of(key)
            member, is_optional = f"{head} {colon} {self.value(inner)}", key not in required
            # `first`: no member has come before; `more`: members have.
            first = f"( {member} {more} )" + (f" | {first or _NOTHING}" if is_optional else "")
            first, more = self._named(first), f"( {comma} {member} ){'?' * is_optional} {more}"
            more = self._named(more)
        return first or _NOTHING

    def _named(self, expression: str) -> str:
        name = self._new()
        self._add(f"{name}: {expression}")
        return name

    def _new(self) -> str:
        self._count += 1
        if self._count > _MOST_RULES:
            _refuse(f"a schema with more than {_MOST_RULES} parts")
        return f"{self._mark}_{self._count}"

    def _add(self, line: str) -> None:
        self.lines.append(line + self._of)

    def _rule(self, schema: JsonSchema) -> str:
        name = self._new()
        self._add(f"{name}: {self._expression(schema)}")
        return name

    def _expression(self, schema: JsonSchema) -> str:
        for word in _REFUSED:
            if word in schema:
                _refuse(word)
        if "const" in schema:
            return self._syntax.literal(schema["const"])
        if isinstance(schema.get("enum"), list):
            return " | ".join(map(self._syntax.literal, schema["enum"])) or _refuse("an empty enum")
        for word in ("anyOf", "oneOf", "allOf"):
            if isinstance(options := schema.get(word), list):
                if word == "allOf" and len(options) > 1:
                    _refuse(word)
                if any(key in schema for keys in _OF_TYPE.values() for key in keys):
                    _refuse(f"{word} beside other keywords")
                return " | ".join(map(self.value, options)) or _refuse(f"an empty {word}")
        kinds = schema.get("type")
        types = kinds if isinstance(kinds, list) else [kinds] if kinds else _implied(schema)
        return " | ".join(self._of_type(kind, schema) for kind in types)

    def _of_type(self, kind: Any, schema: JsonSchema) -> str:
        syntax = self._syntax
        match kind:
            case "string":
                return self._text(schema)
            case "integer" | "number":
                kept = {key: schema[key] for key in _NUMBERS if key in schema}
                return self._named(f"%json {json.dumps({'type': kind, **kept})}")
            case "boolean":
                return f"{syntax.words[True]} | {syntax.words[False]}"
            case "null":
                return syntax.words[None]
            case "array":
                return self._list(schema)
            case "object":
                if "properties" not in schema and "additionalProperties" not in schema:
                    return f"{syntax.name}_object"
                further = self.value(schema.get("additionalProperties") or True)
                any_member = f"{syntax.key} {syntax.colon} {further}"
                return f'"{{" {self.members(schema, {}, syntax.colon, any_member)} "}}"'
        return _refuse(f"the type {kind!r}"[:80])

    def _text(self, schema: JsonSchema) -> str:
        mark = self._syntax.raw_mark
        if mark and INPUT_GRAMMAR in schema:  # the input of a custom tool
            asked = {**schema[INPUT_GRAMMAR], "end": mark}
            return f"{json.dumps(mark)} {self._named(f'{RAW_TEXT} {json.dumps(asked)}')}"
        kept = {key: schema[key] for key in _OF_TEXT if key in schema}
        if not kept:
            return self._syntax.text
        if '"' not in self._syntax.quotes:
            _refuse(f"{next(iter(kept))} of a string")
        return self._named(f"%json {json.dumps({'type': 'string', **kept})}")

    def _list(self, schema: JsonSchema) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if schema.get("uniqueItems"):
            _refuse("uniqueItems")
        if not isinstance(least, int) or not isinstance(most, int | None):
            _refuse("a number of items that is not an integer")
        if most == 0:
            return '"[" "]"'
        item, comma = self.value(schema.get("items")), self._syntax.comma
        times = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        inside = f"{item} ( {comma} {item} ){times}"
        return f'"[" {inside if least else f"( {inside} )?"} "]"'


def call_rules(
    syntax: ValueSyntax, schemas: OptionalSchemas, equals: str, key: str, end: str
) -> tuple[list[str], list[str]]:
    """Return a Lark expression for each function's arguments and `end`, and all Lark rules.

    equals: the text between the name of an argument and its value.
    key: the Lark expression of the name of an argument.
    end: the Lark expression after the arguments.

    Raises:
      ValueError: a grammar cannot express a schema.
    """
    found, rules = [], syntax.shared()
    for i, (name, schema) in enumerate(schemas.items()):
        if schema is None:
            inside = "free"
        else:
            values = ValueRules(syntax, f"{syntax.name}{i}", schema, name)
            inside = values.arguments(schema, equals, key)
            rules += values.lines
        found.append(f"{inside} {end}")
    if None in schemas.values():
        argument = f"{key} {json.dumps(equals)} {syntax.any_value}"
        rules.append(f"free: ( {argument} ( {syntax.comma} {argument} )* )?")
    return found, rules


_NOTHING = '""'


def _implied(schema: JsonSchema) -> Sequence[str]:
    """Return the types of a schema without `type`: all, but keywords apply to their type only."""
    named = [kind for kind, words in _OF_TYPE.items() if any(word in schema for word in words)]
    return named[:1] if named else _TYPES


def _either(texts: Sequence[str]) -> str:
    return "( " + " | ".join(map(json.dumps, texts)) + " )"


def _refuse(what: str) -> NoReturn:
    msg = f"{what} is not supported in this model's format of calls"
    raise ValueError(msg)
