"""Inserts the grammars of custom tools into the Lark grammar of tool calls.

A client's grammar describes a text. Most formats of tool calls write this text as a JSON string.
The grammar is then rewritten: each character that JSON escapes is replaced by its escape.
In formats with tags, the text is written as it is.

llguidance reads lexemes without backtracking. In JSON, a lexeme such
as `.*` may continue after a backslash, so the escape of a line break cannot follow it. Rules
that are not recursive therefore become terminals, which llguidance compiles into one automaton.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from cpuserve.engine.grammars.gbnf import is_gbnf, lark_of
from cpuserve.engine.grammars.json_regex import (
    ANY_TEXT,
    RegexError,
    inside_json,
    without_anchors,
)
from cpuserve.engine.grammars.lark_reader import (
    LarkBoth,
    LarkChoice,
    LarkError,
    LarkGrammar,
    LarkName,
    LarkNode,
    LarkNot,
    LarkRegex,
    LarkRepeat,
    LarkSequence,
    LarkText,
    is_terminal,
    names_in,
    read_lark,
)
from cpuserve.sampling.grammar_marks import (
    INPUT,
    INPUT_GRAMMAR,
    OF_GRAMMAR,
    PARAMETERS_OF,
    RAW_TEXT,
    WHITE_SPACE,
)

_RULE = re.compile(rf"(\w+): (%json|{RAW_TEXT}) (.*)")
_SPACE = f"({WHITE_SPACE})?"
_OPEN = rf'/\{{{_SPACE}"{INPUT}"{_SPACE}:{_SPACE}"/'
_CLOSE = rf'/"{_SPACE}\}}/'


class InputGrammarError(ValueError):
    """The grammar of a custom tool is not valid; the message has the tool's name and the place."""


def with_inputs(grammar: str) -> str:
    """Return the Lark grammar of tool calls with the grammars of custom tools inserted.

    Raises:
      InputGrammarError: a custom tool's grammar is not valid, or cannot be a part of a tool call.
    """
    if INPUT_GRAMMAR not in grammar and RAW_TEXT not in grammar:
        return grammar
    return "\n".join(map(_expanded, grammar.split("\n")))


def _expanded(line: str) -> str:
    found = _RULE.match(line)
    if found is None:
        return line
    rule, directive = found[1], found[2]
    given, end = json.JSONDecoder().raw_decode(found[3])
    asked = given if directive == RAW_TEXT else _asked(given)
    if asked is None:
        return line
    name = found[3][end:].partition(PARAMETERS_OF)[2]
    try:
        grammar = _read(asked)
        if directive == RAW_TEXT:
            lines = _as_text(rule, grammar, asked["end"])
        else:
            lines = _as_string(rule, grammar)
    except LarkError as error:
        msg = f"{OF_GRAMMAR}{name}: {error}"
        raise InputGrammarError(msg) from error
    return "\n".join(f"{line} // {OF_GRAMMAR}{name}" for line in lines)


