"""Run the requests of a batch file without a server; write the results in the order of lines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from cpuserve.api.batches.line_runner import LineResult, LineRunner, result_id
from cpuserve.api.batches.lines import ENDPOINTS, BatchLine, check_lines, read_lines
from cpuserve.errors import ConfigError
from cpuserve.serving.callers.caller import Caller

if TYPE_CHECKING:
    from starlette.types import ASGIApp

# The endpoints that lines may request; lines of one file may request different endpoints.
FILE_ENDPOINTS = (
    *ENDPOINTS,
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
)
# The batch id that the ids of results contain, and the caller of the requests.
_NAME = "offline"

# A function that is called with each line of the output file, and whether its request succeeded.
WriteLine = Callable[[bytes, bool], None]


def count_lines(source: BinaryIO, longest: int) -> int:
    """Return the number of lines of a batch file, after reading and checking the whole file.

    longest: the maximum length of a line in bytes.

    Raises:
      ConfigError: the file has no lines, or two of them have the same custom_id.
    """
    total, errors = check_lines(source, FILE_ENDPOINTS, longest, most_lines=None)
    for error in errors:
        place = "" if error.line is None else f"line {error.line}: "
        msg = f"the input file cannot run: {place}{error.message}"
        raise ConfigError(msg)
    return total


def count_results(source: BinaryIO, out: BinaryIO, longest: int) -> int:
    """Return how many lines have a result in `out`, which an earlier run wrote.

    An incomplete last result is cut off; `out` is then at its end.

    Raises:
      ConfigError: a result does not belong to its line.
    """
    done, end = 0, 0
    lines = read_lines(source, FILE_ENDPOINTS, longest)
    for data in out:
        if not data.endswith(b"\n"):
            break
        line = next(lines, None)
        try:
            found = msgspec.json.decode(data, type=LineResult)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        if line is None or found is None or not _is_of(found, line):
            msg = (
                f"result {done + 1} of the output file does not belong to line {done + 1} of the "
                "input: choose another output file"
            )
            raise ConfigError(msg)
        done, end = done + 1, end + len(data)
    out.truncate(end)
    out.seek(end)
    return done


def _is_of(found: LineResult, line: BatchLine) -> bool:
    return found.id == result_id(_NAME, line.number) and found.custom_id == line.custom_id


async def run_file(
    app: ASGIApp, source: BinaryIO, write: WriteLine, *, longest: int, most: int, skip: int = 0
) -> None:
    """Run the requests of all lines of a file, at most `most` at the same time.

    app: the ASGI app that serves the endpoints.
    write: called with the result of each line, in the order of the lines;
      the first error that it raises ends the run.
    longest: the maximum length of a line in bytes.
    skip: how many lines have a result already.
    """
    ordered = _InOrder(write)
    left = islice(read_lines(source, FILE_ENDPOINTS, longest), skip, None)
    lines = ordered.noted(left)
    sender = Caller.of_address(_NAME)
    await LineRunner(app, lambda: sender, _NAME).run(lines, ordered.take, most=most)


class _InOrder:
    """Writes results in the order of their lines, though requests end in any order."""

    def __init__(self, write: WriteLine) -> None:
        self._write = write
        self._begun: deque[str] = deque()
        self._ended: dict[str, LineResult] = {}

    def noted(self, lines: Iterable[BatchLine]) -> Iterator[BatchLine]:
        """Yield the lines, and remember their order for `take`."""
        for line in lines:
            self._begun.append(result_id(_NAME, line.number))
            yield line

    def take(self, result: LineResult) -> None:
        """Store a result until the results of all earlier lines have been written."""
        self._ended[result.id] = result
        while self._begun and self._begun[0] in self._ended:
            first = self._ended.pop(self._begun.popleft())
            self._write(msgspec.json.encode(first) + b"\n", first.succeeded)
