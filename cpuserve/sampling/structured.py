"""StructuredOutputs: the structure of a response, with the fields of vLLM."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from cpuserve.errors import InvalidRequest
from cpuserve.sampling.grammar_marks import (
    IF_POSSIBLE,
    INPUT,
    INPUT_GRAMMAR,
    OF_FUNCTION,
    OF_GRAMMAR,
    PARAMETERS_OF,
)
from cpuserve.sampling.structural_tags import TagError, tag_grammar

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
    structural_tag: see structural_tags.py; an object, or its JSON.
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
