"""The interface of a tool call format: one file each, listed in FORMATS."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

from cpuserve.sampling.structured import OTHER_TOKENS
from cpuserve.serving.events import Text, Thought, ToolCallDelta
from cpuserve.serving.tools.thoughts import Around, ThoughtEnd

Piece: TypeAlias = Text | Thought | ToolCallDelta
JsonSchema: TypeAlias = Mapping[str, Any]
Schemas: TypeAlias = Mapping[str, JsonSchema]
OptionalSchemas: TypeAlias = Mapping[str, JsonSchema | None]
NO_SCHEMAS: Schemas = {}


class ToolParser(Protocol):
    """Finds the thoughts and tool calls in the text of one sequence, which arrives in pieces.

    The pieces together, with neighbours of one kind joined, do not depend on where the text is
    cut. num_closed: how many calls are complete. last_closed: whether the call that began last is
    one of them. most_calls: after this many complete calls it ignores the rest; None = any number.
    """

    num_closed: int
    last_closed: bool
    most_calls: int | None

    @property
    def is_full(self) -> bool:
        """Whether most_calls are complete."""

    @property
    def in_thought(self) -> bool:
        """Whether the text so far ends within a thought."""

    def may_stop(self, char: str) -> bool:
        """Return whether the next character may be a part of a stop string.

        It may not in a thought, and not in white space that the parser drops after one.
        """

    @property
    def ends_with_call(self) -> bool:
        """Whether only what belongs to the format has followed the last call, which is complete.

        It is known after `flush`.
        """

    @property
    def num_calls(self) -> int:
        """The number of calls that have begun: those with a name."""

    def force(self, opening: str) -> list[Piece]:
        """Return the pieces of the beginning of a call, which the model has not written."""

    def push(self, text: str) -> list[Piece]:
        """Return the pieces that are certain after `text`."""

    def flush(self) -> list[Piece]:
        """Return the held-back pieces, after the last text."""


class ToolFormat(Protocol):
    """How a family of models writes tool calls.

    markers: even if the tokenizer calls these tokens special. forces: there are grammars, and the
    beginnings of calls.
    """

    @property
    def name(self) -> str:
        """The name for people."""

    @property
    def reads_schemas(self) -> bool:
        """Whether the text alone does not show the types of the arguments."""

    @property
    def forces(self) -> bool:
        """Whether calls can be forced."""

    @property
    def markers(self) -> frozenset[str]:
        """The texts of tokens that the parser must see."""

    def asks_for_calls(self, instructions: str) -> bool:
        """Return whether the text of a template for tools asks for calls in this format."""

    def opening(self, function: str | None) -> str:
        """Return the beginning of a call of `function` (None: of any), which forces a call."""

    def grammar(
        self,
        schemas: OptionalSchemas,
        function: str | None,
        *,
        several: bool,
        whole: bool = False,
    ) -> str:
        """Return the Lark grammar of what follows `opening(function)`; if `whole`, with that.

        It ends with the call, or, if `several`, with the last one of any number. schemas: JSON
        schemas of the arguments of each function that may be called; None = they are free.
        """

    def text_grammar(self, schemas: OptionalSchemas) -> str:
        """Return the Lark grammar of free text where every call is one of these functions.

        schemas: as for `grammar`. A call is constrained from the marker where the parser
        finds it.
        """

    def parser(
        self,
        index: int,
        opening: str = "",
        schemas: Schemas = NO_SCHEMAS,
        around: Around | None = None,
    ) -> ToolParser:
        """Return a parser for choice `index`; its text continues `opening`.

        schemas: JSON schemas of the arguments of each function, if it reads them. around: None =
        the usual.
        """


@runtime_checkable
class WholeFormat(ToolFormat, Protocol):
    """A format of whole responses, with and without tools.

    form_opening: the beginning of a structured output. thought_end: how the server ends a thought.
    """

    form_opening: str
    thought_end: ThoughtEnd

    def begins_texts(self, before: str) -> bool:
        """Return whether a template that writes `before` a response's text writes this format."""

    def without_calls(self) -> ToolFormat:
        """Return the format of responses to requests without tools."""


def calls_rule(number: int, between: str = "", end: str = "", begin: str = "") -> str:
    """Return the Lark rules of a response of the rules call_0, call_1 and so on.

    It is one of them, or, with `between`, several with that text between them; then `end` may
    follow the last one. begin: the text before the first one, in Lark.
    """
    more = f" ( {json.dumps(between)} one )*" if between else ""
    last = f" {json.dumps(end)}?" if between and end else ""
    return f"start: {begin} one{more}{last}\n{_one_rule(number)}"


def text_rules(number: int, marker: str, start: str = "( text | opened one )*") -> str:
    """Return the Lark rules of text where one of the rules call_0, call_1 ... follows a marker.

    start: a response of the rules text, opened (text that ends with the marker) and one.
    """
    # The library takes the shortest match of a lazy rule, before it goes on with the rule `text`.
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
    """Return calls_rule for a format with calls from an opening to `close`.

    The other arguments are as for ToolFormat.grammar.
    """
    begin = json.dumps(found.opening(function)) if whole else ""
    between = f"\n{close}\n{found.opening(None)}" if several else ""
    return calls_rule(number, between, f"\n{close}", begin)


def definitions(schema: JsonSchema) -> dict[str, Any]:
    """Return the members that references in a part of a schema need: they begin at its root."""
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def new_call_id() -> str:
    """Return an id for a tool call, which the client sends back with the tool's result."""
    return f"call_{uuid.uuid4().hex[:24]}"
