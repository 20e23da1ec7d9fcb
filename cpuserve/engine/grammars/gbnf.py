"""Converts GBNF, the grammar format of llama.cpp, to Lark grammars for llguidance.

The converter of llguidance does not support characters by their number (`\\u`),
`{0}`, a rule named start, and that `.` matches a line break.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

MAX_REPEATS = 10_000
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_RULE = re.compile(r"[A-Za-z0-9_-]+[ \t]*::=")
_RANGE = re.compile(r"-[^\]]")
_COUNT = re.compile(r"\{\s*(\d+)\s*(,)?\s*(\d+)?\s*\}")
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_DIGITS = {"x": 2, "u": 4, "U": 8}
_LARK = re.compile(r"(?m)^\s*(%llguidance\b|start\s*:(?!:=))")


class GbnfError(ValueError):
    """A grammar that is not valid GBNF; the message says where and why."""


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF, not in Lark."""
    return _LARK.search(text) is None


def lark_of(text: str) -> str:
    """Return the Lark grammar of a GBNF grammar.

    Raises:
        GbnfError: it is not valid GBNF.
    """
    rules = _Parser(text).rules()
    if "root" not in rules:
        msg = "a grammar in GBNF needs a rule root, and one in Lark a rule start"
        raise GbnfError(msg)
    for of in rules.values():
        for name in of.body.names():
            if name not in rules:
                msg = f"GBNF, line {of.line}: there is no rule {name}"
                raise GbnfError(msg)
    terminals = _terminals(rules)
    names = {name: f"{'T' if name in terminals else 'r'}_{i}" for i, name in enumerate(rules)} | {
        "root": "start"
    }
    lines = (f"{names[name]}: {of.body.lark(names)}" for name, of in rules.items())
    return "%llguidance {}\n\n" + "\n".join(lines) + "\n"


def _terminals(rules: dict[str, _Rule]) -> set[str]:
    """Return the rules that can be terminals in Lark, because they refer only to terminals."""
    found: set[str] = set()
    while True:
        more = {n for n, of in rules.items() if n != "root" and set(of.body.names()) <= found}
        if more == found:
            return found
        found = more


@dataclass(slots=True)
class _Node:
    """A part of a rule.

    kind: "text" (value: the literal in Lark), "set" (value: the set of characters in Lark),
    "name" (value: another rule), "all" (a sequence of parts), "any" (alternative parts),
    or "repeat" (one part, from `least` to `most` times; None = no limit).
    """

    kind: str
    value: str = ""
    parts: list[_Node] = field(default_factory=list)
    least: int = 0
    most: int | None = None

    def names(self) -> Iterator[str]:
        """Yield the name of each rule that this part refers to."""
        if self.kind == "name":
            yield self.value
        for part in self.parts:
            yield from part.names()

    def lark(self, names: dict[str, str]) -> str:
        """Return this part in Lark. names: the name of the Lark rule for each GBNF rule."""
        if self.kind == "name":
            return names[self.value]
        if self.kind == "repeat":
            return self._repeated(self.parts[0].lark(names))
        if self.kind in ("all", "any"):
            if not self.parts:
                return '""'
            joined = (" " if self.kind == "all" else " | ").join(p.lark(names) for p in self.parts)
            return f"({joined})"
        return self.value

    def _repeated(self, inner: str) -> str:
        marks = {(0, None): "*", (1, None): "+", (0, 1): "?"}
        if (self.least, self.most) in marks:
            return f"({inner}){marks[self.least, self.most]}"
        if self.most == 0:
            return '""'
        return f"({inner}){{{self.least},{'' if self.most is None else self.most}}}"


@dataclass(slots=True)
class _Rule:
    body: _Node
    line: int


