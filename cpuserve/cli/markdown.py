"""Markdown of a response on a terminal, block by block while it arrives."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_TAIL_LINES = 6  # an unfinished block may have as many lines less than the terminal


class MarkdownStream:
    """Shows a growing text: finished blocks stay, and the block that grows is drawn again.

    A block ends with a blank line outside of a fence, so a drawn block never changes later.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._rest = ""
        self._live: Live | None = None

    def add(self, text: str) -> None:
        """Show a further piece of the text."""
        self._rest += text
        end = end_of_blocks(self._rest)
        if end or self._rest.count("\n") > self._console.height - _TAIL_LINES:
            self._print(self._rest[: end or len(self._rest)])
            self._rest = self._rest[end or len(self._rest) :]
        if self._rest.strip():
            if self._live is None:
                from rich.live import Live

                self._live = Live(console=self._console, transient=True, refresh_per_second=8)
                self._live.start()
            self._live.update(_drawn(self._rest))

    def close(self) -> None:
        """Print the last block; the terminal is as before, also after an error."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print(self._rest)
        self._rest = ""

    def _print(self, text: str) -> None:
        if self._live is not None:
            self._live.stop()  # removes the block that was drawn
            self._live = None
        if text.strip():
            self._console.print(_drawn(text))


def end_of_blocks(text: str) -> int:
    """Return where the last finished block of a text ends; 0 = none is finished."""
    end = place = 0
    fence = ""
    for line in text.splitlines(keepends=True):
        place += len(line)
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
        elif found and found[1].startswith(fence) and not line[found.end() :].strip():
            fence = ""
        elif not fence and not line.strip() and line.endswith("\n"):
            end = place
    return end


def _drawn(text: str) -> RenderableType:
    from rich.markdown import Markdown

    return Markdown(text.strip("\n"), code_theme="ansi_dark")
