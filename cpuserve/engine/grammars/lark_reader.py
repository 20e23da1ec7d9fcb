"""Reads the Lark grammars of clients, so that they can become a part of another grammar.

Error messages have the line and the column in the client's text. The parts of Lark
that llguidance lacks are refused (templates, imports of files) or have no effect (priorities).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias


@dataclass(frozen=True, slots=True)
class LarkText:
    """A literal text; folds: whether upper and lower case are equal."""

    text: str
    folds: bool = False


@dataclass(frozen=True, slots=True)
class LarkRegex:
    """A regular expression. place: a text with its line and column, for error messages."""

    source: str
    flags: str = ""
    place: str = ""


@dataclass(frozen=True, slots=True)
class LarkName:
    """A reference to a rule or a terminal. place: its line and column, for error messages."""

    name: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class LarkRepeat:
    """A repetition of a node, `low` to `high` times; high = None: no upper limit."""

    of: LarkNode
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class LarkSequence:
    """Nodes that match one after another."""

    items: tuple[LarkNode, ...]


@dataclass(frozen=True, slots=True)
class LarkChoice:
    """Alternative nodes: one of them matches."""

    items: tuple[LarkNode, ...]


@dataclass(frozen=True, slots=True)
class LarkBoth:
    """A text that all nodes match (`&`)."""

    items: tuple[LarkNode, ...]


@dataclass(frozen=True, slots=True)
class LarkNot:
    """A text that the node does not match (`~`)."""

    of: LarkNode


LarkNode: TypeAlias = (
    LarkText | LarkRegex | LarkName | LarkRepeat | LarkSequence | LarkChoice | LarkBoth | LarkNot
)

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|(?://|\#)[^\n]*)
    |(?P<line>\n)
    |(?P<text>"(?:\\.|[^"\\\n])*"i?)
    |(?P<regex>/(?!/)(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<name>_*[A-Za-z][A-Za-z0-9_]*(?:-[A-Za-z0-9_]+)*)
    |(?P<word>%[a-z]+)
    |(?P<number>[0-9]+)
    |(?P<mark>->|\.\.|[-~&|()\[\]{}:,.*+?!=<>@])""",
    re.VERBOSE,
)
# Escapes that Lark has from Python, and JSON lacks; all other escapes stay as they are.
_PYTHON_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|('|v|a)|.)")
_AS_JSON = {"'": "'", "v": r"\u000b", "a": r"\u0007"}
_MOST_REPEATS = 10_000
_OPERATORS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
_FLAGS = frozenset("imsu")
_NUMBER = r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?"
_FLOAT = r"(([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|[0-9]+[eE][+-]?[0-9]+)"
# The terminals of `common`, which is Lark's own library.
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": r"[0-9]+\.[0-9]*|\.[0-9]+",
    "_EXP": "[eE][+-]?[0-9]+",
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": _NUMBER,
    "SIGNED_NUMBER": f"[+-]?{_NUMBER}",
    "ESCAPED_STRING": r'"([^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[_A-Za-z][_A-Za-z0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"\/\/[^\n]*",
    "C_COMMENT": r"\/\*[^*]*\*+([^\/*][^*]*\*+)*\/",
    "SQL_COMMENT": r"--[^\n]*",
}


class LarkError(ValueError):
    """A grammar that is not valid; the message has the line and the column."""


@dataclass(slots=True)
class LarkGrammar:
    """The rules and terminals by name, and the texts that %ignore allows between terminals."""

    nodes: dict[str, LarkNode] = field(default_factory=dict)
    ignored: list[LarkNode] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    place: str


def is_terminal(name: str) -> bool:
    """Return whether a name belongs to a terminal, not to a rule."""
    return name.lstrip("_")[:1].isupper()


def names_in(node: LarkNode) -> Iterator[LarkName]:
    """Yield the references to rules and terminals in a node."""
    left = [node]
    while left:
        match left.pop():
            case LarkName() as found:
                yield found
            case LarkRepeat(of=of) | LarkNot(of=of):
                left.append(of)
            case LarkSequence(items=items) | LarkChoice(items=items) | LarkBoth(items=items):
                left += items
            case LarkText() | LarkRegex():
                pass


