"""POST /v1/responses, and what says that no response is stored."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, HTTPException, Request, Response

from cpuserve.api.openai.responses import response_object as answer
from cpuserve.api.openai.responses.schema import ResponsesRequest, to_call
from cpuserve.api.openai.responses.writer import ResponseWriter
from cpuserve.api.request.context import read_call
from cpuserve.api.response.openapi import EVENTS, json_body
from cpuserve.api.response.writer import respond
from cpuserve.errors import NotFound
from cpuserve.serving.generate import count_prompt, prepare

router = APIRouter()


@router.post(
    "/v1/responses", openapi_extra=json_body(ResponsesRequest, answer.Response, stream=EVENTS)
)
async def create_response(request: Request) -> Response:
    """Generate the next items of a conversation."""
    async with read_call(request, "resp_", ResponsesRequest, conversation="input") as (
        received,
        asked,
    ):
        model = await received.choose(asked.model)
        generation = await prepare(received.served, to_call(asked), received.body_bytes)
        writer = ResponseWriter(received, asked, generation, model)
    return respond(generation, writer)


@router.post(
    "/v1/responses/input_tokens", openapi_extra=json_body(ResponsesRequest, answer.InputTokens)
)
async def count_tokens(request: Request) -> Response:
    """Return how many tokens the prompt of such a response has."""
    async with read_call(request, "resp_", ResponsesRequest, conversation="input") as (
        received,
        asked,
    ):
        await received.choose(asked.model)
        count = await count_prompt(received.context, to_call(asked), received.body_bytes)
    body = msgspec.json.encode(answer.InputTokens(count))
    return Response(body, media_type="application/json")


@router.get("/v1/responses/{response_id}", include_in_schema=False)
@router.post("/v1/responses/{response_id}", include_in_schema=False)
@router.delete("/v1/responses/{response_id}", include_in_schema=False)
@router.post("/v1/responses/{response_id}/cancel", include_in_schema=False)
@router.get("/v1/responses/{response_id}/input_items", include_in_schema=False)
async def find_response(response_id: str) -> Response:
    """Answer 404, since no response is stored, or as an unknown route where it is no id."""
    if response_id == "compact":
        raise HTTPException(404)
    if response_id == "input_tokens":
        raise HTTPException(405, headers={"Allow": "POST"})
    msg = (
        f"Response {response_id[:80]!r} was not found, because this server stores no responses: "
        "keep what POST /v1/responses answers"
    )
    raise NotFound(msg, param="response_id", code="response_not_found")
