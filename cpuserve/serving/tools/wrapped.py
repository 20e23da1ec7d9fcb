"""Parsers that wrap another parser: their base class, and the parser of structured outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.serving.calls.events import Text

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
