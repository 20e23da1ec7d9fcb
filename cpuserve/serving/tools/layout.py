"""Layouts: the texts that a chat template writes around the calls of a response.

A layout with a way of writing arguments (JSON, tags, Python, braces) is a format.
A format is learned from a template (learn_layout.py) or is in the table of families (families.py).
"""

from __future__ import annotations

import json
import re
import secrets
import string
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from cpuserve.sampling.grammar_marks import FORM_BEGINS, OTHER_TOKENS
from cpuserve.serving.tools.base import (
    Calls,
    OptionalSchemas,
    ParserMaker,
    ToolFormat,
    new_call_id,
    text_rules,
)
from cpuserve.serving.tools.thoughts import Turns
from cpuserve.tokenizer.vocabulary import ENDS

# TAG: a tag such as <tool_call>. SHORT_TAG: a tag of at most 40 characters, as templates write.
# BRACKETED: a mark in brackets such as [/INST].
TAG = r"<[^<>\s]*>"
SHORT_TAG = r"<[^<>\s]{1,40}>"
BRACKETED = r"\[/?[A-Z_]+\]"
_ATOM = re.compile(rf"{TAG}|{BRACKETED}|[A-Za-z0-9_]+|.", re.DOTALL)
# The placeholders in the texts of a layout. ID: an id or a number, which differs between calls.
# NAME: the name of the function, which some models repeat before the arguments.
ID, NAME = "\0", "\1"
# Matches one chunk of a text; between two chunks, a model may write any white space.
_CHUNKS = re.compile(
    rf"[\x00\x01]|{BRACKETED}|<[^<>\s\x00\x01]*>?|(?:(?!{BRACKETED})[^\s<\x00\x01])+"
)
# Matches the parts of a text that may contain special tokens.
_RUNS = re.compile(r"[^\s\x00\x01]{3,}")
# Matches in a chunk that is rare in other texts, and therefore shows the beginning of a call.
_MARKER = re.compile(rf"{TAG}|\w\w|{BRACKETED}|[^\w\s]{{2}}")
_NAME = re.compile(r"[A-Za-z0-9_.:-]*")
_NINE = string.ascii_letters + string.digits


def atoms(text: str) -> list[str]:
    """Return the parts of a text: tags, marks in brackets, words, and other characters."""
    return _ATOM.findall(text)


def chunks(text: str) -> list[str]:
    """Return the chunks of a text: the parts between which there may be white space."""
    return _CHUNKS.findall(text)


def lark(text: str) -> str:
    """Return the Lark expression that matches a text of a layout."""
    parts = re.split(f"({ID})", text)
    return " ".join("ID" if part == ID else json.dumps(part) for part in parts if part)


def nine_characters() -> str:
    """Return an id as the templates of Mistral require: nine letters and digits."""
    return "".join(secrets.choice(_NINE) for _ in range(9))


@dataclass(frozen=True, slots=True)
class CallLayout:
    """The texts around calls, as the template writes them, with ID in place of ids and numbers.

    A response has SECTION BEGIN name MIDDLE arguments END.
    Each further call has BETWEEN BEGIN name MIDDLE arguments END. CLOSE follows the last call.

    ids: the ids of calls: "" (any id), "nine" (nine characters), "given" (the model writes the id,
      at the first ID) or "indexed" (functions.NAME:ID).
    turns: the headers that the model writes before messages, if each call is a message of its own:
      BEGIN then begins with a header.
    server: the text that the server writes for ID where it is no id (the name of a tool server).
    may_skip: whether each chunk of BEGIN may begin a call, because models leave out chunks.
    """

    section: str = ""
    begin: str = ""
    middle: str = ""
    end: str = ""
    between: str = ""
    close: str = ""
    ids: str = ""
    turns: Turns | None = None
    server: str = ""
    may_skip: bool = False

    @property
    def first(self) -> str:
        """The text before the first name."""
        return (self.section + self.begin).lstrip()

    @property
    def opening(self) -> str:
        """The text before the first name, without the beginning that is a part of the prompt."""
        return self.first if self.turns is None else self.first.removeprefix(self.turns.begun)

    def new_id(self) -> str:
        """Return an id for a call that has none."""
        return nine_characters() if self.ids in ("nine", "given") else new_call_id()


class Writing(ABC):
    """How a format writes the arguments of calls.

    reads_schemas: the parser needs schemas, because the text does not show types of arguments.
    forces: calls can be forced.
    parser_class: the class of the parsers.
    """

    reads_schemas = False
    forces: bool = True
    parser_class: ClassVar[ParserMaker]

    @property
    def markers(self) -> frozenset[str]:
        """Further special tokens that the parser must get as text, besides tokens of the layout."""
        return frozenset()

    @property
    def names(self) -> re.Pattern[str]:
        """The expression of the name of a function, which also matches the beginning of one."""
        return _NAME

    def fixed(self, text: str) -> list[str]:
        """Return the chunks of `text`, a text of the layout.

        Text that is a part of a call's own JSON object (as `{"name": "`) is left out.
        """
        return chunks(text)

    @abstractmethod
    def written(self, arguments: Any) -> str:
        """Return arguments as a template writes them, up to the layout's text after them."""

    @abstractmethod
    def rules(self, schemas: OptionalSchemas, end: str) -> tuple[list[str], list[str]]:
        """Return a Lark expression for each function's arguments and `end`, and all Lark rules.

        end: the text of the layout after the arguments.

        Raises:
          ValueError: a grammar cannot express a schema.
        """

    def text_calls(self, layout: CallLayout, schemas: OptionalSchemas) -> list[str]:  # noqa: ARG002
        """Return the Lark rules of calls after a marker in free text; [] = as in a forced call."""
        return []


