"""POST /generate and /generate_stream, and the endpoint of `POST /` for models that generate."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Response

from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.route import generate, post
from cpuserve.api.tgi.errors import TGI
from cpuserve.api.tgi.schema import TgiGenerated, TgiGenerateRequest, TgiRequest, tgi_call, words
from cpuserve.api.tgi.writer import TgiListWriter, TgiWriter

router = APIRouter()
_post = partial(
    post,
    router,
    dialect=TGI,
    id_prefix="generate-",
    poolings=("none",),
)


@_post("/generate", schema=TgiGenerateRequest, response=TgiGenerated, words=words)
async def tgi_generate(request: RequestContext, body: TgiGenerateRequest) -> Response:
    """Continue a prompt."""
    return await _generated(request, body, TgiWriter, stream=False)


@_post("/generate_stream", schema=TgiGenerateRequest, response=None, stream=EVENTS, words=words)
async def tgi_stream(request: RequestContext, body: TgiGenerateRequest) -> Response:
    """Continue a prompt, as a stream with an event for each token."""
    return await _generated(request, body, TgiWriter, stream=True)


@_post(schema=TgiRequest, response=list[TgiGenerated], stream=EVENTS, words=words)
async def tgi_inference(request: RequestContext, body: TgiRequest) -> Response:
    """Continue a prompt, as a list with one text or as a stream."""
    return await _generated(request, body, TgiListWriter, stream=bool(body.stream))


async def _generated(
    request: RequestContext,
    body: TgiGenerateRequest,
    writer: type[TgiWriter],
    *,
    stream: bool,
) -> Response:
    return await generate(
        request, body, lambda body: tgi_call(body, request.context, stream=stream), writer
    )
