"""Structural tags of vLLM and xgrammar as Lark grammars: tags with a structure inside free text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from cpuserve.sampling.grammar_marks import OTHER_TOKENS, PARAMETERS_OF, RAW_TEXT, WHITE_SPACE

_ANY = r"/(.|\n)*/"
_MOST_DEPTH = 32
# Formats that may be followed by any text, so that only a text after them shows where they end.
_OPEN_ENDED = ("any_text", "triggered_tags")


class TagError(ValueError):
    """A structural tag that is not valid, or that no grammar here can express."""


def tag_grammar(tag: Any) -> str:
    """Return the Lark grammar of a structural tag, for the kind CALLS of StructuredOutputs.

    tag: {"format": ...} of xgrammar, or {"structures": ..., "triggers": ...} of older requests.

    Raises:
      TagError: the tag is not valid, or has a format that is not supported.
    """
    if not isinstance(tag, Mapping):
        msg = "it must be an object with a format, or with structures and triggers"
        raise TagError(msg)
    given = _from_structures(tag) if "structures" in tag else _member(tag, "format", dict, "")
    writer = _TagWriter()
    start = writer.written(given, "", "format", 0)
    return "\n".join([f"start: {start}", *writer.rules])


def _from_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the older fields `structures` and `triggers` into the newer field `format`."""
    tags = []
    for i, each in enumerate(_member(tag, "structures", list, "")):
        where = f"structures[{i}]"
        if not isinstance(each, Mapping) or "schema" not in each:
            msg = f"{where} must have begin, schema and end"
            raise TagError(msg)
        content = {"type": "json_schema", "json_schema": each["schema"]}
        tags.append({"type": "tag", **each, "content": content})
    return {"type": "triggered_tags", "triggers": _member(tag, "triggers", list, ""), "tags": tags}


def _member(value: Mapping[str, Any], name: str, kind: type, where: str) -> Any:
    found = value.get(name)
    if not isinstance(found, kind):
        article = {str: "a text", list: "a list", dict: "an object", bool: "true or false"}[kind]
        msg = f"{where}{'.' if where else ''}{name} must be {article}"
        raise TagError(msg)
    return found


def _flag(value: Mapping[str, Any], name: str, where: str) -> bool:
    return bool(_member({name: False, **value}, name, bool, where))


