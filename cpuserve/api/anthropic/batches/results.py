"""The results of a batch of messages, one line of JSON for each request."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

import msgspec

from cpuserve.api.anthropic.batches.schema import MessageBatchLine, MessageBatchResult
from cpuserve.api.anthropic.errors import anthropic_error
from cpuserve.api.batches.line_runner import LineResult, result_id
from cpuserve.api.batches.lines import EXPIRED, read_lines
from cpuserve.errors import InvalidRequest, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cpuserve.api.batches.directory import FileDirectory
    from cpuserve.api.batches.service import BatchRecord

# The server checked the length of these lines when it accepted the batch, so no limit applies here.
_LONGEST = 1 << 40


def result_lines(directory: FileDirectory, record: BatchRecord) -> Iterator[bytes]:
    """Return the results of a batch that has ended; requests without a result come last.

    All files are opened before this returns, so a client may delete the batch while it reads.
    """
    asked, *written = [directory.path_of(name) for name in record.contents]
    results = [path.open("rb") for path in written if path.exists()]
    return _lines(record, asked.open("rb"), results)


def _lines(record: BatchRecord, asked: BinaryIO, results: Sequence[BinaryIO]) -> Iterator[bytes]:
    done: set[str] = set()
    for source in results:
        with source:
            for data in source:
                found = msgspec.json.decode(data, type=LineResult)
                done.add(found.id)
                yield _line(found.custom_id, _result(found))
    with asked:
        for line in read_lines(asked, ("/v1/messages",), _LONGEST):
            if result_id(record.batch.id, line.number) not in done:
                yield _line(line.custom_id, _missing(record, line.number))


def _line(custom_id: str | None, result: MessageBatchResult) -> bytes:
    return msgspec.json.encode(MessageBatchLine(custom_id or "", result)) + b"\n"


def _result(found: LineResult) -> MessageBatchResult:
    """Return the result of one request of a batch, from its line in the output or error file."""
    if found.response is not None:
        if found.succeeded:
            return MessageBatchResult("succeeded", found.response.body)
        return MessageBatchResult("errored", error=found.response.body)
    assert found.error is not None
    if found.error.code == EXPIRED:
        return MessageBatchResult("expired")
    error = anthropic_error(InvalidRequest(found.error.message), found.id)
    return MessageBatchResult("errored", error=msgspec.Raw(error))


def _missing(record: BatchRecord, number: int) -> MessageBatchResult:
    """Return the result of request `number`, which the batch never ran."""
    if record.batch.status == "cancelled":
        return MessageBatchResult("canceled")
    reasons = record.batch.errors.data if record.batch.errors is not None else ()
    said = " ".join(error.message for error in reasons)
    error = anthropic_error(
        RequestError(f"The batch ended before this request ran: {said}"),
        result_id(record.batch.id, number),
    )
    return MessageBatchResult("errored", error=msgspec.Raw(error))
