"""Batches of messages: POST /v1/messages/batches, and the requests that read and change batches."""

from __future__ import annotations

import re
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.responses import StreamingResponse

from cpuserve.api.anthropic.errors import ANTHROPIC, anthropic_error
from cpuserve.api.anthropic.page import page_of_ids
from cpuserve.api.batches.line_runner import LineResult, result_id
from cpuserve.api.batches.lines import EXPIRED, read_lines
from cpuserve.api.batches.service import MESSAGE_BATCHES
from cpuserve.api.batches.start import batches_of
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.headers import CALLER
from cpuserve.api.request.state import get_state
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import delete, get, post, post_nothing
from cpuserve.base.errors import InvalidRequest, RequestError
from cpuserve.base.fault_points import fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from cpuserve.api.batches.directory import FileDirectory
    from cpuserve.api.batches.service import BatchRecord, BatchService


class MessageBatchRequest(msgspec.Struct):
    """One message request of a batch. params: a body as for POST /v1/messages."""

    custom_id: str
    params: dict[str, Any]


class CreateMessageBatch(msgspec.Struct):
    """The body of POST /v1/messages/batches."""

    requests: list[MessageBatchRequest]


class MessageBatchCounts(msgspec.Struct):
    """The number of requests with each status; all count as `processing` until the batch ends."""

    processing: int = 0
    succeeded: int = 0
    errored: int = 0
    canceled: int = 0
    expired: int = 0


class MessageBatch(msgspec.Struct, kw_only=True):
    """A batch of messages, as responses show it. Times are in the format of RFC 3339."""

    id: str
    type: str = "message_batch"
    processing_status: str
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None = None
    results_url: str | None


class MessageBatchPage(msgspec.Struct):
    """The body of GET /v1/messages/batches: one page of the list of batches, newest first."""

    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(msgspec.Struct):
    """The response to DELETE /v1/messages/batches/ID."""

    id: str
    type: str = "message_batch_deleted"


class MessageBatchResult(msgspec.Struct, omit_defaults=True):
    """The result of a request: a message, an error, or only the type "canceled" or "expired"."""

    type: str
    message: msgspec.Raw | None = None
    error: Any = None


class MessageBatchLine(msgspec.Struct):
    """One line of GET /v1/messages/batches/ID/results."""

    custom_id: str
    result: MessageBatchResult


def message_batch(record: BatchRecord, url: str) -> MessageBatch:
    """Return a batch as responses show it; url: the address of the batch on this server."""
    batch, counts = record.batch, record.batch.request_counts
    ends = (batch.completed_at, batch.cancelled_at, batch.failed_at, batch.expired_at)
    ended_at = next((at for at in ends if at is not None), None)
    shown = MessageBatchCounts(processing=counts.total)
    status = "canceling" if batch.status == "cancelling" else "in_progress"
    if record.ended:
        status = "ended"
        left = counts.total - counts.completed - counts.failed
        cancelled = left if batch.status == "cancelled" else 0
        shown = MessageBatchCounts(
            succeeded=counts.completed,
            errored=counts.failed - record.expired + left - cancelled,
            canceled=cancelled,
            expired=record.expired,
        )
    return MessageBatch(
        id=batch.id,
        processing_status=status,
        request_counts=shown,
        created_at=_time(batch.created_at),
        expires_at=_time(batch.expires_at),
        ended_at=_time(ended_at) if record.ended and ended_at is not None else None,
        cancel_initiated_at=None if batch.cancelling_at is None else _time(batch.cancelling_at),
        results_url=f"{url}/results" if record.ended else None,
    )


def _time(seconds: int) -> str:
    return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"


# The server checked the length of these lines when it accepted the batch, so no limit applies here.
_LONGEST = 1 << 40


def result_lines(directory: FileDirectory, record: BatchRecord) -> Iterator[bytes]:
    """Return the results of a batch that has ended; requests without a result come last.

    All files are opened before this returns, so a client may delete the batch while it reads.
    """
    fault("content.read")
    body, *written = [directory.path_of(name) for name in record.contents]
    results = [path.open("rb") for path in written if path.exists()]
    return _lines(record, body.open("rb"), results)


def _lines(record: BatchRecord, body: BinaryIO, results: Sequence[BinaryIO]) -> Iterator[bytes]:
    done: set[str] = set()
    for source in results:
        with source:
            for data in source:
                found = msgspec.json.decode(data, type=LineResult)
                done.add(found.id)
                yield _line(found.custom_id, _result(found))
    with body:
        for line in read_lines(body, ("/v1/messages",), _LONGEST):
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


