"""Parsers that wrap another parser: their base class, structured outputs, calls in thoughts."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from cpuserve.serving.calls.events import Text, Thought, ToolCallDelta
from cpuserve.serving.tools.machine import CallParser, overlap

if TYPE_CHECKING:
    from cpuserve.serving.tools.base import Piece, ToolParser


class WrappedParser:
    """A ToolParser that passes everything to another parser, and its pieces through `_passed`."""

    def __init__(self, parser: ToolParser) -> None:
        self.most_calls, self.ends_at_repeat = parser.most_calls, parser.ends_at_repeat
        self._parser = parser

    @property
    def num_closed(self) -> int:
        """How many tool calls are complete."""
        return self._parser.num_closed

    @property
    def last_closed(self) -> bool:
        """Whether the tool call that began last is complete."""
        return self._parser.last_closed

    @property
    def is_full(self) -> bool:
        """Whether the response ends with the calls so far (see ToolParser)."""
        return self._parser.is_full

    @property
    def in_thought(self) -> bool:
        """Whether the text so far ends within a thought."""
        return self._parser.in_thought

    @property
    def ends_with_call(self) -> bool:
        """Whether only white space and markers have followed the last call."""
        return self._parser.ends_with_call

    @property
    def num_calls(self) -> int:
        """How many tool calls have begun."""
        return self._parser.num_calls

    def may_stop(self, char: str) -> bool:
        """Return whether the next character may be a part of a stop string."""
        return self._parser.may_stop(char)

    def stops_alike(self, text: str) -> bool:
        """Return whether may_stop is known to be the same for all characters of `text`."""
        return self._parser.stops_alike(text)

    def force(self, opening: str) -> list[Piece]:
        """Return the pieces of `opening`, the beginning of a call that the server has forced."""
        return self._passed(self._parser.force(opening))

    def push(self, text: str) -> list[Piece]:
        """Read the next text; return the pieces that no later text can change."""
        return self._passed(self._parser.push(text))

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """Return the pieces of the text that is still held back (see ToolParser.flush)."""
        return self._passed(self._parser.flush(cut=cut))

    def _passed(self, pieces: list[Piece]) -> list[Piece]:
        """Return the client's pieces for these pieces of the wrapped parser."""
        return pieces


class FormParser(WrappedParser):
    """A parser of a response that has the form which the client asked for.

    The form may allow the texts of tags, as in {"const": "<think>"}. So the whole response is text,
    unless it may consist of tool calls instead: then a marker of calls at its beginning decides.
    Only then does the wrapped parser get the text.
    """

    def __init__(self, parser: ToolParser, index: int, markers: tuple[str, ...] = ()) -> None:
        """parser: reads a response of tool calls; markers: the beginnings of such responses."""
        super().__init__(parser)
        self._index = index
        self._markers = markers
        self._held = ""  # the beginning of the response, as long as it may be a marker
        self._calls: bool | None = None if markers else False  # None = not known yet

    @property
    def in_thought(self) -> bool:
        """Whether the response so far ends inside a thought."""
        return bool(self._calls) and super().in_thought

    def may_stop(self, char: str) -> bool:
        """Return whether the next character may be a part of a stop string."""
        return not self._calls or super().may_stop(char)

    def stops_alike(self, text: str) -> bool:
        """Return whether `may_stop` is known to return the same for each character of `text`."""
        return self._calls is False or (bool(self._calls) and super().stops_alike(text))

    def force(self, opening: str) -> list[Piece]:
        """Return the pieces of `opening`, which begins a call: the response is no form then."""
        self._calls = True
        return super().force(opening)

    def push(self, text: str) -> list[Piece]:
        """Read the next text; return the pieces that no later text can change."""
        if self._calls:
            return super().push(text)
        self._held += text
        begun = self._held.lstrip()
        if self._calls is None:
            if begun.startswith(self._markers):
                self._calls = True
                return super().push(self._taken())
            if any(marker.startswith(begun) for marker in self._markers):
                return []
            self._calls = False
        return self._text()

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """Return the pieces of the text that is still held back; called once, after all text."""
        return super().flush(cut=cut) if self._calls else self._text()

    def _text(self) -> list[Piece]:
        text = self._taken()
        return [Text(self._index, text, [])] if text else []

    def _taken(self) -> str:
        text, self._held = self._held, ""
        return text


_SPACE = " \t\r\n"
_SHORTEST = 3  # shorter markers, such as "[", are usual in thoughts