@dataclass(frozen=True)
class LayoutFormat(ToolFormat):
    """A format of calls: a layout, and how arguments are written in it."""

    name: str
    layout: CallLayout
    writing: Writing

    def with_short_ids(self) -> LayoutFormat:
        """Return the format with ids of nine characters, unless its layout sets the ids."""
        layout = self.layout
        return self if layout.ids else replace(self, layout=replace(layout, ids="nine"))

    def in_turns(self, turns: Turns | None) -> LayoutFormat | None:
        """Return this format with headers of messages; None if calls do not begin with a header."""
        layout = self.layout
        if turns is None:
            return self
        if not layout.first.startswith(turns.begun):
            return None
        return replace(self, layout=replace(layout, turns=turns))

    @property
    def parser_class(self) -> ParserMaker:
        """The class of the parsers of this way of writing."""
        return self.writing.parser_class

    @property
    def reads_schemas(self) -> bool:
        """Whether the parser needs schemas, because the text does not show types of arguments."""
        return self.writing.reads_schemas

    @property
    def forces(self) -> bool:
        """Whether calls can be forced."""
        return self.writing.forces and bool(self.opens)

    @property
    def call_marks(self) -> tuple[str, ...]:
        """The texts in a response at which the parser looks for a call."""
        return tuple(self.opens if self.layout.may_skip else self.opens[:1])

    @cached_property
    def opens(self) -> list[str]:
        """The chunks before the name of the first call; the first one shows that a call begins."""
        text = self.layout.section + self.layout.begin
        found = self.writing.fixed(text)
        while len(found) > 1 and not _MARKER.search(found[0]) and found[0] + found[1] in text:
            found[:2] = [found[0] + found[1]]  # one punctuation mark alone occurs in other texts
        return found

    @cached_property
    def again(self) -> list[str]:
        """The chunks before a further call in the same section; [] if there are no sections."""
        return self.writing.fixed(self.layout.begin) if self.layout.section.strip() else []

    @cached_property
    def closes_each(self) -> bool:
        """Whether BETWEEN begins with CLOSE: each call is marked by itself, and CLOSE may miss."""
        close = self.layout.close
        return bool(close) and self.layout.between.startswith(close)

    @cached_property
    def names(self) -> re.Pattern[str]:
        """The expression of the name of a function."""
        return self.writing.names

    @cached_property
    def middle(self) -> list[str]:
        """The chunks between the name and the arguments."""
        return self.writing.fixed(self.layout.middle)

    @cached_property
    def tails(self) -> list[str]:
        """The chunks that the format may write after a call; the parser drops them."""
        layout = self.layout
        texts = (layout.end, layout.between, layout.close)
        found = self.writing.fixed(layout.close if self.closes_each else " ".join(texts))
        return list(dict.fromkeys(chunk for chunk in found if chunk not in (ID, NAME)))

    @cached_property
    def markers(self) -> frozenset[str]:
        """The texts of special tokens that the parser must get as text."""
        layout = self.layout
        texts = (layout.section, layout.begin, layout.middle, layout.end, layout.between,
                 layout.close)  # fmt: skip
        found = {run for text in texts for run in _RUNS.findall(text)}
        return frozenset(found | self.writing.markers)

    def opening(self, function: str | None) -> str:
        """Return the beginning of a call, up to a place where models usually begin a new token."""
        layout = self.layout
        begin = layout.opening
        if function is not None:
            begin += function + layout.middle.replace(NAME, function)
            if layout.ids == "indexed":  # the model writes the number of the call
                return begin[: begin.index(ID)]
        while ID in begin:
            given = layout.new_id() if layout.ids else layout.server or "0"
            begin = begin.replace(ID, given, 1)
        return begin.rstrip(" ")

    def grammar(
        self,
        schemas: OptionalSchemas,
        function: str | None,
        *,
        several: bool,
        whole: bool = False,
    ) -> str:
        """Return the Lark grammar of the text after `opening`, or with `whole` of the response."""
        layout = self.layout
        before = lark(layout.opening) if whole else ""
        if whole and layout.turns is not None and not layout.turns.begun:
            before = f"{_turn_end(layout.turns)} {before}"  # an empty text may come first
        if not whole and function is None and layout.opening.endswith(" "):
            before = '" "?'  # opening() does not end with this space
        if function is not None and not whole and layout.ids == "indexed":
            before = lark(layout.middle[layout.middle.index(ID) :])
        more = f"( {lark(layout.between + layout.begin)} named )*" if several else ""
        first = "named" if function is None or whole else "one"
        close = _optional(layout.close) if several or not self.closes_each else ""
        start = f"start: {before} {first} {more} {close} {_turn_end(layout.turns)}"
        header = "" if layout.turns is None else layout.turns.text
        form = [FORM_BEGINS + json.dumps(header)] if whole and header else []
        return "\n".join([*form, start, *self._rules(schemas)])

    def written(self, calls: Calls) -> str:
        """Return calls as a template with this layout writes them."""
        layout, found = self.layout, []
        for i, (name, arguments) in enumerate(calls):
            before = (layout.between if i else layout.section) + layout.begin + name
            given, middle = layout.server or str(i), layout.middle.replace(NAME, name)
            before, end = (t.replace(ID, given) for t in (before + middle, layout.end))
            found.append(f"{before}{self.writing.written(arguments)}{end}")
        return "".join([*found, _until_end(layout.close)]).strip()

    def text_grammar(self, schemas: OptionalSchemas) -> str:
        """Return the Lark grammar of free text with calls of the functions in `schemas` only."""
        layout, marker = self.layout, self.call_marks[-1]
        if of_writing := self.writing.text_calls(layout, schemas):
            return "\n".join([text_rules(len(schemas), marker), *of_writing])
        more = lark(layout.between + layout.begin)
        again = f"( {more} named )*" if layout.section.strip() and more else ""
        close = "" if layout.may_skip else lark(_until_end(layout.close))
        calls = f"named {again} {close}"
        if marker == "[":
            rules = _bare_rules(schemas, f"first {again} {close}")
            return "\n".join([*rules, *self._rules(schemas)])
        if layout.turns is None or not layout.turns.begun:
            text = text_rules(1, marker, "( text | opened many )*").rpartition("\n")[0]
            many = f"many: {lark(layout.opening.partition(marker)[2])} {calls}"
            return "\n".join([text, many, *self._rules(schemas)])
        rest = lark(layout.turns.begun.removeprefix(marker))
        start = f"message ( text | opened {rest} message )*"
        text = text_rules(1, marker, start).rpartition("\n")[0]
        said = lark(layout.turns.text) or '""'
        message = f"message: {lark(layout.opening)} {calls} | {said}"
        return "\n".join([text, message, *self._rules(schemas)])

    def _rules(self, schemas: OptionalSchemas) -> list[str]:
        """Return the rules `named` (a call from its name on) and `one` (from its arguments on)."""
        of_layout = self.layout
        space = '" "?' if of_layout.middle.endswith(" ") else ""
        middles = [of_layout.middle.rstrip(" ").replace(NAME, name) for name in schemas]
        arguments, rules = self.writing.rules(schemas, of_layout.end)
        calls = [
            f"call_{i}: {json.dumps(name)} {lark(middles[i])} {space} {arguments[i]}"
            for i, name in enumerate(schemas)
        ]
        ones = [f"{space} {one}" for one in dict.fromkeys(arguments)]
        named = "named: " + " | ".join(f"call_{i}" for i in range(len(schemas)))
        found = [named, "one: " + " | ".join(ones), *calls, *rules]
        if self.opens == ["["]:
            texts = (json.dumps(f"[{name}{middles[i]}") for i, name in enumerate(schemas))
            heads = " | ".join(f"{text} {of}" for text, of in zip(texts, arguments, strict=True))
            found.append(f"first: {heads}")
        if any(" ID" in rule for rule in found) or ID in self.layout.opening + self.layout.between:
            found.append("ID: /[A-Za-z0-9][A-Za-z0-9_-]{0,31}/")
        return found