class _Parser:
    """Parses one GBNF grammar."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def rules(self) -> dict[str, _Rule]:
        """Return the rules by name; a later rule replaces an earlier one, as in llama.cpp."""
        found: dict[str, _Rule] = {}
        self._space(lines=True)
        while self._at < len(self._text):
            line = self._text.count("\n", 0, self._at) + 1
            name = self._name()
            self._space()
            if not self._take("::="):
                self._fail(f"::= must follow the name {name}")
            self._space(lines=True)
            found[name] = _Rule(self._alternatives(inside=False), line)
            self._space()
            if self._at < len(self._text) and self._text[self._at] not in "\r\n":
                self._fail(f"{self._text[self._at]!r} cannot be here")
            self._space(lines=True)
        return found

    def _alternatives(self, *, inside: bool) -> _Node:
        parts = [self._sequence(inside)]
        while self._take("|"):
            self._space(lines=True)
            parts.append(self._sequence(inside))
        return parts[0] if len(parts) == 1 else _Node("any", parts=parts)

    def _sequence(self, inside: bool) -> _Node:
        parts: list[_Node] = []
        while (one := self._one(inside)) is not None:
            self._space(lines=inside)
            parts.append(self._counted(one))
            self._space(lines=inside)
        return parts[0] if len(parts) == 1 else _Node("all", parts=parts)

    def _one(self, inside: bool) -> _Node | None:
        char = self._text[self._at : self._at + 1]
        if char == '"':
            return _Node("text", json.dumps(self._literal()))
        if char == "[":
            return _Node("set", self._set())
        if self._take("."):
            return _Node("set", "/(?s:.)/")
        if self._take("("):
            self._space(lines=True)
            group = self._alternatives(inside=True)
            self._space(lines=True)
            if not self._take(")"):
                self._fail("a group has no )")
            return group
        if _NAME.match(self._text, self._at) and not self._begins_rule(inside):
            return _Node("name", self._name())
        return None

    def _begins_rule(self, inside: bool) -> bool:
        return not inside and _RULE.match(self._text, self._at) is not None

    def _counted(self, one: _Node) -> _Node:
        """Return a part of a rule with the operators after it, such as *, +, ? and {m,n}."""
        while True:
            if self._take("*"):
                one = _Node("repeat", parts=[one])
            elif self._take("+"):
                one = _Node("repeat", parts=[one], least=1)
            elif self._take("?"):
                one = _Node("repeat", parts=[one], most=1)
            elif found := _COUNT.match(self._text, self._at):
                least = int(found[1])
                most = least if found[2] is None else int(found[3]) if found[3] else None
                if (most is not None and most < least) or max(least, most or 0) > MAX_REPEATS:
                    self._fail(f"{found[0]} must go up, to at most {MAX_REPEATS}")
                self._at = found.end()
                one = _Node("repeat", parts=[one], least=least, most=most)
            else:
                return one

    def _literal(self) -> str:
        self._at += 1
        found = []
        while not self._take('"'):
            found.append(self._char("a text has no end"))
        return "".join(found)

    def _set(self) -> str:
        """Return the regular expression of a set of characters."""
        self._at += 1
        negated, found = self._take("^"), []
        while not self._take("]"):
            first = last = self._char("a set of characters has no ]")
            if _RANGE.match(self._text, self._at):
                self._at += 1
                last = self._char("a set of characters has no ]")
            if last < first:
                self._fail(f"the range from {first!r} to {last!r} is empty")
            found.append(_code(first) + (f"-{_code(last)}" if last != first else ""))
        if not found:
            return "/(?s:.)/" if negated else "/[^\\s\\S]/"
        return f"/[{'^' if negated else ''}{''.join(found)}]/"

    def _char(self, without: str) -> str:
        """Read a character of a literal or set; without: the error at the end of the text."""
        if self._at >= len(self._text):
            self._fail(without)
        char = self._text[self._at]
        self._at += 1
        if char != "\\":
            return char
        kind = self._text[self._at : self._at + 1]
        self._at += 1
        if kind in _ESCAPES:
            return _ESCAPES[kind]
        digits = self._text[self._at : self._at + _DIGITS.get(kind, 0)]
        self._at += len(digits)
        found = ""
        with suppress(ValueError, OverflowError):
            if len(digits) == _DIGITS.get(kind):
                # The call of encode() raises an error for surrogates.
                found = chr(int(digits, 16)).encode().decode()
        if not found:
            self._fail(f"\\{kind}{digits} is no escape of a character")
        return found

    def _name(self) -> str:
        found = _NAME.match(self._text, self._at)
        if found is None:
            self._fail(f"{self._text[self._at]!r} is no name of a rule")
        self._at = found.end()
        return found[0]

    def _take(self, text: str) -> bool:
        if not self._text.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _space(self, *, lines: bool = False) -> None:
        """Skip white space and comments; skip line breaks as well if `lines` is True."""
        space = _SPACE_LINES if lines else _SPACE
        found = space.match(self._text, self._at)
        self._at = found.end() if found else self._at

    def _fail(self, why: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        msg = f"GBNF, line {line}: {why}"
        raise GbnfError(msg)


_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")


def _code(char: str) -> str:
    return f"\\u{{{ord(char):x}}}"