def read_lark(text: str) -> LarkGrammar:
    """Return the grammar of a text in Lark.

    Raises:
      LarkError: the text is not valid Lark, or uses a feature that is not supported.
    """
    found = _LarkParser(list(_tokens(text))).grammar()
    if "start" not in found.nodes:
        msg = "line 1, column 1: the grammar has no rule start"
        raise LarkError(msg)
    for name, node in found.nodes.items():
        for used in names_in(node):
            if used.name not in found.nodes:
                msg = f"{used.place}: there is no rule or terminal {used.name}"
                raise LarkError(msg)
            if is_terminal(name) and not is_terminal(used.name):
                msg = f"{used.place}: the terminal {name} refers to the rule {used.name}"
                raise LarkError(msg)
    return found


def _tokens(text: str) -> Iterator[_Token]:
    """Yield the tokens, without white space and comments, and without line breaks inside a rule."""
    at, line, begin, depth = 0, 1, 0, 0
    ends: _Token | None = None  # a line break; it ends a rule unless the next token continues it
    while at < len(text):
        place = f"line {line}, column {at - begin + 1}"
        found = _TOKEN.match(text, at)
        if found is None:
            msg = f"{place}: {text[at : at + 20]!r} is not valid here"
            raise LarkError(msg)
        at, kind, word = found.end(), found.lastgroup or "", found[0]
        if kind == "line":
            line, begin = line + 1, at
            ends = None if depth else _Token("line", "", place)
            continue
        if kind == "space":
            continue
        if kind == "mark":
            depth += (word in "([{") - (word in ")]}" and depth > 0)
        if ends is not None and word != "|":
            yield ends
        ends = None
        yield _Token(kind, word, place)
    yield _Token("line", "", f"line {line}, column {at - begin + 1}")