def _bare_rules(schemas: OptionalSchemas, calls: str) -> list[str]:
    """Return the Lark rules of calls or free text, where "[" begins calls, or begins a text.

    Calls come first in a response; "[", the name and what follows it are one lexeme (`first`),
    because the lexer takes the longest one. A text does not begin with "[" and the name
    of an offered function, not even after a special token (`other`; no model writes its character).
    """
    names = "|".join(map(re.escape, schemas))
    return [
        "start: ( many text? | BARE )? ( other BARE? )*",
        f"many: {calls}",
        f'other: "\\u0000"{OTHER_TOKENS}',
        r"text: /(.|\n)+/",
        rf"BARE: /(.|\n)+/ & ~/[ \t\r\n]*\[[ \t\r\n]*({names})\((.|\n)*/",
    ]


def _turn_end(turns: Turns | None) -> str:
    """Return the Lark expression of the end of a message, which may follow the last call."""
    ends = [] if turns is None else [json.dumps(end.strip()) for end in turns.ends]
    return f"( {' | '.join(ends)} )?" if ends else ""


def _optional(text: str) -> str:
    found = lark(_until_end(text))
    return f"( {found} )?" if found else ""


def _until_end(close: str) -> str:
    """Return the text that closes calls, without the end of the turn."""
    at = min((found for end in ENDS if (found := close.find(end)) >= 0), default=len(close))
    return close[:at]
