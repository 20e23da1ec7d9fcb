"""Batches: POST /v1/batches, and the requests that read and cancel them."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.batches.facts import ExpiresAfter, lasts_after
from cpuserve.api.batches.lines import ENDPOINTS
from cpuserve.api.batches.service import BatchObject
from cpuserve.api.batches.start import batches_of
from cpuserve.api.openai.responses.schema import check_metadata
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.headers import CALLER
from cpuserve.api.request.state import get_state
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import get, post, post_nothing
from cpuserve.api.stored.page import Page, page_of
from cpuserve.base.errors import InvalidRequest

router = APIRouter()
_ONE = "/v1/batches/{batch_id}"


class CreateBatch(msgspec.Struct):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


@post(
    router,
    "/v1/batches",
    schema=CreateBatch,
    response=BatchObject,
    id_prefix="batch_",
    pages=False,
)
async def create_batch(request: RequestContext, body: CreateBatch) -> Response:
    """Create a batch of the requests in a file; it runs after earlier batches of the caller."""
    batches = batches_of(request.state)
    if body.endpoint not in ENDPOINTS:
        msg = f"endpoint must be one of {', '.join(ENDPOINTS)}, got {body.endpoint[:80]!r}"
        raise InvalidRequest(msg, param="endpoint")
    if body.completion_window != "24h":
        msg = f"completion_window must be 24h, got {body.completion_window[:80]!r}"
        raise InvalidRequest(msg, param="completion_window")
    check_metadata(body.metadata or {})
    lasts_s = lasts_after(body.output_expires_after, "output_expires_after")
    made = await batches.create(
        request.owner, body.endpoint, body.input_file_id, body.metadata, lasts_s
    )
    return json_response(made)


@get(router, "/v1/batches", Page, after=str, limit=int)
async def list_batches(request: Request) -> Response:
    """List the batches of the caller, the newest first."""
    found = batches_of(get_state(request)).batches(request.scope[CALLER].owner)
    page = page_of(
        request.query_params,
        [record.batch for record in found],
        lambda batch: batch.id,
        msgspec.json.encode,
    )
    return json_response(page)


@get(router, _ONE, BatchObject)
async def get_batch(request: Request) -> Response:
    """Return a batch: its status, the number of finished lines, and the ids of result files."""
    batches, name = batches_of(get_state(request)), request.path_params["batch_id"]
    return json_response(batches.find(request.scope[CALLER].owner, name).batch)


@post_nothing(router, f"{_ONE}/cancel", BatchObject)
async def cancel_batch(request: Request) -> Response:
    """Cancel a batch; clients can still read the results of lines that have finished."""
    batches, name = batches_of(get_state(request)), request.path_params["batch_id"]
    return json_response((await batches.cancel(request.scope[CALLER].owner, name)).batch)