router = APIRouter()
_ALL = MESSAGE_BATCHES.path
_ONE = _ALL + "/{message_batch_id}"
_LINES = "application/x-jsonl"
_CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@post(
    router,
    _ALL,
    schema=CreateMessageBatch,
    response=MessageBatch,
    dialect=ANTHROPIC,
    id_prefix="msgbatch_",
    conversation="requests",
    pages=False,
)
async def create_message_batch(request: RequestContext, body: CreateMessageBatch) -> Response:
    """Create a batch of the requests in the body; it runs after earlier batches of the caller."""
    batches = batches_of(request.state)
    _check_ids(body)
    lines = [
        msgspec.json.encode(
            {
                "custom_id": each.custom_id,
                "method": "POST",
                "url": "/v1/messages",
                "body": each.params,
            }
        )
        + b"\n"
        for each in body.requests
    ]
    made = await batches.create_of_lines(MESSAGE_BATCHES, request.owner, "/v1/messages", lines)
    return json_response(message_batch(made, ""))


def _check_ids(body: CreateMessageBatch) -> None:
    """Raise InvalidRequest if the batch has no request, or a custom_id is invalid or repeated."""
    if not body.requests:
        msg = "requests is empty: send one request or more"
        raise InvalidRequest(msg, param="requests")
    known: dict[str, int] = {}
    for number, each in enumerate(body.requests):
        place = f"requests.{number}.custom_id"
        if not _CUSTOM_ID.fullmatch(each.custom_id):
            msg = f"{place} must have 1 to 64 letters, digits, _ or -, got {each.custom_id[:80]!r}"
            raise InvalidRequest(msg, param=place)
        first = known.setdefault(each.custom_id, number)
        if first != number:
            msg = f"{place} is also the custom_id of requests.{first}: each must be unique"
            raise InvalidRequest(msg, param=place)


@get(router, _ALL, MessageBatchPage, dialect=ANTHROPIC, after_id=str, before_id=str, limit=int)
async def list_message_batches(request: Request) -> Response:
    """List the batches of the caller, the newest first."""
    found = _batches(request).batches(request.scope[CALLER].owner, MESSAGE_BATCHES)
    known = {record.batch.id: record for record in reversed(found)}
    ids, more = page_of_ids(list(known), request.query_params)
    shown = [_shown(request, known[each]) for each in ids]
    page = MessageBatchPage(shown, more, ids[0] if ids else None, ids[-1] if ids else None)
    return json_response(page)


@get(router, _ONE, MessageBatch, dialect=ANTHROPIC)
async def get_message_batch(request: Request) -> Response:
    """Return a batch: whether it has ended, and the number of requests with each type of result."""
    return json_response(_shown(request, _find(request)))


@get(router, f"{_ONE}/results", None, dialect=ANTHROPIC, media=_LINES)
async def get_message_batch_results(request: Request) -> Response:
    """Stream the results of a batch that has ended, one line of JSON for each request."""
    found = _find(request)
    if not found.ended:
        msg = f"Batch {found.batch.id!r} has not ended: wait until its processing_status is ended"
        raise InvalidRequest(msg, param="message_batch_id")
    lines = result_lines(_batches(request).directory, found)
    return StreamingResponse(lines, media_type=_LINES)


@post_nothing(router, f"{_ONE}/cancel", MessageBatch, dialect=ANTHROPIC)
async def cancel_message_batch(request: Request) -> Response:
    """Cancel a batch; clients can still read the results of requests that have finished."""
    caller, name = request.scope[CALLER].owner, request.path_params["message_batch_id"]
    found = await _batches(request).cancel(caller, name, MESSAGE_BATCHES)
    return json_response(_shown(request, found))


@delete(router, _ONE, DeletedMessageBatch, dialect=ANTHROPIC)
async def delete_message_batch(request: Request) -> Response:
    """Delete a batch that has ended, and its results."""
    name = request.path_params["message_batch_id"]
    _batches(request).delete(request.scope[CALLER].owner, name, MESSAGE_BATCHES)
    return json_response(DeletedMessageBatch(name))


def _batches(request: Request) -> BatchService:
    return batches_of(get_state(request))


def _find(request: Request) -> BatchRecord:
    name = request.path_params["message_batch_id"]
    return _batches(request).find(request.scope[CALLER].owner, name, MESSAGE_BATCHES)


def _shown(request: Request, record: BatchRecord) -> MessageBatch:
    base = str(request.base_url).rstrip("/")
    return message_batch(record, f"{base}{_ALL}/{record.batch.id}")