class _TagWriter:
    """Writes formats as Lark expressions, and collects the rules that the expressions need."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._count = 0
        self._formats: dict[str, Callable[[Mapping[str, Any], str, str, int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def written(self, given: Any, end: str, where: str, depth: int) -> str:
        """Return the Lark expression of a format and of the text `end` after it ("" = no text).

        where: the path of the format within the tag, for error messages.
        depth: the number of formats that contain this format.
        """
        if not isinstance(given, Mapping):
            msg = f"{where} must be an object with a type"
            raise TagError(msg)
        if depth > _MOST_DEPTH:
            msg = f"{where} is nested too deeply: at most {_MOST_DEPTH} levels are allowed"
            raise TagError(msg)
        kind = given.get("type")
        write = self._formats.get(kind) if isinstance(kind, str) else None
        if write is None:
            known = ", ".join(self._formats)
            msg = f"{where}.type {json.dumps(kind)[:80]} is not supported: use {known}"
            raise TagError(msg)
        return write(given, end, where, depth)

    def _const_string(self, given: Mapping[str, Any], end: str, where: str, _depth: int) -> str:
        return _literal(_member(given, "value", str, where) + end)

    def _json_schema(self, given: Mapping[str, Any], end: str, where: str, _depth: int) -> str:
        schema = given.get("json_schema")
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                msg = f"{where}.json_schema is no JSON: {error}"
                raise TagError(msg) from None
        if not isinstance(schema, dict | bool):
            msg = f"{where}.json_schema must be a JSON schema"
            raise TagError(msg)
        whole = {} if schema is True else {"not": {}} if schema is False else schema
        options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        name = self._rule(f"%json {json.dumps({**whole, **options})}{PARAMETERS_OF}{where}")
        return f"{name} {_literal(end)}"

    def _regex(self, given: Mapping[str, Any], end: str, where: str, _depth: int) -> str:
        return self._raw("regex", _member(given, "pattern", str, where), end, where)

    def _grammar(self, given: Mapping[str, Any], end: str, where: str, _depth: int) -> str:
        return self._raw("gbnf", _member(given, "grammar", str, where), end, where)

    def _raw(self, syntax: str, definition: str, end: str, where: str) -> str:
        """Return the expression of a text with a grammar of the client."""
        asked = {"syntax": syntax, "definition": definition, "end": end}
        return self._rule(f"{RAW_TEXT} {json.dumps(asked)}{PARAMETERS_OF}{where}")

    def _any_text(self, given: Mapping[str, Any], end: str, where: str, _depth: int) -> str:
        barred = _texts({"excludes": [], **given}, "excludes", where)
        text = _ANY
        if barred:
            self._count += 1
            text = f"TEXT_{self._count}"
            found = "|".join(map(_escaped, barred))
            self.rules.append(rf"{text}: {_ANY} & ~/(.|\n)*({found})(.|\n)*/")
        return self._until(end, text)

    def _until(self, end: str, text: str = _ANY) -> str:
        """Return the expression of a text up to the first `end`, which may be a special token."""
        self._count += 1
        name = f"r_{self._count}"
        if not end:
            self.rules.append(f"{name}: {text}")
            return name
        self.rules += [f"{name}[suffix={json.dumps(end)}]: {text}", f"{name}_all: {text}"]
        return f"( {name} | {name}_all {_literal(end)} )"

    def _sequence(self, given: Mapping[str, Any], end: str, where: str, depth: int) -> str:
        elements = _member(given, "elements", list, where)
        parts, skipped = [], 0
        for i, element in enumerate(elements):
            place = f"{where}.elements[{i}]"
            if skipped:  # the text of this element has ended an earlier element
                skipped -= 1
                continue
            last, until = i + 1 == len(elements), ""
            if not last and isinstance(element, Mapping) and element.get("type") in _OPEN_ENDED:
                following = elements[i + 1]
                if not isinstance(following, Mapping) or following.get("type") != "const_string":
                    msg = (
                        f"{place} is {element['type']}, which must be the last element, or come "
                        "before a const_string"
                    )
                    raise TagError(msg)
                until = _member(following, "value", str, f"{where}.elements[{i + 1}]")
                skipped = 1
                last = i + 2 == len(elements)
            parts.append(self.written(element, until + end * last, place, depth + 1))
        return f"( {' '.join(parts)} )" if parts else _literal(end)

    def _or(self, given: Mapping[str, Any], end: str, where: str, depth: int) -> str:
        elements = _member(given, "elements", list, where)
        return _either(
            [
                self.written(element, end, f"{where}.elements[{i}]", depth + 1)
                for i, element in enumerate(elements)
            ],
            f"{where}.elements",
        )

    def _tag(
        self, given: Mapping[str, Any], end: str, where: str, depth: int, begun: str = ""
    ) -> str:
        """Return the expression of a tag without `begun`, the first part of its `begin`.

        Another expression of the grammar, for the trigger of the tag, matches `begun`.
        """
        begin = _member(given, "begin", str, where).removeprefix(begun)
        ends = given.get("end")
        if isinstance(ends, str):
            ends = [ends]
        if not isinstance(ends, list) or not ends or not all(isinstance(e, str) for e in ends):
            msg = f"{where}.end must be a text"
            raise TagError(msg)
        bodies = [
            self.written(given.get("content"), last + end, f"{where}.content", depth + 1)
            for last in ends
        ]
        return f"{_literal(begin)} {_either(bodies, where)}"

    def _triggered_tags(self, given: Mapping[str, Any], end: str, where: str, depth: int) -> str:
        triggers = _texts(given, "triggers", where)
        tags = self._by_trigger(given, triggers, where, depth)
        self._count += 1
        name = f"r_{self._count}"
        for i, trigger in enumerate(triggers):
            self.rules += [
                rf"{name}_before_{i}[lazy]: /(.|\n)*{_escaped(trigger)}/",
                f"{name}_opened_{i}: {name}_before_{i} | {_literal(trigger)}",
            ]
        alone = f"{OTHER_TOKENS}{triggers[0]}" if len(triggers) == 1 else ""
        self.rules.append(rf"{name}_text: /(.|\n)+/{alone}")
        opened = [f"{name}_opened_{i} {body}" for i, body in enumerate(tags)]
        self.rules.append(f"{name}_one: {_either(opened, where)}")
        one, text = f"{name}_one", f"{name}_text"
        needs, stops = _flag(given, "at_least_one", where), _flag(given, "stop_after_first", where)
        if stops:
            first = f"{text}* {one} {_literal(end)}"
            return first if needs else f"( {first} | {self._until(end)} )"
        before = f"{text}* {one} " if needs else ""
        rest = f"( {text} | {one} )*"
        return f"{before}{rest} {self._until(end)}" if end else f"{before}{rest}"

    def _by_trigger(
        self, given: Mapping[str, Any], triggers: list[str], where: str, depth: int
    ) -> list[str]:
        """Return for each trigger the expression of the tags that it begins, after the trigger."""
        if not triggers:
            msg = f"{where}.triggers must have a text"
            raise TagError(msg)
        found: list[list[str]] = [[] for _ in triggers]
        for i, tag in enumerate(_member(given, "tags", list, where)):
            place = f"{where}.tags[{i}]"
            begin = _member(tag if isinstance(tag, Mapping) else {}, "begin", str, place)
            fits = [n for n, trigger in enumerate(triggers) if begin.startswith(trigger)]
            if len(fits) != 1:
                msg = f"{place}.begin must begin with one of the triggers, and with only one"
                raise TagError(msg)
            body = self._tag(tag, "", place, depth + 1, triggers[fits[0]])
            found[fits[0]].append(body)
        for trigger, bodies in zip(triggers, found, strict=True):
            if not bodies:
                msg = f"{where}.triggers has {json.dumps(trigger)[:80]}, which no tag begins with"
                raise TagError(msg)
        return [_either(bodies, where) for bodies in found]

    def _tags_with_separator(
        self, given: Mapping[str, Any], end: str, where: str, depth: int
    ) -> str:
        separator = _member(given, "separator", str, where)
        bodies = []
        for i, tag in enumerate(_member(given, "tags", list, where)):
            place = f"{where}.tags[{i}]"
            bodies.append(self._tag(tag if isinstance(tag, Mapping) else {}, "", place, depth + 1))
        one = self._rule(_either(bodies, f"{where}.tags"))
        stops = _flag(given, "stop_after_first", where)
        more = "" if stops else f" ( {_literal(separator)} {one} )*"
        several = f"( {one}{more} )" + "?" * (not _flag(given, "at_least_one", where))
        return f"{several} {_literal(end)}"

    def _rule(self, body: str) -> str:
        """Add a Lark rule with this body to the grammar, and return the rule's name."""
        self._count += 1
        self.rules.append(f"r_{self._count}: {body}")
        return f"r_{self._count}"


def _either(expressions: list[str], where: str) -> str:
    if not expressions:
        msg = f"{where} must not be empty"
        raise TagError(msg)
    return f"( {' | '.join(expressions)} )"


def _texts(value: Mapping[str, Any], name: str, where: str) -> list[str]:
    found: list[Any] = _member(value, name, list, where)
    if not all(isinstance(each, str) and each for each in found):
        msg = f"{where}.{name} must have texts, and none may be empty"
        raise TagError(msg)
    return list(found)


def _literal(text: str) -> str:
    return json.dumps(text)


def _escaped(text: str) -> str:
    """Return a regular expression of the grammar library that matches the text."""
    return re.sub(r"([!-/:;=?@\[-`{-~])", r"\\\1", text).replace("\n", "\\n")
