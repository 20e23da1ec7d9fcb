"""Layouts: the texts that a chat template writes around the calls of a response.

A layout with a way of writing arguments (JSON, tags, Python, braces) is a format. It is learned
from a template (learn_layout.py), or is in the table of families (families.py).
"""

from __future__ import annotations

import json
import re
import secrets
import string
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from cpuserve.serving.tools.base import (
    NO_SCHEMAS,
    OptionalSchemas,
    Schemas,
    ToolParser,
    new_call_id,
    text_rules,
)
from cpuserve.serving.tools.thoughts import Around
from cpuserve.tokenizer.ends import ENDS

# The placeholder in the texts of a layout for an id or a number, which differs between calls.
ID = "\0"
# The parts (chunks) of a text between which a model may write any white space.
_CHUNKS = re.compile(r"\x00|\[/?[A-Z_]+\]|<[^<>\s\x00]*>?|(?:(?!\[/?[A-Z_]+\])[^\s<\x00])+")
_NINE = string.ascii_letters + string.digits


def chunks(text: str) -> list[str]:
    """Return the parts of a text between which there may be white space."""
    return _CHUNKS.findall(text)


def nine_characters() -> str:
    """Return an id as the templates of Mistral require: nine letters and digits."""
    return "".join(secrets.choice(_NINE) for _ in range(9))


@dataclass(frozen=True, slots=True)
class CallLayout:
    """The texts around calls, as the template writes them, with ID in place of ids and numbers.

    A response has SECTION BEGIN name MIDDLE arguments END, for each further call BETWEEN BEGIN name
    MIDDLE arguments END, then CLOSE. ids: the ids of calls: "" (any id), "nine" (nine characters),
    "given" (the model writes the id, at the first ID) or "indexed" (functions.NAME:ID, as in Kimi).
    """

    section: str = ""
    begin: str = ""
    middle: str = ""
    end: str = ""
    between: str = ""
    close: str = ""
    ids: str = ""

    @property
    def opening(self) -> str:
        """The text before the first name."""
        return (self.section + self.begin).lstrip()

    def new_id(self) -> str:
        """Return an id for a call that has none."""
        return nine_characters() if self.ids in ("nine", "given") else new_call_id()


class Writing(Protocol):
    """How the arguments of calls are written; for the properties see ToolFormat."""

    @property
    def reads_schemas(self) -> bool:
        """Whether the text alone does not show the types of the arguments."""

    @property
    def forces(self) -> bool:
        """Whether calls can be forced."""

    @property
    def markers(self) -> frozenset[str]:
        """The texts of tokens that the parser must see, besides the texts of the layout."""

    def fixed(self, text: str) -> list[str]:
        """Return the chunks of a text of the layout, without JSON that belongs to a call."""

    def rules(self, schemas: OptionalSchemas) -> tuple[list[str], list[str]]:
        """Return the name of the Lark rule for each function's arguments, and all Lark rules.

        Raises:
          ValueError: a grammar cannot express a schema.
        """

    def parser(
        self, found: LayoutFormat, index: int, opening: str, schemas: Schemas, around: Around | None
    ) -> ToolParser:
        """Return a parser; see ToolFormat.parser."""


