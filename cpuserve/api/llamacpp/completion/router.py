"""POST /completion."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Response

from cpuserve.api.llamacpp.completion.prompts import flat_prompts
from cpuserve.api.llamacpp.completion.schema import (
    COMPLETIONS,
    LlamaCompletionRequest,
    to_call,
    words,
)
from cpuserve.api.llamacpp.completion.writer import LlamaCompletionWriter
from cpuserve.api.llamacpp.errors import LLAMACPP
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.route import generate, post

router = APIRouter()


@post(
    router,
    "/completion",
    "/completions",
    schema=LlamaCompletionRequest,
    response=COMPLETIONS,
    dialect=LLAMACPP,
    id_prefix="completion-",
    stream=EVENTS,
    words=words,
)
async def llama_completion(request: RequestContext, body: LlamaCompletionRequest) -> Response:
    """Continue one or several prompts, in the format of llama-server."""
    await request.choose(body.model)
    prompts = await flat_prompts(request.context, body.prompt)
    call = partial(to_call, request.context, prompts)
    return await generate(request, body, call, LlamaCompletionWriter)
