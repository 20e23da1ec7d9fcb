"""The bodies of requests to /v1/messages/batches, and of their responses."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from cpuserve.api.batches.service import BatchRecord


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
