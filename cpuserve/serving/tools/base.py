"""The interface of tool call formats; each format has one file and is listed in FORMATS."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol, TypeAlias, runtime_checkable

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
    ends_at_repeat: the parser ignores the text after a tool call that equals an earlier one.
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


class ToolFormat(Protocol):
    """How a family of models writes tool calls.

    markers: the parser must see the text of these tokens, even if they are special tokens.
    forces: `opening` and the grammars are implemented, so tool calls can be forced.
    """

    @property
    def name(self) -> str:
        """The name that logs, errors and `cpuserve config` show."""

    @property
    def reads_schemas(self) -> bool:
        """Whether the parser needs schemas, because the text does not show types of arguments."""

    @property
    def forces(self) -> bool:
        """Whether calls can be forced."""

    @property
    def markers(self) -> frozenset[str]:
        """The texts of special tokens that the parser must get as text."""

    def asks_for_calls(self, instructions: str) -> bool:
        """Return whether a prompt with tools instructs the model to write this format."""

    def opening(self, function: str | None) -> str:
        """Return the beginning of a tool call, to force it; function: None = any function."""

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

    def text_grammar(self, schemas: OptionalSchemas) -> str:
        """Return the Lark grammar of free text with tool calls of the functions in `schemas` only.

        schemas: as for `grammar`. A tool call is constrained from the marker
        where the parser finds it.
        """

    def written(self, calls: Calls) -> str:
        """Return calls as models of this family write them."""

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


class UnforcedCalls:
    """The methods of a ToolFormat without calls, which cannot be forced."""

    forces = False

    def opening(self, function: str | None) -> NoReturn:
        """Raise NotImplementedError: a call cannot be forced without a grammar."""
        raise NotImplementedError

    def grammar(
        self,
        schemas: OptionalSchemas,
        function: str | None,
        *,
        several: bool,
        whole: bool = False,
    ) -> NoReturn:
        """Raise NotImplementedError: this format has no grammar."""
        raise NotImplementedError

    def text_grammar(self, schemas: OptionalSchemas) -> NoReturn:
        """Raise NotImplementedError: this format has no grammar."""
        raise NotImplementedError

    def written(self, calls: Calls) -> NoReturn:
        """Raise NotImplementedError: this format has no calls."""
        raise NotImplementedError


@runtime_checkable
class WholeFormat(ToolFormat, Protocol):
    """A format that also covers the text and thoughts of responses, with and without tools.

    form_opening: the text that begins a structured output.
    thought_end: the texts that the server writes to end a thought.
    """

    form_opening: str
    thought_end: ThoughtEnd

    def begins_texts(self, before: str) -> bool:
        """Return whether `before`, the text of a template before a response, is in this format."""

    def without_calls(self) -> ToolFormat:
        """Return the format of responses to requests without tools."""


def calls_rule(number: int, between: str = "", end: str = "", begin: str = "") -> str:
    """Return the Lark rules of a response that consists of the rules call_0 to call_(number - 1).

    The response is one call or, with `between`, several calls with that text between two of them.
    If there may be several calls, `end` may follow the last one.

    begin: the text before the first call, in Lark.
    """
    more = f" ( {json.dumps(between)} one )*" if between else ""
    last = f" {json.dumps(end)}?" if between and end else ""
    return f"start: {begin} one{more}{last}\n{_one_rule(number)}"


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
            _one_rule(number),
        ]
    )


def _one_rule(number: int) -> str:
    return "one: " + " | ".join(f"call_{i}" for i in range(number))


def marked_calls_rule(
    found: ToolFormat, number: int, function: str | None, close: str, *, several: bool, whole: bool
) -> str:
    """Return calls_rule for a format where calls begin with `opening` and end with `close`.

    The other arguments are as for ToolFormat.grammar.
    """
    begin = json.dumps(found.opening(function)) if whole else ""
    between = f"\n{close}\n{found.opening(None)}" if several else ""
    return calls_rule(number, between, f"\n{close}", begin)


def definitions(schema: JsonSchema) -> dict[str, Any]:
    """Return the definitions of a schema, which `$ref` in its parts refers to from the root."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def as_json_text(arguments: Any) -> str:
    """Return arguments as JSON; a text is returned unchanged."""
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def new_call_id() -> str:
    """Return an id for a tool call, which the client sends back with the tool's result."""
    return f"call_{uuid.uuid4().hex[:24]}"
