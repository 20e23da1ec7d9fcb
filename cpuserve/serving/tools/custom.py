"""Custom tools of OpenAI: the model writes a free text, which may have a grammar, as the input.

Chat templates know only functions. A custom tool is therefore offered as a function with the text
as its one parameter, and the call of that function becomes a call of the custom tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import Any

from cpuserve.sampling.grammar_marks import INPUT
from cpuserve.sampling.structured import InputGrammar, input_arguments
from cpuserve.serving.calls.events import ToolCallDelta
from cpuserve.serving.tools.base import Piece, ToolParser
from cpuserve.serving.tools.wrapped import WrappedParser

_SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}
# The parts of JSON arguments before the input text; white space may come before each part.
_BEFORE = ("{", f'"{INPUT}"', ":", '"')
_SPACE = " \t\r\n"
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_UNICODE = re.compile(r"\\u([0-9a-fA-F]{4})")
_SURROGATES = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2})?")


def as_function(name: str, description: str | None, grammar: InputGrammar) -> dict[str, Any]:
    """Return the function that a template shows to the model in place of a custom tool."""
    about = f"This tool takes a text: write it as the parameter `{INPUT}`."
    if grammar.syntax:
        kind = _SYNTAXES[grammar.syntax]
        about += f" The text must match this {kind}:\n{grammar.definition.strip()}"
    shown = "\n\n".join(filter(None, (description, about)))
    member = {"type": "string", "description": "The text."}
    return {"name": name, "description": shown, "parameters": input_arguments(member)}


class CustomCalls(WrappedParser):
    """A ToolParser that turns the arguments of calls of custom tools into the texts in them.

    All other pieces of the wrapped parser are passed through unchanged.

    tools: the names of the custom tools.
    """

    def __init__(self, parser: ToolParser, tools: Collection[str]) -> None:
        super().__init__(parser)
        self._tools = tools
        self._input: InputText | None = None  # the text of the call that is being read
        self._last: ToolCallDelta | None = None  # the last piece of this call

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """Return the pieces of the text that is still held back (see ToolParser.flush)."""
        return [*super().flush(cut=cut), *self._end()]

    def _passed(self, pieces: list[Piece]) -> list[Piece]:
        found: list[Piece] = []
        for piece in pieces:
            if not isinstance(piece, ToolCallDelta):
                found.append(piece)
                continue
            if piece.id is not None:
                found += self._end()
                self._input = InputText() if piece.name in self._tools else None
            if self._input is None:
                found.append(piece)
                continue
            text = self._input.push(piece.arguments)
            self._last = ToolCallDelta(piece.index, piece.call, text, piece.id, piece.name, True)
            if text or piece.id is not None:
                found.append(self._last)
        if self._input is not None and self._parser.last_closed:
            found += self._end()
        return found

    def _end(self) -> list[Piece]:
        """Return the part of the last custom tool's input that was not reported yet."""
        given, last = self._input, self._last
        self._input = self._last = None
        if given is None or last is None or not (text := given.flush()):
            return []
        return [ToolCallDelta(last.index, last.call, text, custom=True)]


class InputText:
    """Reads the arguments of a call in pieces, and returns the text that is the tool's input.

    Models may write the text itself in place of an object, or use another name for the parameter.
    """

    def __init__(self) -> None:
        self._raw: list[str] = []  # the arguments until it is clear how the model writes them
        self._held = ""
        self._todo = list(_BEFORE)
        self._read = self._before

    def push(self, arguments: str) -> str:
        """Return the further part of the input text that no later piece can change."""
        self._held += arguments
        found: list[str] = []
        while self._held:
            state = self._read
            found.append(state())
            if self._read == state:
                break
        return "".join(found)

    def flush(self) -> str:
        """Return the part of the input text that is still held back; called once, at the end."""
        held, self._held = self._held, ""
        if self._read == self._inside:
            return "" if held.startswith("\\") else held
        written = "".join(self._raw) + held
        self._raw.clear()
        if self._read == self._after:
            return ""
        begun = self._read == self._before and len(self._todo) < len(_BEFORE)
        return _input_of(written, "" if begun else written)

    def _before(self) -> str:
        """Read arguments up to the beginning of the string that is the input text."""
        while self._todo:
            rest = self._held.lstrip(_SPACE)
            part = self._todo[0]
            if not rest.startswith(part):
                if not part.startswith(rest):
                    self._read = self._other if len(self._todo) < len(_BEFORE) else self._bare
                return ""
            self._raw.append(self._held[: len(self._held) - len(rest)] + part)
            self._held = rest[len(part) :]
            del self._todo[0]
        self._raw.clear()
        self._read = self._inside
        return ""

    def _bare(self) -> str:
        """Return the arguments unchanged: the model wrote the input text in place of an object."""
        found, self._held = "".join(self._raw) + self._held, ""
        self._raw.clear()
        return found

    def _other(self) -> str:
        """Store an object with other parameters than INPUT until it has ended."""
        self._raw.append(self._held)
        self._held = ""
        return ""

    def _inside(self) -> str:
        """Return the characters of the string, up to its end or an incomplete escape."""
        found, at, held = [], 0, self._held
        while at < len(held):
            stop = next((i for i in range(at, len(held)) if held[i] in '"\\'), len(held))
            found.append(held[at:stop])
            at = stop
            if at == len(held):
                break
            if held[at] == '"':
                self._read = self._after
                break
            char, end = _escape(held, at)
            if not end:
                break
            found.append(char)
            at = end
        self._held = held[at:]
        return "".join(found)

    def _after(self) -> str:
        self._held = ""
        return ""


def _escape(held: str, at: int) -> tuple[str, int]:
    """Return the character of the escape at index `at`, and its end index; 0 = incomplete."""
    letter = held[at + 1 : at + 2]
    if not letter:
        return "", 0
    if letter != "u":
        plain = letter in '"\\/'
        return _ESCAPES.get(letter, letter if plain else "\\" + letter), at + 2
    found = _UNICODE.match(held, at)
    if found is None:
        is_cut = len(held) - at < 6
        return ("", 0) if is_cut else ("\\u", at + 2)
    pair = _SURROGATES.match(held, at)
    if pair is None:
        char = chr(int(found[1], 16))
        return ("\ufffd" if "\udc00" <= char <= "\udfff" else char), found.end()
    if len(pair[0]) == 12:
        return json.loads(f'"{pair[0]}"'), pair.end()
    rest = held[found.end() :]
    if len(rest) < 6 and r"\u".startswith(rest[:2]):
        return "", 0
    return "\ufffd", found.end()


def _input_of(written: str, otherwise: str) -> str:
    """Return the text in whole arguments, and `otherwise` if the arguments are not JSON."""
    try:
        value = json.loads(written, strict=False)
    except (ValueError, RecursionError):
        return otherwise
    if not isinstance(value, dict):
        return value if isinstance(value, str) else written
    if isinstance(value.get(INPUT), str):
        return str(value[INPUT])
    texts = [text for text in value.values() if isinstance(text, str)]
    return "" if not value else texts[0] if len(value) == 1 and texts else written
