"""POST /v1/responses, and the routes that count, compact, read, cancel and delete responses."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response

from cpuserve.api.openai.responses import response_object
from cpuserve.api.openai.responses.foreign_items import COMPACTED
from cpuserve.api.openai.responses.history import ReferringRequest, decoded, new_items, read_turn
from cpuserve.api.openai.responses.recording import respond_recorded, sent, stream_of
from cpuserve.api.openai.responses.response_object import PREFIX, ResponseUsage
from cpuserve.api.openai.responses.schema import ResponsesRequest, check_include, to_call, words
from cpuserve.api.openai.responses.stored_response import StoredResponse, find_response
from cpuserve.api.openai.responses.writer import usage_of
from cpuserve.api.openai.schema import InputTokens
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.fields import check_fields
from cpuserve.api.request.headers import CALLER
from cpuserve.api.request.sealed import is_sealed
from cpuserve.api.request.sealed_texts import opened
from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.response.stream import JsonResult
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import delete, get, post, post_nothing, prepared, prompt_length
from cpuserve.api.stored.page import Page, page_of
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.generation.report import report_of
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from collections.abc import Mapping

router = APIRouter()
_ONE = "/v1/responses/{response_id}"


@post(
    router,
    "/v1/responses",
    "/responses",
    schema=ResponsesRequest,
    response=response_object.Response,
    id_prefix=PREFIX,
    guards=True,
    stream=EVENTS,
    conversation="input",
    also=[409],
    words=words,
)
async def create_response(request: RequestContext, body: ResponsesRequest) -> Response:
    """Generate the next output items of a conversation."""
    turn = await _turn(request, body)
    await _open(request, turn)
    calls = partial(to_call, num_stored=turn.num_stored)
    generation = await prepared(request, turn.body, calls)
    return respond_recorded(request, turn, generation)


@post(
    router,
    "/v1/responses/input_tokens",
    "/responses/input_tokens",
    schema=ResponsesRequest,
    response=InputTokens,
    id_prefix=PREFIX,
    conversation="input",
    also=[409],
    words=words,
)
async def count_tokens(request: RequestContext, body: ResponsesRequest) -> Response:
    """Return the number of prompt tokens that this request for a response would have."""
    turn = await _turn(request, body)
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
    if found.task is None:
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


def _found(request: Request) -> StoredResponse:
    """Return the stored response with the id in the path.

    Raises:
      NotFound: the caller has no response with this id.
    """
    response_id = request.path_params["response_id"]
    if response_id in ("input_tokens", "compact"):
        raise HTTPException(405, headers={"Allow": "POST"})
    return find_response(get_state(request).stored, request.scope[CALLER].name, response_id)


async def _stop(generation: StoredResponse) -> None:
    """Cancel the task of a background response, and wait until it has ended."""
    if generation.task is not None and not generation.task.done():
        generation.task.cancel()
        await asyncio.wait((generation.task,))


# A user message at the end of the conversation, which asks the model for the summary.
_ASK = (
    "Summarize our conversation so far, for an assistant that continues it and cannot see it. "
    "Include the goals of the user, decisions, facts, names, results of tools, and what is still "
    "to be done. Write only the summary."
)
# The beginning of the summary text, for the model that continues the conversation.
_TOLD = "Summary of the conversation so far:\n"


class CompactRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/responses/compact."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    max_output_tokens: int | None = None


class CompactedItem(msgspec.Struct, tag_field="type", tag="compaction"):
    """The summary of a conversation; `encrypted_content` has its text in sealed form."""

    id: str
    encrypted_content: str


class CompactedResponse(msgspec.Struct):
    """The response of /v1/responses/compact. output: items to send as the next `input`."""

    id: str
    created_at: int
    output: list[Any]
    usage: ResponseUsage
    object: str = "response.compaction"


def _as_response(body: CompactRequest) -> ResponsesRequest:
    """Return the request that generates the summary, without the items of the history."""
    return ResponsesRequest(
        model=body.model,
        input=body.input if body.input is not None or not body.previous_response_id else [],
        instructions=body.instructions,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        max_output_tokens=body.max_output_tokens,
        include_reasoning=False,
        store=False,
    )


@post(
    router,
    "/v1/responses/compact",
    schema=CompactRequest,
    response=CompactedResponse,
    id_prefix=PREFIX,
    guards=True,
    conversation="input",
    words=lambda body: words(_as_response(body)),
)
async def compact_response(request: RequestContext, body: CompactRequest) -> Response:
    """Return a shorter conversation: the user messages, and a summary of everything."""
    await request.choose(body.model)
    turn = await read_turn(request, _as_response(body))
    items = await run_sized(request.body_bytes, lambda: decoded(turn.history + turn.own))
    if not items:
        msg = "input is missing: send the items of the conversation, or previous_response_id"
        raise InvalidRequest(msg, param="input", code="missing_required_parameter")
    ask = {"type": "message", "role": "user", "content": _ASK}
    told = await with_opened(request, [*items, ask])
    whole = msgspec.structs.replace(turn.body, input=told)
    generation = await prepared(request, whole, to_call)

    async def compacted() -> bytes:
        response = await generation.folded()
        (choice,) = response.choices
        summary = "".join(part for part in choice.parts if isinstance(part, str)).strip()
        sealed = request.state.seal.sealed(_TOLD + summary)
        made = CompactedItem(f"cmp_{request.id.removeprefix(PREFIX)}", sealed)
        kept = [item for item in items if item.get("role") == "user"]
        usage = usage_of(response.usage)
        return msgspec.json.encode(
            CompactedResponse(request.id, request.created, [*kept, made], usage)
        )

    return JsonResult(compacted, partial(report_of, generation))


_SEALED = "encrypted_content"


async def with_opened(
    request: RequestContext, items: str | list[dict[str, Any]] | None
) -> str | list[dict[str, Any]] | None:
    """Return the items with the texts that this server sealed in them; for errors, see `opened`."""
    if not isinstance(items, list):
        return items
    found = await run_sized(len(items), lambda: [i[_SEALED] for i in items if _has_sealed(i)])
    texts = await opened(request, found, "input")
    return [_read(item, texts) if _has_sealed(item) else item for item in items] if texts else items


def _has_sealed(item: dict[str, Any]) -> bool:
    kind = item.get("type")
    known = kind == "reasoning" or (isinstance(kind, str) and kind in COMPACTED)
    return known and is_sealed(item.get(_SEALED))


def _read(item: dict[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    text = texts.get(item[_SEALED])
    if text is None:
        return item
    if item["type"] == "reasoning":
        return {**item, "content": [{"type": "reasoning_text", "text": text}]}
    return {**item, "summary": text}
