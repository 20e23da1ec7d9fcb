"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cpuserve.api.openai.checks import take_request_id
from cpuserve.api.openai.completions.schema import Completion, CompletionRequest, to_call, words
from cpuserve.api.openai.completions.writer import CompletionWriter
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.route import generate, post

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
async def create_completion(received: RequestContext, asked: CompletionRequest) -> Response:
    """Continue one or several prompts, or compute their logprobs."""
    take_request_id(received, asked.request_id)
    return await generate(received, asked, to_call, CompletionWriter)
