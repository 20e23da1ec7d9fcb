"""POST /v1/completions, and POST /v1/completions/render, which only tokenizes the prompts."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cpuserve.api.openai.checks import take_request_id
from cpuserve.api.openai.completions.schema import (
    Completion,
    CompletionRenderRequest,
    CompletionRequest,
    to_call,
    words,
)
from cpuserve.api.openai.completions.writer import CompletionWriter
from cpuserve.api.openai.render import TokenizedPrompt, refuse_offsets, rendered
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import generate, post, prepared

router = APIRouter()


@post(
    router,
    "/v1/completions",
    schema=CompletionRequest,
    response=Completion,
    id_prefix="cmpl-",
    stream=EVENTS,
    words=words,
)
async def create_completion(request: RequestContext, body: CompletionRequest) -> Response:
    """Continue one or several prompts, or compute their logprobs."""
    take_request_id(request, body.request_id)
    return await generate(request, body, to_call, CompletionWriter)


@post(
    router,
    "/v1/completions/render",
    schema=CompletionRenderRequest,
    response=list[TokenizedPrompt],
    id_prefix="cmpl-",
    words=words,
)
async def render_completion(request: RequestContext, body: CompletionRenderRequest) -> Response:
    """Return the token ids of each prompt, without generating a response."""
    take_request_id(request, body.request_id)
    refuse_offsets(body)
    return json_response(rendered(request, await prepared(request, body, to_call)))
