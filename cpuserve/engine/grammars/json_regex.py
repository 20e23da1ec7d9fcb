"""Rewrites a regular expression so that it matches a text inside a JSON string.

`.` matches one character of a text. Inside a JSON string, this character may be an escape such as
`\\"`. Each character set is therefore divided into the characters that JSON writes as they are,
and the escapes of all other characters.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

Has = Callable[[str], bool]

# The characters that a JSON string must write as escapes.
_ESCAPED = [*map(chr, range(32)), '"', "\\"]
_SHORT = {"\b": "b", "\t": "t", "\n": "n", "\f": "f", "\r": "r", '"': '"', "\\": "\\\\"}
_PLAIN = r'[^"\\\x00-\x1f]'
# A character set without any of these characters has only characters that JSON escapes.
_SAMPLES = [*map(chr, range(32, 0x250)), "\u4e00", "\uffff", "\U0001f600"]
_SPACES = "\t\n\x0b\x0c\r"
_CLASSES: dict[str, Has] = {
    "d": lambda c: c in "0123456789",
    "s": lambda c: c in _SPACES or c.isspace(),
    "w": lambda c: c == "_" or c.isalnum(),
}
_NAMED: dict[str, Has] = {
    "alnum": lambda c: c.isascii() and c.isalnum(),
    "alpha": lambda c: c.isascii() and c.isalpha(),
    "ascii": str.isascii,
    "blank": lambda c: c in " \t",
    "cntrl": lambda c: c < " " or c == "\x7f",
    "digit": lambda c: c in "0123456789",
    "graph": lambda c: " " < c < "\x7f",
    "lower": lambda c: "a" <= c <= "z",
    "print": lambda c: " " <= c < "\x7f",
    "punct": lambda c: " " < c < "\x7f" and not c.isalnum(),
    "space": lambda c: c == " " or c in _SPACES,
    "upper": lambda c: "A" <= c <= "Z",
    "word": lambda c: c == "_" or (c.isascii() and c.isalnum()),
    "xdigit": lambda c: c in "0123456789abcdefABCDEF",
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\x0b", "a": "\x07"}
_CODE = re.compile(
    r"x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|[xuU]\{([0-9A-Fa-f]{1,6})\}"
)
_PROPERTY = re.compile(r"([pP])(?:\{(\^?)([A-Za-z_=: -]{1,40})\}|([A-Z]))")
_GROUP = re.compile(r"\(\?(?:P?<[A-Za-z_]\w*>|([a-zA-Z]*)(?:-([a-zA-Z]+))?([:)]))")
_BARE = re.compile(r"\\.|[/\n]", re.DOTALL)  # an escape, or a character that Lark needs escaped
_LONGEST_ATOM = 200  # the most characters of an escape, or of the beginning of a group
_BEGIN, _END = re.compile(r"(\((\?:)?)*"), re.compile(r"\)*\Z")
_OPERATORS = ("&&", "--", "~~")
# A pattern for any characters and escapes inside a JSON string.
ANY_TEXT = rf'({_PLAIN}|\\["\\bfnrt]|\\u00([01][0-9a-f]))*'


class RegexError(ValueError):
    """A regular expression that cannot be used; the message says why it is refused."""


@dataclass(frozen=True, slots=True)
class _Set:
    """A set of characters: its source text, and a function that says whether it has a character."""

    source: str
    has: Has
    char: str = ""  # the character of the set, if it has only one

    def negated(self) -> Has:
        return lambda c: not self.has(c)


def without_anchors(pattern: str) -> str:
    """Return the pattern without ^ at its beginning and $ at its end, which match no characters.

    Raises:
      RegexError: the pattern is not valid, or a grammar cannot express it.
    """
    return _Rewriter(pattern, "", in_json=False).written()


def inside_json(pattern: str, flags: str = "") -> str:
    """Return a pattern that matches the texts of `pattern` as they are written in JSON strings.

    flags: the flags of the pattern.
    The result needs the flag `i` if the pattern has it, and no other flags.

    Raises:
      RegexError: the pattern is not valid, or a grammar cannot express it.
    """
    return _Rewriter(pattern, flags, in_json=True).written()


class _Rewriter:
    def __init__(self, text: str, flags: str, *, in_json: bool) -> None:
        if "x" in flags:
            self._refuse("the flag x is not supported")
        self._text, self._at, self._in_json = text, 0, in_json
        self._dot = "s" in flags  # whether `.` in the pattern matches a line break
        self._folds = "i" in flags or "(?" in text
        self._groups: list[bool] = []  # for each open group, the value of _dot before the group
        self._ends: list[str] = []  # the characters at the ends of the ranges in the current set
        self._out: list[str] = []

    def written(self) -> str:
        while self._at < len(self._text):
            self._out.append(self._next())
        if self._groups:
            self._refuse("( is not closed")
        return "".join(self._out)

    def _next(self) -> str:
        char = self._text[self._at]
        if char == "(":
            return self._group()
        if char == "[":
            return self._put(self._set())
        if char == "\\":
            return self._put(self._escape())
        self._at += 1
        if char in "^$":
            return self._anchor(char)
        if char == ")":
            if not self._groups:
                self._refuse(") closes nothing")
            self._dot = self._groups.pop()
        elif char == ".":
            return self._put(_Set(".", lambda c: c != "\n" or self._dot))
        if char in ")*+?|{},":
            return char
        return self._put(_Set(_BARE.sub(_in_lark, char), char.__eq__, char))

    def _anchor(self, char: str) -> str:
        """Drop an anchor at the beginning or end of the whole text; refuse it elsewhere."""
        text, at = self._text, self._at
        if char == "^":
            is_outside = _BEGIN.fullmatch(text, 0, at - 1) is not None
            beside = text[max(at - 2, 0) : at - 1]
        else:
            is_outside = _END.match(text, at) is not None
            beside = text[at : at + 1]
        if not (is_outside or (beside == "|" and not self._groups)):
            self._refuse(f"{char} is only possible where the text begins or ends")
        return ""

    def _group(self) -> str:
        rest = self._text[self._at : self._at + _LONGEST_ATOM]
        found = _GROUP.match(rest)
        if found is None and rest.startswith("(?"):
            self._refuse(f"{rest[:4]} is not supported, such as look-around")
        if found is None or found[3] is None:
            self._groups.append(self._dot)
            self._at += 1 if found is None else found.end()
            return "(" if not self._in_json else "(?:"
        on, off = found[1] or "", found[2] or ""
        if "x" in on:
            self._refuse("the flag x is not supported")
        if found[3] == ":":
            self._groups.append(self._dot)
        self._dot = ("s" in on) or (self._dot and "s" not in off)
        self._at += found.end()
        if not self._in_json:
            return found[0]
        kept = ("i" if "i" in on else "") + ("-i" if "i" in off else "")
        return f"(?{kept}{found[3]}" if kept or found[3] == ":" else ""

    def _escape(self) -> _Set:
        """Read an escape, which begins with a backslash at `_at`."""
        begin, rest = self._at, self._text[self._at + 1 : self._at + _LONGEST_ATOM]
        if not rest:
            self._refuse("a backslash at the end escapes nothing")
        letter, self._at = rest[0], self._at + 2
        if (code := _CODE.match(rest)) is not None:
            self._at = begin + 1 + code.end()
            value = int(next(filter(None, code.groups())), 16)
            if value > 0x10FFFF:
                self._refuse(f"\\{code[0]} is no character")
            return _Set(self._text[begin : self._at], chr(value).__eq__, chr(value))
        if (prop := _PROPERTY.match(rest)) is not None:
            self._at = begin + 1 + prop.end()
            negated = (prop[1] == "P") != bool(prop[2])
            return _Set(self._text[begin : self._at], _of_property(prop[3] or prop[4], negated))
        if letter.lower() in _CLASSES:
            found = _Set("\\" + letter, _CLASSES[letter.lower()])
            return found if letter.islower() else _Set(found.source, found.negated())
        if letter in _CONTROLS:
            return _Set("\\" + letter, _CONTROLS[letter].__eq__, _CONTROLS[letter])
        if letter.isalnum() or letter in "<>":
            self._refuse(f"\\{letter} is not supported")
        return _Set(_BARE.sub(_in_lark, "\\" + letter), letter.__eq__, letter)

    def _set(self) -> _Set:
        """Read a character set, which begins with "[" at `_at`."""
        text, begin = self._text, self._at
        self._at += 1
        negated = text[self._at : self._at + 1] == "^"
        self._at += negated
        sums: list[list[Has]] = [[]]
        operators: list[str] = []
        first = self._at
        while text[self._at : self._at + 1] != "]" or self._at == first:
            two = text[self._at : self._at + 2]
            if not two:
                self._refuse("[ is not closed")
            if two in _OPERATORS:
                operators.append(two)
                sums.append([])
                self._at += 2
            else:
                sums[-1].append(self._member())
        self._at += 1
        has = _combined(sums, operators)
        source = _BARE.sub(_in_lark, text[begin : self._at])
        return _Set(source, (lambda c: not has(c)) if negated else has)

    def _member(self) -> Has:
        """Read a member of a character set: a set, a character or a range."""
        rest = self._text[self._at : self._at + _LONGEST_ATOM]
        if rest[0] == "[":
            named = re.match(r"\[:(\^?)([a-z]+):\]", rest)
            if named is None:
                return self._set().has
            if named[2] not in _NAMED:
                self._refuse(f"{named[0]} is unknown")
            self._at += named.end()
            has = _NAMED[named[2]]
            return (lambda c: not has(c)) if named[1] else has
        low = self._character()
        if not low.char:
            return low.has
        self._ends.append(low.char)
        if (
            self._text[self._at : self._at + 1] != "-"
            or self._text[self._at + 1 : self._at + 2] in "]-"
        ):
            return low.has
        self._at += 1
        high = self._character()
        if not low.char <= high.char:
            self._refuse(f"the range {low.char}-{high.char} has no characters")
        self._ends.append(high.char)
        return lambda c: low.char <= c <= high.char

    def _character(self) -> _Set:
        if self._text[self._at : self._at + 1] == "\\":
            return self._escape()
        char = self._text[self._at : self._at + 1]
        self._at += 1
        return _Set(char, char.__eq__, char)

    def _put(self, found: _Set) -> str:
        """Return the pattern of a set in the result."""
        escaped = [c for c in _ESCAPED if found.has(c)] if self._in_json else []
        if not escaped:
            return found.source
        begin = "(?-i:" if self._folds else "(?:"
        if found.char:
            written = json.dumps(found.char)[1:-1].replace("\\", "\\\\")
            return f"{begin}{written})"
        parts = []
        if any(map(found.has, [*_SAMPLES, *(end for end in self._ends if end not in _ESCAPED)])):
            source = r"[^\n]" if found.source == "." else found.source
            parts.append(_PLAIN if found.source == "." else f"[{source}&&{_PLAIN}]")
        parts += [f"{begin}{escape})" for escape in _escapes(escaped)]
        return f"(?:{'|'.join(parts)})"

    def _refuse(self, why: str) -> NoReturn:
        msg = f"the regular expression {self._text[:80]!r} cannot be used: {why}"
        raise RegexError(msg)


def _in_lark(found: re.Match[str]) -> str:
    """Return a character as it must be written between the slashes in a Lark grammar."""
    return {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(found[0], found[0])


def _escapes(chars: list[str]) -> list[str]:
    """Return patterns that match the JSON escapes of these characters."""
    short = "".join(_SHORT[c] for c in chars if c in _SHORT)
    found = [rf"\\[{short}]"] if short else []
    for digit in "01":
        codes = [f"{ord(c):02x}" for c in chars if c not in _SHORT]
        last = "".join(code[1] for code in codes if code[0] == digit)
        if last:
            found.append(rf"\\u00{digit}[{last}]")
    return found


def _combined(sums: list[list[Has]], operators: list[str]) -> Has:
    """Return the predicate of sets that are combined by && (and), -- (difference), ~~ (xor)."""

    def has(c: str) -> bool:
        values = [any(member(c) for member in members) for members in sums]
        found = values[0]
        for operator, value in zip(operators, values[1:], strict=True):
            if operator == "&&":
                found = found and value
            elif operator == "--":
                found = found and not value
            else:
                found = found != value
        return found

    return has


def _of_property(name: str, negated: bool) -> Has:
    """Return the predicate of a Unicode class; a script has no character that JSON escapes."""
    word = name.rpartition("=")[2].strip()
    short = {"Letter": "L", "Number": "N", "Punctuation": "P", "Symbol": "S", "Separator": "Z",
             "Other": "C", "Mark": "M", "Control": "Cc"}.get(word, word)  # fmt: skip

    def has(c: str) -> bool:
        category = unicodedata.category(c)
        of_category = short in ("Any", category, category[0])
        is_script = len(short) > 2 and not c.isascii()
        return (of_category or is_script) != negated

    return has
