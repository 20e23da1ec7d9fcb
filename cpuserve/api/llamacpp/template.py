"""POST /apply-template: return the prompt that the chat template makes from messages."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.llamacpp.errors import LLAMACPP
from cpuserve.api.openai.chat.schema import ChatRequest, to_call, words
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.fields import check_fields
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import post
from cpuserve.serving.generation.generate import read_prompts
from cpuserve.serving.threads import run_sized

router = APIRouter()


class RenderedPrompt(msgspec.Struct):
    """The response to POST /apply-template."""

    prompt: str


@post(
    router,
    "/apply-template",
    schema=ChatRequest,
    response=RenderedPrompt,
    dialect=LLAMACPP,
    id_prefix="template-",
    words=words,
)
async def apply_template(request: RequestContext, body: ChatRequest) -> Response:
    """Return the prompt that a chat completion would have, without generating a response.

    Clients send the prompt to /completion, which reads control texts as tokens.
    Those that stand in messages therefore get an invisible character (U+2060).
    """
    await request.choose(body.model)
    check_fields(body)
    _, prompts = await read_prompts(request.context, to_call(body), request.body_bytes)
    text = (prompts[0].rendered or "") + prompts[0].opening
    masks = request.context.get_tokenizer().masks
    shown = await run_sized(len(text), lambda: masks.broken(text))
    return json_response(RenderedPrompt(shown))
