"""Joins the events that a parser of tool calls finds in a text to whole texts and calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from cpuserve.serving.calls.events import Text, ToolCallDelta

INDEX = 3  # the index of the choice in the response
Found = list[str | list[str]]


def check_what_is_closed(parser: Any, call: str, cut: int) -> None:
    """Check num_closed and last_closed of a parser: after a call, within a second, and after it.

    cut: the number of characters of the second call that the parser gets first.
    """
    assert (parser.num_closed, parser.last_closed) == (0, False)
    for text, known in ((call, (1, True)), (call[:cut], (1, False)), (call[cut:], (2, True))):
        parser.push(text)
        assert (parser.num_closed, parser.last_closed) == known


def told(parser: Any, texts: Iterable[str]) -> Found:
    """Return the texts and the calls [name, arguments] in order, with the pieces of each joined.

    parser: a parser for choice `INDEX`.
    texts: the pieces of the response.
    """
    pieces = [piece for text in texts for piece in parser.push(text)] + parser.flush()
    assert all(piece.index == INDEX for piece in pieces)
    found: Found = []
    ids: list[str] = []
    for piece in pieces:
        if isinstance(piece, Text):
            assert piece.text
            assert piece.token_ids == []
            joined = found.pop() if found and isinstance(found[-1], str) else ""
            found.append(f"{joined}{piece.text}")
            continue
        assert isinstance(piece, ToolCallDelta)
        if piece.id is None:
            assert (piece.name, piece.call) == (None, len(ids) - 1)
            found[-1][1] += piece.arguments
        else:
            assert piece.call == len(ids)
            ids.append(piece.id)
            found.append([piece.name, piece.arguments])
    assert all(ids)
    assert len(set(ids)) == len(ids)
    assert (parser.num_calls, parser.num_closed <= parser.num_calls) == (len(ids), True)
    return found