def _asked(schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the grammar in the schema of a custom tool; None for any other schema."""
    properties = schema.get("properties")
    member = properties.get(INPUT) if isinstance(properties, dict) else None
    asked = member.get(INPUT_GRAMMAR) if isinstance(member, dict) else None
    return asked if isinstance(asked, dict) else None


def _read(asked: Mapping[str, Any]) -> LarkGrammar:
    syntax, definition = asked.get("syntax"), asked.get("definition")
    if not isinstance(definition, str) or syntax not in ("lark", "regex", "gbnf"):
        msg = "it must have a syntax (lark or regex) and a definition, which is a text"
        raise LarkError(msg)
    if syntax == "lark":
        return read_lark(definition)
    if syntax == "gbnf":
        try:
            if is_gbnf(definition):  # not if llguidance's directive is in the first line
                definition = lark_of(definition).partition("\n")[2]
            return read_lark(definition)
        except ValueError as error:
            raise LarkError(str(error)) from error
    return LarkGrammar({"start": LarkRegex(definition, place="line 1, column 1")})


def _as_text(rule: str, grammar: LarkGrammar, end: str) -> list[str]:
    """Return Lark lines for a text and the `end` after it; the first line defines `rule`."""
    writer = _GrammarWriter(grammar, rule, in_json=False)
    if not end:
        first = f"{rule}: {writer.start}"
    elif writer.is_terminal:
        first = f"{rule}[suffix={json.dumps(end)}]: {writer.start}"
    else:
        first = f"{rule}: {writer.start} {json.dumps(end)}"
    return [first, *writer.lines()]


def _as_string(rule: str, grammar: LarkGrammar) -> list[str]:
    """Return the same as `_as_text` for a JSON object with the text as its only member."""
    writer = _GrammarWriter(grammar, rule, in_json=True)
    mark = writer.mark
    whole = f"{mark}_OPEN {writer.start} {mark}_CLOSE"
    ends = [f"{mark}_OPEN: {_OPEN}", f"{mark}_CLOSE: {_CLOSE}"]
    if writer.is_terminal:
        return [f"{rule}: {mark}_ALL", f"{mark}_ALL: {whole}", *ends, *writer.lines()]
    return [f"{rule}: {whole}", *ends, *writer.lines()]


class _GrammarWriter:
    """Writes a client's grammar as a part of another grammar, with new names for its rules.

    mark: the beginning of the name of each terminal.
    is_terminal: whether the grammar is a single terminal.
    start: the Lark expression that matches the whole text.
    """

    def __init__(self, grammar: LarkGrammar, rule: str, *, in_json: bool) -> None:
        self._grammar, self._in_json = grammar, in_json
        self.mark = f"T_{rule.upper()}"
        flat = _not_recursive(grammar)
        for name in grammar.nodes:
            if is_terminal(name) and name not in flat:
                msg = f"the terminal {name} refers to itself"
                raise LarkError(msg)
        self.is_terminal = "start" in flat
        self._terminals = {
            name for name in flat if is_terminal(name) or in_json or self.is_terminal
        }
        used = _reachable(grammar)
        self._names = {
            name: f"{self.mark}_{i}" if name in self._terminals else f"r_{rule}_{i}"
            for i, name in enumerate(name for name in grammar.nodes if name in used)
        }
        self._gap = f" {self.mark}_IGNORED?" if grammar.ignored else ""
        self.start = f"{self._gap} {self._names['start']}".strip()
        if self._gap and self.is_terminal:
            self.start = f"{self.mark}_START"

    def lines(self) -> list[str]:
        """Return the rules and terminals, one on each line."""
        found = []
        for name, written in self._names.items():
            node = self._grammar.nodes[name]
            found.append(f"{written}: {self._written(node, spaced=not is_terminal(name))}")
        if self._grammar.ignored:
            inner = " | ".join(self._written(n, spaced=False) for n in self._grammar.ignored)
            found.append(f"{self.mark}_IGNORED: ( {inner} )+")
            if self.is_terminal:
                found.append(f"{self.mark}_START:{self._gap} {self._names['start']}")
        if self._in_json and any(f"{self.mark}_ANY" in line for line in found):
            found.append(f"{self.mark}_ANY: /{ANY_TEXT}/")
        return found

    def _written(self, node: LarkNode, *, spaced: bool) -> str:
        """Return a node in Lark; spaced: whether ignored text may follow each terminal."""
        match node:
            case LarkText() | LarkRegex():
                return self._with_gap(self._literal(node), spaced=spaced)
            case LarkName(name=name):
                return self._with_gap(self._names[name], spaced=spaced and is_terminal(name))
            case LarkRepeat(of=of, low=low, high=high):
                inner = self._written(of, spaced=spaced)
                return f"( {inner} ){_times(low, high)}"
            case LarkSequence(items=items):
                return " ".join(self._written(n, spaced=spaced) for n in items) or '""'
            case LarkChoice(items=items):
                return "( " + " | ".join(self._written(n, spaced=spaced) for n in items) + " )"
            case LarkBoth(items=items):
                inner = " & ".join(f"( {self._written(n, spaced=False)} )" for n in items)
                return self._with_gap(f"( {inner} )", spaced=spaced)
            case LarkNot(of=of):
                found = f"~( {self._written(of, spaced=False)} )"
                if self._in_json:  # `~` alone would match bytes that are not valid in JSON strings
                    found = f"( {found} & {self.mark}_ANY )"
                return self._with_gap(found, spaced=spaced)

    def _with_gap(self, written: str, *, spaced: bool) -> str:
        return f"( {written}{self._gap} )" if spaced and self._gap else written

    def _literal(self, node: LarkText | LarkRegex) -> str:
        if isinstance(node, LarkRegex):
            return self._pattern(node)
        if not self._in_json:
            return json.dumps(node.text, ensure_ascii=False) + "i" * node.folds
        if node.folds:
            source = inside_json(re.escape(node.text).replace("\\ ", " "), "i")
            return f"/{source}/i" if source else '""'
        return json.dumps(json.dumps(node.text, ensure_ascii=False)[1:-1], ensure_ascii=False)

    def _pattern(self, node: LarkRegex) -> str:
        flags = node.flags
        try:
            if self._in_json:
                source, flags = inside_json(node.source, flags), "i" * ("i" in flags)
            else:
                source = without_anchors(node.source)
        except RegexError as error:
            msg = f"{node.place}: {error}"
            raise LarkError(msg) from error
        return f"/{source}/{flags}" if source else '""'


def _times(low: int, high: int | None) -> str:
    known = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return known.get((low, high)) or f"{{{low},{'' if high is None else high}}}"


def _reachable(grammar: LarkGrammar) -> set[str]:
    """Return each name that the start rule or the ignored texts refer to, directly or not."""
    left = ["start", *(n.name for node in grammar.ignored for n in names_in(node))]
    found: set[str] = set()
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += [used.name for used in names_in(grammar.nodes[name])]
    return found


def _not_recursive(grammar: LarkGrammar) -> set[str]:
    """Return each name that refers to no recursive rule, directly or not."""
    waits = {name: {n.name for n in names_in(node)} for name, node in grammar.nodes.items()}
    users: dict[str, list[str]] = {name: [] for name in waits}
    for name, used in waits.items():
        for one in used:
            users[one].append(name)
    left = [name for name, used in waits.items() if not used]
    found: set[str] = set()
    while left:
        name = left.pop()
        found.add(name)
        for user in users[name]:
            waits[user].discard(name)
            if not waits[user]:
                left.append(user)
    return found
