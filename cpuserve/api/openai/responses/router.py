"""POST /v1/responses, and the routes that count, compact, read, cancel and delete responses."""

from __future__ import annotations

import asyncio
import uuid
from functools import partial

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response

from cpuserve.api.openai.responses import response_object
from cpuserve.api.openai.responses.history import ReferringRequest, new_items, read_turn
from cpuserve.api.openai.responses.recording import respond_recorded, sent, stream_of
from cpuserve.api.openai.responses.schema import ResponsesRequest, check_include, to_call, words
from cpuserve.api.openai.responses.sealed_items import with_opened
from cpuserve.api.openai.responses.stored_response import StoredResponse, find_response
from cpuserve.api.openai.schema import InputTokens
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.fields import check_fields
from cpuserve.api.request.headers import CALLER
from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import delete, get, post, post_nothing, prepared, prompt_length
from cpuserve.api.stored.page import Page, page_of
from cpuserve.errors import InvalidRequest

router = APIRouter()
_ONE = "/v1/responses/{response_id}"


@post(
    router,
    "/v1/responses",
    "/responses",
    schema=ResponsesRequest,
    response=response_object.Response,
    id_prefix="resp_",
    stream=EVENTS,
    conversation="input",
    also=[409],
    words=words,
)
async def create_response(request: RequestContext, body: ResponsesRequest) -> Response:
    """Generate the next output items of a conversation."""
    turn = await _turn(request, body)
    try:
        _take_free_id(request)
        await _open(request, turn)
        calls = partial(to_call, num_stored=turn.num_stored)
        generation = await prepared(request, turn.body, calls)
        return respond_recorded(request, turn, generation)
    except BaseException:
        turn.release()
        raise


@post(
    router,
    "/v1/responses/input_tokens",
    "/responses/input_tokens",
    schema=ResponsesRequest,
    response=InputTokens,
    id_prefix="resp_",
    conversation="input",
    also=[409],
    words=words,
)
async def count_tokens(request: RequestContext, body: ResponsesRequest) -> Response:
    """Return the number of prompt tokens that this request for a response would have."""
    turn = await _turn(request, body)
    turn.release()
    await _open(request, turn)
    calls = partial(to_call, num_stored=turn.num_stored)
    count = await prompt_length(request, turn.body, calls)
    return json_response(InputTokens(count))


@get(
    router,
    _ONE,
    response_object.Response,
    media=EVENTS,
    also=[405],
    stream=bool,
    starting_after=int,
    include=str,
)
async def get_response(request: Request) -> Response:
    """Return a stored response, or stream the events of a background response."""
    found = _found(request)
    query = request.query_params
    check_include(query.getlist("include") + query.getlist("include[]"))
    streams = query.get("stream", "false")
    if streams not in ("true", "false"):
        msg = f"stream must be true or false, got {streams[:80]!r}"
        raise InvalidRequest(msg, param="stream")
    after = query.get("starting_after")
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 10):
        msg = f"starting_after must be the sequence_number of an event, got {after[:80]!r}"
        raise InvalidRequest(msg, param="starting_after")
    if streams == "false":
        if after is not None:
            msg = "starting_after needs stream=true"
            raise InvalidRequest(msg, param="starting_after")
        return sent(found)
    if found.frames is None:
        msg = (
            f"Response {found.id[:80]!r} has no stored events: only a response that was created "
            "with background and stream has them. Read it without stream"
        )
        raise InvalidRequest(msg, param="stream")
    first = 0 if after is None else int(after) + 1
    return stream_of(found, get_state(request).limits.silent_s, first)


@delete(router, _ONE, response_object.DeletedResponse)
async def delete_response(request: Request) -> Response:
    """Delete a stored response; a background response is cancelled first."""
    found = _found(request)
    await _stop(found)
    get_state(request).stored.remove(found)
    return json_response(response_object.DeletedResponse(found.id))


@post_nothing(router, f"{_ONE}/cancel", response_object.Response)
async def cancel_response(request: Request) -> Response:
    """Cancel a background response and return it; a finished one is returned unchanged."""
    found = _found(request)
    if found.work is None:
        msg = (
            f"Response {found.id[:80]!r} was not created with background, so it cannot be "
            "cancelled: close its connection instead"
        )
        raise InvalidRequest(msg, param="response_id")
    await _stop(found)
    return sent(found)


@get(router, f"{_ONE}/input_items", Page, after=str, before=str, limit=int, order=str, include=str)
async def list_input_items(request: Request) -> Response:
    """List the input items that the request of a response sent."""
    items = new_items(_found(request))
    page = page_of(request.query_params, items, lambda item: item.id, lambda item: item.data)
    return json_response(page)


async def _turn(request: RequestContext, body: ResponsesRequest) -> ReferringRequest:
    await request.choose(body.model)
    check_fields(body)
    return await read_turn(request, body)


async def _open(request: RequestContext, turn: ReferringRequest) -> None:
    """Put texts in place of the sealed thoughts that the model reads; stored items stay sealed."""
    read = await with_opened(request, turn.body.input)
    turn.body = msgspec.structs.replace(turn.body, input=read)


def _take_free_id(request: RequestContext) -> None:
    """Assign a new response id if the caller already stores a response with this id."""
    while request.state.stored.find(StoredResponse, request.caller, request.id) is not None:
        request.request_id = uuid.uuid4().hex
        request.id = f"resp_{request.request_id}"


def _found(request: Request) -> StoredResponse:
    """Return the stored response with the id in the path.

    Raises:
      NotFound: the caller has no response with this id.
    """
    response_id = request.path_params["response_id"]
    if response_id in ("input_tokens", "compact"):
        raise HTTPException(405, headers={"Allow": "POST"})
    return find_response(get_state(request).stored, request.scope[CALLER], response_id)


async def _stop(found: StoredResponse) -> None:
    """Cancel the task of a background response, and wait until it has ended."""
    if found.work is not None and not found.work.done():
        found.work.cancel()
        await asyncio.wait((found.work,))