def finds_calls(parser: CallParser) -> bool:
    """Return whether the markers of a parser tell calls in a thought from other text."""
    return bool(parser.markers) and all(len(mark) >= _SHORTEST for mark in parser.markers)


class ThoughtCalls(WrappedParser):
    """A ToolParser that reports calls at the end of the last thought as calls.

    Some models call a tool before they end their thought, or end it only after the call:

        <think>I need the weather.
        <tool_call>
        {"name": "get_weather", "arguments": {"city": "Paris"}}
        </tool_call>

    Nothing follows, so the call is the answer. Calls that other text follows are drafts, and stay
    a part of the thought.

    The thought is held back from a marker on, until its text can no longer be only calls. All
    other pieces of the wrapped parser are passed through unchanged.

    make: returns a parser of the same format for a text that continues a response.
    functions: the names of the functions that may be called.
    """

    def __init__(
        self, parser: CallParser, make: Callable[[], ToolParser], functions: Collection[str]
    ) -> None:
        super().__init__(parser)
        self._markers, self._make, self._functions = parser.markers, make, functions
        self._index = 0
        self._held = ""  # text of the thought that is not read yet
        self._calls: ToolParser | None = None  # reads text that may be calls
        self._read: list[str] = []  # this text, and the white space before it
        self._found: list[Piece] = []  # what `_calls` has found in it

    def flush(self, *, cut: bool = False) -> list[Piece]:
        """Return the pieces of the text that is still held back (see ToolParser.flush).

        If a limit has cut the response, the model was still thinking.
        """
        told = super().flush(cut=cut)
        return told + (self._release() if cut or self._parser.num_calls else self._ended())

    def _passed(self, pieces: list[Piece]) -> list[Piece]:
        told: list[Piece] = []
        for piece in pieces:
            if isinstance(piece, Thought):
                self._index = piece.index
                self._held += piece.text
                told += self._thought()
            else:
                told += [*self._release(), piece]
        return told

    def _thought(self) -> list[Piece]:
        """Return the part of the thought so far that cannot be calls at its end."""
        told: list[Piece] = []
        while True:
            if self._calls is None:
                found = [at for mark in self._markers if (at := self._held.find(mark)) >= 0]
                end = min(found, default=len(self._held) - overlap(self._held, self._markers))
                words = len(self._held[:end].rstrip(_SPACE))
                told += self._told(self._held[:words])
                self._held = self._held[words:]
                if not found:
                    return told
                self._read, self._held = [self._held[: end - words]], self._held[end - words :]
                self._calls = self._make()
            if self._reads_calls(self._calls):
                return told
            draft = "".join(self._read)
            words = len(draft[: len(draft) - overlap(draft, self._markers)].rstrip(_SPACE))
            self._held = draft[words:] + self._held
            self._forget()
            told += self._told(draft[:words])

    def _reads_calls(self, calls: ToolParser) -> bool:
        """Read the held text as calls; return False where that fails.

        The text is read from marker to marker, so the marker at which the next attempt begins
        does not depend on how the text is divided.
        """
        while self._held:
            ahead = [at for mark in self._markers if (at := self._held.find(mark, 1)) >= 0]
            end = min(ahead, default=len(self._held))
            text, self._held = self._held[:end], self._held[end:]
            self._read.append(text)
            pieces = calls.push(text)
            self._found += pieces
            if not all(map(self._is_call, pieces)):
                return False
        return True

    def _is_call(self, piece: Piece) -> bool:
        if isinstance(piece, ToolCallDelta):
            return piece.name is None or piece.name in self._functions
        return isinstance(piece, Text) and not piece.text.strip(_SPACE)

    def _ended(self) -> list[Piece]:
        """Return the calls at the end of the thought; without complete calls, return its text."""
        calls, most = self._calls, self._parser.most_calls
        if calls is None:
            return self._release()
        self._found += calls.flush()
        if not (calls.ends_with_call and all(map(self._is_call, self._found))):
            return self._release()
        calls.most_calls, self._parser = most, calls
        made = [piece for piece in self._found if isinstance(piece, ToolCallDelta)]
        return [piece for piece in made if most is None or piece.call < most]

    def _release(self) -> list[Piece]:
        """Return all text that is held back as a thought."""
        text, self._held = "".join([*self._read, self._held]), ""
        self._forget()
        return self._told(text)

    def _forget(self) -> None:
        self._calls, self._read, self._found = None, [], []

    def _told(self, text: str) -> list[Piece]:
        return [Thought(self._index, text)] if text else []
