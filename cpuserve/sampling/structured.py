"""StructuredOutputs: the structure of a response, with the fields of vLLM.

Structural tags, of vLLM and xgrammar, are tags with a structure inside free text. They become Lark
grammars here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.sampling.grammar_marks import (
    IF_POSSIBLE,
    INPUT,
    INPUT_GRAMMAR,
    OF_FUNCTION,
    OF_GRAMMAR,
    OTHER_TOKENS,
    PARAMETERS_OF,
    RAW_TEXT,
    WHITE_SPACE,
)

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


MAX_CHARS = 1 << 18  # characters of a schema, a regular expression, a grammar, or all choices
MAX_CHOICES = 4096
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

# Kinds of grammars, for StructuredOutputs.key. JSON, OPEN_JSON: a schema. An object without
# additionalProperties has no other members in JSON, and may have any members in OPEN_JSON.
# CALLS: tool calls or a structural tag, alone or in free text.
# WITH_CALLS: either the requested structure or tool calls.
JSON, OPEN_JSON = "json", "open_json"
CALLS = "calls"
WITH_CALLS = "with_calls"

_ANY_OBJECT = '{"type":"object"}'


class StructuredOutputs(
    msgspec.Struct, omit_defaults=True, kw_only=True, forbid_unknown_fields=True
):
    """The structure of a response: JSON of a schema, or a text that a choice or grammar allows.

    grammar: Lark or GBNF.
    structural_tag: see tag_grammar; an object, or its JSON.
    disable_additional_properties: an object of a schema
      without `additionalProperties` has only the members that the schema lists.
    disable_any_whitespace, whitespace_pattern: only their defaults are possible.
    calls: a Lark grammar of tool calls, which may permit free text.
      If another field is set as well, the response matches either that field or this grammar.
    role: the field that asks for the structure, for errors: "structured_outputs" or "tools".
    later: the structure begins after a thought, in the next request of the response;
      the grammar is compiled now, so that errors come before the thought.

    Raises:
        InvalidRequest: no field or several fields are set, or a field is too long.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    calls: str | None = None
    disable_additional_properties: bool = True
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    role: str = "structured_outputs"
    later: bool = False

    def __post_init__(self) -> None:
        """Check the fields, and encode a schema, so that every process reads the same text."""
        if self.disable_any_whitespace or self.whitespace_pattern is not None:
            name = "disable_any_whitespace" if self.disable_any_whitespace else "whitespace_pattern"
            self._refuse(f"{self.role}: {name} is not supported: omit it")
        given = [name for name in KINDS if getattr(self, name) not in (None, "", [])]
        if self.structural_tag not in (None, ""):
            self._read_tag()
        if self.json_object is False:
            given.remove("json_object")
        if len(given) > 1 or not (given or self.calls):
            found = f"got {' and '.join(given)}" if given else "none is set"
            self._refuse(f"{self.role} needs exactly one of {', '.join(KINDS)}: {found}")
        if isinstance(self.json, dict | bool):
            try:
                self.json = msgspec.json.encode(self.json).decode()
            except (RecursionError, TypeError, ValueError, msgspec.MsgspecError) as error:
                self._refuse(f"{self.role} has a JSON schema that is no JSON: {error}")
        if self.choice is not None and len(self.choice) > MAX_CHOICES:
            count = len(self.choice)
            self._refuse(f"{self.role} has {count} choices: at most {MAX_CHOICES} are allowed")
        if self.choice is not None and not all(self.choice):
            self._refuse(f"{self.role} has an empty choice")
        if (size := self.num_chars) > MAX_CHARS:
            # The functions of a structured response are part of its grammar.
            what = f"{self.role} and tools have" if given and self.calls else f"{self.role} has"
            self._refuse(f"{what} {size} characters: at most {MAX_CHARS} are allowed")

    @property
    def num_chars(self) -> int:
        """The number of characters of all texts that are set."""
        texts = (
            self.json,
            self.regex,
            self.grammar,
            self.structural_tag,
            self.calls,
            *(self.choice or ()),
        )
        return sum(len(text) for text in texts if isinstance(text, str))

    @property
    def is_form(self) -> bool:
        """Whether the whole response has the structure, or is a tool call instead."""
        return self.structural_tag in (None, "") and bool(self._form[1])

    def role_of(self, error: str) -> str:
        """Return the field of the request that caused an error of the grammar."""
        # Errors with these prefixes are in the grammar of a tool, so the field `tools` is wrong.
        return "tools" if error.startswith((OF_FUNCTION, OF_GRAMMAR)) else self.role

    @property
    def key(self) -> tuple[str, str]:
        """The kind and the text of the grammar; equal keys are the same grammar.

        Kinds: JSON or OPEN_JSON (text: the schema), "regex", "choice" (text: a JSON list),
        "grammar", CALLS (text: their grammar), or WITH_CALLS (text: a JSON list of the kind
        and the text of the requested structure, and the grammar of the calls).
        """
        kind, text = self._form
        if self.calls is None:
            return kind, text
        if not text:
            return CALLS, self.calls
        return WITH_CALLS, msgspec.json.encode([kind, text, self.calls]).decode()

    @property
    def _form(self) -> tuple[str, str]:
        if self.json_object:
            return JSON, _ANY_OBJECT
        if isinstance(self.structural_tag, str) and self.structural_tag:
            return CALLS, tag_grammar(msgspec.json.decode(self.structural_tag))
        if self.choice is not None:
            return "choice", msgspec.json.encode(self.choice).decode()
        if isinstance(self.json, str) and self.json:
            return (JSON if self.disable_additional_properties else OPEN_JSON), self.json
        return ("regex", self.regex) if self.regex else ("grammar", self.grammar or "")

    def _read_tag(self) -> None:
        """Check the structural tag, and encode it; equal tags become equal texts."""
        tag = self.structural_tag
        try:
            given = msgspec.json.decode(tag) if isinstance(tag, str) else tag
            tag_grammar(given)
            self.structural_tag = msgspec.json.encode(given).decode()
        except TagError as error:
            self._refuse(f"{self.role} has a structural tag that is not valid: {error}")
        except (RecursionError, TypeError, ValueError, msgspec.MsgspecError) as error:
            self._refuse(f"{self.role} has a structural tag that is no JSON: {error}")

    def _refuse(self, message: str) -> None:
        raise InvalidRequest(message, role=self.role)