@dataclass(frozen=True)
class LayoutFormat:
    """A format of calls: a layout, and how arguments are written in it."""

    name: str
    layout: CallLayout
    writing: Writing

    def with_short_ids(self) -> LayoutFormat:
        """Return the format with ids of nine characters, unless its layout sets the ids."""
        layout = self.layout
        return self if layout.ids else replace(self, layout=replace(layout, ids="nine"))

    @property
    def reads_schemas(self) -> bool:
        """Whether the text alone does not show the types of the arguments."""
        return self.writing.reads_schemas

    @property
    def forces(self) -> bool:
        """Whether calls can be forced."""
        return self.writing.forces and bool(self.opens)

    @cached_property
    def opens(self) -> list[str]:
        """The chunks before the first call; the first one shows that a call begins."""
        return self.writing.fixed(self.layout.section + self.layout.begin)

    @cached_property
    def again(self) -> list[str]:
        """The chunks before a further call in the same section; [] if there are no sections."""
        return self.writing.fixed(self.layout.begin) if self.layout.section.strip() else []

    @cached_property
    def tails(self) -> list[str]:
        """The chunks that the format may write after a call; the parser drops them."""
        layout = self.layout
        found = self.writing.fixed(layout.end + " " + layout.between + " " + layout.close)
        return list(dict.fromkeys(chunk for chunk in found if chunk != ID))

    @cached_property
    def markers(self) -> frozenset[str]:
        """The texts of tokens that the parser must see."""
        layout = self.layout
        texts = (layout.section, layout.begin, layout.middle, layout.end, layout.close)
        found = {chunk for text in texts for chunk in chunks(text) if chunk[0] in "<["}
        return frozenset(found | self.writing.markers)

    def asks_for_calls(self, instructions: str) -> bool:
        """Return whether the prompt shows the beginning of a call to the model."""
        return bool(self.opens) and self.opens[0] in instructions

    def opening(self, function: str | None) -> str:
        """Return the beginning of a call, which ends at a boundary of the tokens of a call."""
        layout = self.layout
        begin = layout.opening
        if function is not None:
            begin += function + layout.middle
            if layout.ids == "indexed":  # the model writes the number
                return begin[: begin.index(ID)]
        while ID in begin:
            begin = begin.replace(ID, layout.new_id() if layout.ids else "0", 1)
        return begin.rstrip(" ")

    def grammar(
        self,
        schemas: OptionalSchemas,
        function: str | None,
        *,
        several: bool,
        whole: bool = False,
    ) -> str:
        """Return the Lark grammar of the text after `opening(function)`; whole: with `opening`."""
        layout = self.layout
        before = _lark(layout.opening) if whole else ""
        if function is not None and not whole and layout.ids == "indexed":
            before = _lark(layout.middle[layout.middle.index(ID) :])
        more = f"( {_lark(layout.between + layout.begin)} named )*" if several else ""
        first = "named" if function is None or whole else "one"
        start = f"start: {before} {first} {more} {_optional(layout.close)}"
        return "\n".join([start, *self._rules(schemas)])

    def text_grammar(self, schemas: OptionalSchemas) -> str:
        """Return the Lark grammar of free text where every call is one of these functions."""
        layout, marker = self.layout, self.opens[0]
        rest = layout.opening.removeprefix(marker)
        more = _lark(layout.between + layout.begin)
        again = f"( {more} named )*" if self.again else ""
        text = text_rules(1, marker, "( text | opened many )*").rpartition("\n")[0]
        many = f"many: {_lark(rest)} named {again} {_lark(_until_end(layout.close))}"
        return "\n".join([text, many, *self._rules(schemas)])

    def _rules(self, schemas: OptionalSchemas) -> list[str]:
        """Return the rules `named` (a call from its name on) and `one` (from its arguments on)."""
        names, rules = self.writing.rules(schemas)
        space = '" "?' if self.layout.middle.endswith(" ") else ""
        middle, end = _lark(self.layout.middle.rstrip(" ")), _lark(self.layout.end)
        calls = [
            f"call_{i}: {json.dumps(name)} {middle} {space} {names[i]} {end}"
            for i, name in enumerate(schemas)
        ]
        ones = [f"{space} {rule} {end}" for rule in dict.fromkeys(names)]
        named = "named: " + " | ".join(f"call_{i}" for i in range(len(schemas)))
        found = [named, "one: " + " | ".join(ones), *calls, *rules]
        if any(" ID" in rule for rule in found) or ID in self.layout.opening + self.layout.between:
            found.append("ID: /[A-Za-z0-9]{1,32}/")
        return found

    def parser(
        self,
        index: int,
        opening: str = "",
        schemas: Schemas = NO_SCHEMAS,
        around: Around | None = None,
    ) -> ToolParser:
        """Return a parser for choice `index`; its text continues `opening`."""
        return self.writing.parser(self, index, opening, schemas, around)


def _lark(text: str) -> str:
    """Return a text of a layout in Lark."""
    parts = re.split(f"({ID})", text)
    return " ".join("ID" if part == ID else json.dumps(part) for part in parts if part)


def _optional(text: str) -> str:
    found = _lark(_until_end(text))
    return f"( {found} )?" if found else ""


def _until_end(close: str) -> str:
    """Return the text that closes calls, without the end of the turn."""
    at = min((found for end in ENDS if (found := close.find(end)) >= 0), default=len(close))
    return close[:at]
