"""Limits on the lines of a response: a least indentation, and a time after which a line ends it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class LineRules(NamedTuple):
    """Rules that end a response at a line, for suggestions of code; 0 switches a rule off.

    min_indent: the first later line with fewer spaces and tabs at its start,
      and other text after them, ends the response and is left out.
    most_s: the first line that ends more than this number of seconds
      after the first text ends the response.
    """

    min_indent: int = 0
    most_s: float = 0.0


class LineLimits:
    """Applies LineRules to a text that arrives in pieces; `ended`: whether a rule ended the text.

    The start of a line, with the line break before it, is held back until its indentation is known.
    """

    def __init__(self, rules: LineRules, clock: Callable[[], float] = time.monotonic) -> None:
        self._rules = rules
        self._clock = clock
        self._started: float | None = None
        self._held = ""
        self.ended = False

    def push(self, text: str) -> str:
        """Return the text that may be shown now."""
        if self._started is None:
            self._started = self._clock()
        if self.ended:
            return ""
        if self._rules.min_indent:
            text = self._indented(text)
        late = self._rules.most_s and self._clock() - self._started > self._rules.most_s
        if late and not self.ended and "\n" in text:
            self.ended = True
            return text[: text.index("\n") + 1]
        return text

    def flush(self) -> str:
        """Return the text that is still held back; called once, after the last piece."""
        held, self._held = self._held, ""
        return "" if self.ended else held

    def _indented(self, text: str) -> str:
        shown: list[str] = []
        for character in text:
            if character == "\n":
                shown.append(self._held)
                self._held = character
            elif self._held and character in " \t":
                self._held += character
            else:
                if self._held and len(self._held) - 1 < self._rules.min_indent:
                    self.ended = True
                    break
                shown += (self._held, character)
                self._held = ""
        return "".join(shown)
