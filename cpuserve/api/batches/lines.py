"""Parse the lines of a batch file, each a request to an endpoint in the OpenAI batch format."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec

# The endpoints that the lines of a batch may request.
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
)
MOST_LINES = 50_000
_LONGEST_ID = 512
# The error code of lines that the batch did not reach before its completion window ended.
EXPIRED = "batch_expired"


class LineError(msgspec.Struct):
    """Why a line cannot run; its members are as in the `errors` of an OpenAI batch."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


def expired() -> LineError:
    """Return the error of a line that ran too late."""
    return LineError(EXPIRED, "the batch did not reach this line within its completion_window")


@dataclass(slots=True)
class BatchLine:
    """Line `number` of a batch file, counted from 1: a request, or why it cannot run."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    error: LineError | None = None


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


class _Id(msgspec.Struct):
    custom_id: str | None = None


def read_lines(source: BinaryIO, endpoints: Collection[str], longest: int) -> Iterator[BatchLine]:
    """Yield the requests in a batch file; blank lines and a byte order mark are skipped.

    endpoints: the endpoints that a line may request.
    longest: the maximum length of a line in bytes.
    """
    number = 0
    while data := source.readline(longest + 1 + (0 if number else len(BOM_UTF8))):
        number += 1
        if number == 1:
            data = data.removeprefix(BOM_UTF8)
        if len(data) > longest and not data.endswith(b"\n"):
            while data and not data.endswith(b"\n"):
                data = source.readline(longest)
            msg = f"the line has more than {longest} bytes: send a shorter request"
            yield BatchLine(number, error=LineError("line_too_long", msg))
        elif data.strip():
            yield _parsed(number, data, endpoints)


def _parsed(number: int, data: bytes, endpoints: Collection[str]) -> BatchLine:
    line = BatchLine(number)
    try:
        line.custom_id = msgspec.json.decode(data, type=_Id).custom_id
        found = msgspec.json.decode(data, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        msg = (
            f'the line is no request ({error}): write {{"custom_id": ..., "method": "POST", '
            '"url": ..., "body": {...}}'
        )
        line.error = LineError("invalid_json_line", msg)
        return line
    line.url = found.url
    body = found.body
    if not 0 < len(found.custom_id) <= _LONGEST_ID:
        msg = f"custom_id must have 1 to {_LONGEST_ID} characters"
        line.error = LineError("invalid_custom_id", msg, "custom_id")
    elif found.method != "POST":
        msg = f"method is {found.method[:80]!r}: a line of a batch must have POST"
        line.error = LineError("invalid_method", msg, "method")
    elif found.url not in endpoints:
        known = " or ".join(endpoints)
        msg = f"url is {found.url[:80]!r}: the lines of this batch must have {known}"
        line.error = LineError("invalid_url", msg, "url")
    elif body.get("stream") or body.get("background"):
        name = "stream" if body.get("stream") else "background"
        msg = f"{name} is not possible in a batch: omit it"
        line.error = LineError("unsupported_parameter", msg, f"body.{name}")
    elif body.get("encoding_format") in ("bytes", "bytes_only"):
        msg = "encoding_format is bytes, and a line of the output is JSON: send base64"
        line.error = LineError("unsupported_parameter", msg, "body.encoding_format")
    else:
        if found.url == "/v1/responses":  # the output file has the response already
            body.setdefault("store", False)
        line.body = msgspec.json.encode(body)
    return line


def check_lines(
    source: BinaryIO,
    endpoints: Collection[str],
    longest: int,
    most_lines: int | None = MOST_LINES,
) -> tuple[int, list[LineError]]:
    """Return the number of lines, and the errors that prevent the file from running.

    most_lines: the maximum number of lines; None = no limit. An invalid line is not in the errors,
    because the other lines can still run.
    """
    total, known = 0, dict[str, int]()
    for line in read_lines(source, endpoints, longest):
        total += 1
        if most_lines is not None and total > most_lines:
            msg = f"the file has more than {most_lines} lines: send several files"
            return total, [LineError("too_many_lines", msg, None, line.number)]
        if line.custom_id is None:
            continue
        first = known.setdefault(line.custom_id, line.number)
        if first != line.number:
            msg = f"custom_id {line.custom_id[:80]!r} is also in line {first}: each must be unique"
            return total, [LineError("duplicate_custom_id", msg, "custom_id", line.number)]
    if total == 0:
        return 0, [LineError("empty_file", "the file has no lines: write one request a line")]
    return total, []