class InputGrammar(NamedTuple):
    """The grammar of a custom tool's text. syntax: "lark" or "regex"; "" = any text."""

    syntax: str = ""
    definition: str = ""

    @property
    def schema(self) -> dict[str, Any] | None:
        """The schema of the function's arguments, with the grammar; None = any text."""
        if not self.syntax:
            return None
        member = {"type": "string", INPUT_GRAMMAR: self._asdict()}
        return {**input_arguments(member), "additionalProperties": False}


def input_arguments(member: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a function with the one parameter INPUT; member: the schema of INPUT."""
    return {"type": "object", "properties": {INPUT: member}, "required": [INPUT]}


def if_possible(grammar: str, functions: Collection[str]) -> str:
    """Return `grammar` with IF_POSSIBLE in each line that has the schema of one of `functions`."""

    def marked(line: str) -> str:
        rule, found, name = line.rpartition(PARAMETERS_OF)
        return f"{rule}{IF_POSSIBLE}{found}{name}" if found and name in functions else line

    return "\n".join(map(marked, grammar.split("\n")))


def structured_from(fields: Any) -> StructuredOutputs:
    """Return the StructuredOutputs that `fields`, an object of a client or of this type, sets.

    Raises:
        InvalidRequest: the object has an unknown member, or one with a wrong type or value.
    """
    if isinstance(fields, StructuredOutputs):
        return fields
    try:
        for own in ("role", "calls", "later"):  # only the server sets these
            if isinstance(fields, dict) and own in fields:
                msg = f"Object contains unknown field `{own}`"
                raise msgspec.ValidationError(msg)
        return msgspec.convert(fields, StructuredOutputs)
    except msgspec.ValidationError as error:
        msg = f"structured_outputs is invalid: {error}"
        raise InvalidRequest(msg, role="structured_outputs") from error
