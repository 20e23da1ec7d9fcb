"""Calls that are JSON objects: a reader of one object, grammars, and a base class of parsers."""

from __future__ import annotations

import json
import re

from cpuserve.sampling.grammar_marks import PARAMETERS_OF, WHITE_SPACE
from cpuserve.serving.tools.base import JsonSchema, OptionalSchemas
from cpuserve.serving.tools.json_scan import ObjectScanner
from cpuserve.serving.tools.machine import CallParser

# The members that may hold the arguments; the member that the model writes first counts.
_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")  # Cohere writes tool_name
USUAL_SPACE = f"({WHITE_SPACE})?"


def call_grammar(rule: str, schemas: OptionalSchemas, function: str | None, key: str) -> str:
    """Return the Lark grammar of calls that are objects with the arguments as member `key`.

    rule: the start rule, from calls_rule. If `function` is set,
    the rule of a call begins after `"KEY":`, else after the quotation mark before the name.
    """
    calls = []
    for i, (name, schema) in enumerate(schemas.items()):
        named = "" if function is not None else json.dumps(f'{name}", "{key}":')
        calls.append(f'call_{i}: {named} " "? {arguments_rule(i, schema)} "}}"')
    return "\n".join([rule, *calls, *arguments_rules(schemas)])


def text_call_rules(
    schemas: OptionalSchemas, key: str, before: str, inside: str = USUAL_SPACE
) -> list[str]:
    """Return the Lark rules of calls in text: objects with the arguments as member `key`.

    before, inside: regular expressions of the white space before an object,
    and inside it before the name. Some models write `"type": "function"` before the name.
    """
    space = USUAL_SPACE
    kind = f'("type"{inside}:{inside}"function"{inside},{inside})?'
    rules = [
        f'middle: /{space},{space}"{key}"{space}:{space}/',
        rf"end: /{space}\}}/",
        *arguments_rules(schemas),
    ]
    for i, (name, schema) in enumerate(schemas.items()):
        named = f'"name"{inside}:{inside}"{re.escape(name)}"'
        rules.append(f"call_{i}: head_{i} middle {arguments_rule(i, schema)} end")
        rules.append(rf"head_{i}[lazy]: /{before}\{{{inside}{kind}{named}/")
    return rules


def arguments_rule(index: int, schema: JsonSchema | None) -> str:
    """Return the name of the Lark rule for the arguments of function number `index`."""
    return "free" if schema is None else f"arguments_{index}"


def arguments_rules(schemas: OptionalSchemas) -> list[str]:
    """Return the Lark rules of the arguments of all functions in `schemas`."""
    rules = [
        object_rule(arguments_rule(i, schema), schema) + PARAMETERS_OF + name
        for i, (name, schema) in enumerate(schemas.items())
        if schema is not None
    ]
    if None in schemas.values():  # many functions share this rule, which makes the grammar small
        rules.append(object_rule("free", {}))
    return rules


def object_rule(name: str, schema: JsonSchema) -> str:
    """Return the Lark rule of a JSON object of a schema."""
    options = {"x-guidance": {"whitespace_pattern": WHITE_SPACE}}
    return f"{name}: %json {json.dumps({'type': 'object', **schema, **options})}"


class JsonCallParser(CallParser):
    """A parser of calls that are JSON objects."""

    _call: JsonCall | None = None

    def _tell(self, call: JsonCall) -> None:
        """Report the new part of a call's arguments, once the function name is known."""
        if not call.name:
            return
        new = call.take_arguments()
        if call.told:
            self._continue_call(new)
        else:
            call.told = True
            self._begin_call(call.name, new)


class JsonCall:
    """The object of one call: {"name": ..., "arguments": ...} in any order.

    broken: whether the text so far cannot be the beginning of such an object.
    """

    def __init__(self) -> None:
        self.raw: list[str] = []
        self.name = ""
        self.told = False
        self.broken = False
        self._scanner = ObjectScanner()
        self._arguments: list[str] | None = None
        self._num_taken = 0

    @property
    def closed(self) -> bool:
        """Whether the object has ended."""
        return self._scanner.closed

    @property
    def lacks_end(self) -> bool:
        """Whether another character came where "}" could have ended the object."""
        return self.broken and self._scanner.may_close

    @property
    def has_arguments(self) -> bool:
        """Whether the arguments have begun."""
        return self._arguments is not None

    def read(self, text: str) -> int:
        """Read up to the object's end or an invalid character; return how many are valid."""
        # The text is read by single characters, so that the result does not depend on its pieces.
        for at, char in enumerate(text):
            self._push(char)
            if self.broken:
                return at
            self.raw.append(char)
            if self.closed:
                return at + 1
        return len(text)

    def close(self) -> None:
        """End an object although its last "}" is missing (`lacks_end`)."""
        self._push("}")

    def _push(self, char: str) -> None:
        scanner = self._scanner
        scanner.push(char)
        self.broken = scanner.broken
        if self._arguments is None:
            members = scanner.members
            self._arguments = next((members[key] for key in _ARGUMENTS if key in members), None)
        if scanner.ended in _NAMES and not self.name:
            name = _decoded("".join(scanner.members[scanner.ended]))
            self.name = name if isinstance(name, str) else ""
            self.broken = self.broken or not self.name

    def take_arguments(self) -> str:
        """Return the part of the arguments that was not taken yet; "{}" if there are none."""
        written = self._arguments
        if not written or written[0] != "{":
            # Some models write the arguments as a JSON string, or leave them out.
            # Which of these cases applies is known only when the object has ended.
            return _unpacked("".join(written or ())) if self.closed else ""
        new, self._num_taken = written[self._num_taken :], len(written)
        return "".join(new)


def _unpacked(written: str) -> str:
    value = _decoded(written)
    return value if isinstance(value, str) and value else "{}"


def _decoded(text: str) -> object:
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):  # a model may nest lists thousands of times
        return None
    return value