class _LarkParser:
    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens, self._at = tokens, 0
        self._found = LarkGrammar()

    def grammar(self) -> LarkGrammar:
        while self._at < len(self._tokens):
            if self._take("line") or self._take("mark", "?") or self._take("mark", "!"):
                continue
            self._statement()
        return self._found

    def _statement(self) -> None:
        token = self._now()
        if token.kind == "word":
            self._at += 1
            if token.text == "%import":
                self._import()
            elif token.text == "%ignore":
                self._found.ignored.append(self._choice())
            else:
                self._refuse(token, f"{token.text} is not supported")
        else:
            self._definition()
        self._need("line", "", "the end of the line")

    def _definition(self) -> None:
        token = self._need("name", "", "the name of a rule")
        if token.text in self._found.nodes:
            self._refuse(token, f"{token.text} is defined twice")
        if self._take("mark", "."):  # a priority has no effect, as all texts that match are allowed
            self._take("mark", "-")
            self._need("number", "", "a number")
        follows = self._now()
        if follows.text in ("{", "["):
            what = "a template" if follows.text == "{" else "an option of a rule"
            self._refuse(follows, f"{what} is not supported")
        self._need("mark", ":", '":"')
        self._found.nodes[token.text] = self._choice()

    def _import(self) -> None:
        """Read `common.NAME`, `common.NAME -> ALIAS` or `common (NAME, NAME)`."""
        library = self._need("name", "", "the name of a library")
        if library.text != "common":
            self._refuse(library, f"{library.text} cannot be imported: only common is known")
        if self._take("mark", "("):
            while True:
                self._common(self._need("name", "", "a name"))
                if not self._take("mark", ","):
                    break
            self._need("mark", ")", '")"')
            return
        self._need("mark", ".", '"."')
        token = self._need("name", "", "a name")
        alias = self._need("name", "", "a name") if self._take("mark", "->") else token
        self._common(token, alias.text)

    def _common(self, token: _Token, alias: str | None = None) -> None:
        if token.text not in _COMMON:
            self._refuse(token, f"common has no {token.text}: it has {', '.join(_COMMON)}")
        self._found.nodes[alias or token.text] = LarkRegex(_COMMON[token.text])

    def _choice(self) -> LarkNode:
        items = [self._both()]
        while self._take("mark", "|"):
            items.append(self._both())
        return items[0] if len(items) == 1 else LarkChoice(tuple(items))

    def _both(self) -> LarkNode:
        items = [self._row()]
        while self._take("mark", "&"):
            items.append(self._row())
        if self._take("mark", "->"):  # the name of a subtree has no effect
            self._need("name", "", "a name")
        return items[0] if len(items) == 1 else LarkBoth(tuple(items))

    def _row(self) -> LarkNode:
        items: list[LarkNode] = []
        while True:
            token = self._now()
            begins = token.kind in ("text", "regex", "name") or token.text in ("(", "[", "~")
            if not begins:
                if token.text in ("<", "@") or token.kind == "word":
                    self._refuse(token, f"{token.text} is not supported in a rule")
                return items[0] if len(items) == 1 else LarkSequence(tuple(items))
            items.append(self._repeated())

    def _repeated(self) -> LarkNode:
        node = self._atom()
        token = self._now()
        if token.kind == "mark" and token.text in _OPERATORS:
            self._at += 1
            return LarkRepeat(node, *_OPERATORS[token.text])
        if token.text == "~" and self._tokens[self._at + 1].kind == "number":
            self._at += 1
            low = high = self._count()
            if self._take("mark", ".."):
                high = self._count()
            return self._many(node, low, high, token)
        if token.text == "{":
            self._at += 1
            least = self._count() if self._now().kind == "number" else 0
            most: int | None = least
            if self._take("mark", ","):
                most = self._count() if self._now().kind == "number" else None
            self._need("mark", "}", '"}"')
            return self._many(node, least, most, token)
        return node

    def _many(self, node: LarkNode, low: int, high: int | None, token: _Token) -> LarkNode:
        if max(low, high or 0) > _MOST_REPEATS or (high is not None and high < low):
            self._refuse(token, f"repetitions must ascend, and be at most {_MOST_REPEATS}")
        return LarkRepeat(node, low, high)

    def _count(self) -> int:
        return int(self._need("number", "", "a number").text[:9])

    def _atom(self) -> LarkNode:
        token = self._now()
        self._at += 1
        if token.kind == "name":
            return LarkName(token.text, token.place)
        if token.kind == "text":
            return self._text(token)
        if token.kind == "regex":
            source, _, flags = token.text[1:].rpartition("/")
            if not _FLAGS.issuperset(flags):
                self._refuse(token, f"the flags {flags} are not supported")
            return LarkRegex(source, flags, token.place)
        if token.text == "~":
            return LarkNot(self._atom())
        node = self._choice()
        if token.text == "[":
            self._need("mark", "]", '"]"')
            return LarkRepeat(node, 0, 1)
        if token.text != "(":
            self._refuse(token, f"{token.text or 'the end of the line'!r} is not valid here")
        self._need("mark", ")", '")"')
        return node

    def _text(self, token: _Token) -> LarkNode:
        """Return a literal, or a range of two characters."""
        text = self._literal(token)
        if not self._take("mark", ".."):
            return LarkText(text, token.text.endswith("i"))
        high = self._literal(self._need("text", "", "a character"))
        if len(text) != 1 or len(high) != 1 or text > high:
            self._refuse(token, "a range needs two characters in ascending order")
        return LarkRegex(f"[\\x{{{ord(text):x}}}-\\x{{{ord(high):x}}}]")

    def _literal(self, token: _Token) -> str:
        written = _PYTHON_ESCAPE.sub(_as_json_escape, token.text.removesuffix("i"))
        try:
            text: str = json.loads(written, strict=False)
            text.encode()
        except ValueError:
            self._refuse(token, f"{token.text[:40]} is not a valid text")
        return text

    def _now(self) -> _Token:
        return self._tokens[min(self._at, len(self._tokens) - 1)]

    def _take(self, kind: str, text: str = "") -> bool:
        token = self._now()
        found = token.kind == kind and (not text or token.text == text)
        self._at += found
        return found

    def _need(self, kind: str, text: str, what: str) -> _Token:
        token = self._now()
        if not self._take(kind, text):
            shown = token.text[:20] or "the end of the line"
            self._refuse(token, f"{what} is needed in place of {shown}")
        return token

    def _refuse(self, token: _Token, why: str) -> NoReturn:
        msg = f"{token.place}: {why}"
        raise LarkError(msg)


def _as_json_escape(found: re.Match[str]) -> str:
    if found[1]:
        return rf"\u00{found[1]}"
    return _AS_JSON[found[2]] if found[2] else found[0]
