"""Run the lines of a file without a server, and write their results in the order of the lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from cpuserve.api.batches.line_runner import LineResult, result_id, run_lines
from cpuserve.api.batches.lines import ENDPOINTS, BatchLine, check_lines, read_lines
from cpuserve.errors import ConfigError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

# The endpoints that lines may name. They may differ from line to line.
FILE_ENDPOINTS = (
    *ENDPOINTS,
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
)
# The id of the batch in the ids of results, and the sender of its requests.
_NAME = "offline"

# Called with each line of the output file, and whether its request succeeded.
WriteLine = Callable[[bytes, bool], None]


def count_lines(source: BinaryIO, longest: int) -> int:
    """Return the number of lines of a file, which is read to its end.

    longest: the most bytes of a line.

    Raises:
      ConfigError: the file has no lines, or two of them have the same custom_id.
    """
    total, errors = check_lines(source, FILE_ENDPOINTS, longest, most_lines=None)
    for error in errors:
        place = "" if error.line is None else f"line {error.line}: "
        msg = f"the input file cannot run: {place}{error.message}"
        raise ConfigError(msg)
    return total


async def run_file(
    app: ASGIApp, source: BinaryIO, write: WriteLine, *, longest: int, most: int
) -> None:
    """Run all lines of a file, at most `most` of them at the same time.

    app: the app that serves the endpoints.
    write: gets one result for each line, in the order of the lines; the first error that it raises
      ends the run.
    longest: the most bytes of a line.
    """
    ordered = _InOrder(write)
    lines = ordered.noted(read_lines(source, FILE_ENDPOINTS, longest))
    await run_lines(app, _NAME, _NAME, lines, ordered.take, most=most)


class _InOrder:
    """Passes on results in the order of their lines."""

    def __init__(self, write: WriteLine) -> None:
        self._write = write
        self._begun: deque[str] = deque()
        self._ended: dict[str, LineResult] = {}

    def noted(self, lines: Iterable[BatchLine]) -> Iterator[BatchLine]:
        """Yield the lines, and note their order."""
        for line in lines:
            self._begun.append(result_id(_NAME, line.number))
            yield line

    def take(self, result: LineResult) -> None:
        """Keep a result until the results of all earlier lines are written."""
        self._ended[result.id] = result
        while self._begun and self._begun[0] in self._ended:
            first = self._ended.pop(self._begun.popleft())
            self._write(msgspec.json.encode(first) + b"\n", first.succeeded)
