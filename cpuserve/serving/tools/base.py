"""The interface of formats of tool calls, and of the parsers that find calls in responses."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from cpuserve.sampling.grammar_marks import OTHER_TOKENS
from cpuserve.serving.calls.events import Text, Thought, ToolCallDelta
from cpuserve.serving.tools.thoughts import Around, ThoughtEnd

Piece: TypeAlias = Text | Thought | ToolCallDelta
JsonSchema: TypeAlias = Mapping[str, Any]
Schemas: TypeAlias = Mapping[str, JsonSchema]
OptionalSchemas: TypeAlias = Mapping[str, JsonSchema | None]
NO_SCHEMAS: Schemas = {}
# The name of a function and its arguments (an object, or a text that is no JSON), for each call.
Calls: TypeAlias = Sequence[tuple[str, Any]]


class ToolParser(Protocol):
    """Finds the thoughts and tool calls in the text of one sequence, which arrives in pieces.

    A piece is a Text, a Thought or a ToolCallDelta. With adjacent pieces of one type joined,
    the pieces do not depend on how the text is divided.

    most_calls: the parser ignores the text after this many complete tool calls; None = no limit.
    ends_at_repeat: the parser drops a tool call that equals an earlier one, and all text after it.
    """

    most_calls: int | None
    ends_at_repeat: bool

    @property
    def num_closed(self) -> int:
        """How many tool calls are complete."""

    @property
    def last_closed(self) -> bool:
        """Whether the tool call that began last is complete."""

    @property
    def is_full(self) -> bool:
        """Whether `most_calls` tool calls are complete, or the last one equals an earlier one."""

    @property
    def in_thought(self) -> bool:
        """Whether the response so far ends inside a thought, before the marker at its end."""

    def may_stop(self, char: str) -> bool:
        """Return whether the next character may be a part of a stop string.

        The result is False in a thought, and in white space that the parser drops after a thought.
        """

    def stops_alike(self, text: str) -> bool:
        """Return whether `may_stop` is known to return the same for each character of `text`."""

    @property
    def ends_with_call(self) -> bool:
        """Whether the last call is complete, and only white space and markers have followed it.

        The result is known only after `flush`.
        """

    @property
    def num_calls(self) -> int:
        """The number of tool calls that have begun: the parser has read their function name."""

    def force(self, opening: str) -> list[Piece]:
        """Return the pieces of `opening`, the beginning of a call that the server has forced."""

    def push(self, text: str) -> list[Piece]:
        """Read the next text; return the pieces that no later text can change."""

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """Return the pieces of the text that is still held back; called once, after all text.

        Text that has begun a tool call is dropped.
        cut: a limit has ended the response, so the beginning of a marker is dropped as well.
        """


class ParserMaker(Protocol):
    """The signature of all classes of parsers of tool calls; ToolFormat.parser has the meanings."""

    def __call__(
        self, found: Any, index: int, opening: str, schemas: Schemas, around: Around | None
    ) -> ToolParser:
        """Return a parser of the format `found`."""


class ToolFormat:
    """How a family of models writes tool calls. By default, the format has no calls.

    name: the name that logs, errors and `cpuserve config` show.
    """

    name: str

    @property
    def parser_class(self) -> ParserMaker:
        """The class of the format's parsers."""
        raise NotImplementedError

    @property
    def reads_schemas(self) -> bool:
        """Whether the parser needs schemas, because the text does not show types of arguments."""
        return False

    @property
    def forces(self) -> bool:
        """Whether `opening` and the grammars are implemented, so calls can be forced."""
        return False

    @property
    def markers(self) -> frozenset[str]:
        """The texts of special tokens that the parser must get as text."""
        return frozenset()

    @property
    def call_marks(self) -> tuple[str, ...]:
        """The texts in a response at which the parser looks for a call."""
        return ()

    def opening(self, function: str | None) -> str:
        """Return the beginning of a tool call, to force it; function: None = any function.

        The text ends at a place where models usually begin a new token.
        """
        raise NotImplementedError

    def grammar(
        self,
        schemas: OptionalSchemas,
        function: str | None,
        *,
        several: bool,
        whole: bool = False,
    ) -> str:
        """Return the Lark grammar of the text after `opening`; with `whole`, of the whole response.

        The text ends after one tool call or, if `several`, after any number of tool calls.
        schemas: the JSON schema of the arguments of each function that may be called;
          None = any arguments.
        """
        raise NotImplementedError

    def text_grammar(self, schemas: OptionalSchemas) -> str:
        """Return the Lark grammar of free text with tool calls of the functions in `schemas` only.

        schemas: as for `grammar`. A tool call is constrained from the marker
        where the parser finds it.
        """
        raise NotImplementedError

    def written(self, calls: Calls) -> str:
        """Return calls as models of this family write them."""
        raise NotImplementedError

    def parser(
        self,
        index: int,
        opening: str = "",
        schemas: Schemas = NO_SCHEMAS,
        around: Around | None = None,
    ) -> ToolParser:
        """Return a parser for the text that the model generates for choice `index`.

        opening: the beginning of a call that the server forced, "" = no call is forced.
          The model's text continues `opening`, which the parser reads first.
        schemas: JSON schemas of the arguments of each function, if the format reads them.
        around: the texts around calls, None = the defaults of Around
          (thoughts between <think> tags).
        """
        return self.parser_class(self, index, opening, schemas, around)


class WholeFormat(ToolFormat):
    """A format that also covers the text and thoughts of responses, with and without tools.

    form_opening: the text that begins a structured output.
    thought_end: the texts that the server writes to end a thought.
    """

    form_opening: str
    thought_end: ThoughtEnd

    def begins_texts(self, before: str) -> bool:
        """Return whether `before`, the text of a template before a response, is in this format."""
        raise NotImplementedError

    def without_calls(self) -> ToolFormat:
        """Return the format of responses to requests without tools."""
        raise NotImplementedError


def text_rules(number: int, marker: str, start: str = "( text | opened one )*") -> str:
    """Return the Lark rules of text where a call (call_0, call_1, ...) follows each marker.

    start: the rule of a response, made of the rules `text`, `opened`
    (text that ends with the marker) and `one` (one of the calls).
    """
    # llguidance takes the shortest match of the lazy rule `before`,
    # and only then tries the rule `text`.
    return "\n".join(
        [
            f"start: {start}",
            f"opened: before | {json.dumps(marker)}",
            f"before[lazy]: /(.|\\n)*{re.escape(marker)}/",
            f"text: /(.|\\n)+/{OTHER_TOKENS}{marker}",
            one_rule(number),
        ]
    )


def one_rule(number: int) -> str:
    """Return the Lark rule of one of the calls call_0 to call_(number - 1)."""
    return "one: " + " | ".join(f"call_{i}" for i in range(number))


def definitions(schema: JsonSchema) -> dict[str, Any]:
    """Return the definitions of a schema, which `$ref` in its parts refers to from the root."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def as_json_text(arguments: Any) -> str:
    """Return arguments as JSON; a text is returned unchanged."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def new_call_id() -> str:
    """Return an id for a tool call, which the client sends back with the tool's result."""
    return f"call_{uuid.uuid4().hex[:24]}"
