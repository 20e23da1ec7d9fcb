"""Responses without tool calls: thoughts between tags, if there are any, and then a text."""

from __future__ import annotations

from typing import NoReturn

from cpuserve.serving.tools.base import NO_SCHEMAS, Schemas, UnforcedCalls
from cpuserve.serving.tools.machine import CallParser
from cpuserve.serving.tools.thoughts import Around


class Plain(UnforcedCalls):
    """The format of responses to requests without tools: text and thoughts."""

    name = "plain"
    reads_schemas = False
    markers: frozenset[str] = frozenset()

    def asks_for_calls(self, instructions: str) -> bool:  # noqa: ARG002
        """Return False, because the format has no calls."""
        return False

    def parser(
        self,
        index: int,
        opening: str = "",
        schemas: Schemas = NO_SCHEMAS,  # noqa: ARG002
        around: Around | None = None,
    ) -> PlainParser:
        """Return a parser for the text of choice `index` after `opening` (ToolFormat.parser)."""
        return PlainParser(index, opening, around=around)


PLAIN = Plain()


class PlainParser(CallParser):
    """A parser with two states: in text, or in a thought."""

    markers = ()

    def _end(self) -> None:
        """Report the held-back text at the end of the response."""
        self._say(self._held)

    def _at_marker(self, marker: str) -> NoReturn:
        raise NotImplementedError
