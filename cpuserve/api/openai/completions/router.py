"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from cpuserve.api.openai.completions.schema import Completion, CompletionRequest, to_call
from cpuserve.api.openai.completions.writer import CompletionWriter
from cpuserve.api.request.context import read_call
from cpuserve.api.response.openapi import EVENTS, json_body
from cpuserve.api.response.writer import respond
from cpuserve.serving.generate import prepare

router = APIRouter()


@router.post(
    "/v1/completions", openapi_extra=json_body(CompletionRequest, Completion, stream=EVENTS)
)
async def create_completion(request: Request) -> Response:
    """Continue one or several prompts, or compute their logprobs."""
    async with read_call(request, "cmpl-", CompletionRequest) as (received, asked):
        model = await received.choose(asked.model)
        generation = await prepare(received.served, to_call(asked), received.body_bytes)
        writer = CompletionWriter(received, asked, generation, model)
    return respond(generation, writer)
