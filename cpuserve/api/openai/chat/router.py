"""Chat completions for one or several conversations, and a route that only renders the prompt."""

from __future__ import annotations

from fastapi import APIRouter, Response

from cpuserve.api.openai.chat.batch import BatchChatRequest, BatchChatWriter, batch_call
from cpuserve.api.openai.chat.schema import (
    ChatCompletion,
    ChatRenderRequest,
    ChatRequest,
    to_call,
    words,
)
from cpuserve.api.openai.chat.writer import ChatWriter
from cpuserve.api.openai.checks import take_request_id
from cpuserve.api.openai.render import TokenizedPrompt, refuse_offsets, rendered
from cpuserve.api.openai.schema import InputTokens
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import generate, post, prepared, prompt_length

router = APIRouter()


@post(
    router,
    "/v1/chat/completions",
    "/chat/completions",
    schema=ChatRequest,
    response=ChatCompletion,
    id_prefix="chatcmpl-",
    stream=EVENTS,
    words=words,
)
async def create_chat_completion(request: RequestContext, body: ChatRequest) -> Response:
    """Generate the next message of a conversation."""
    take_request_id(request, body.request_id)
    return await generate(request, body, to_call, ChatWriter)


@post(
    router,
    "/v1/chat/completions/input_tokens",
    "/chat/completions/input_tokens",
    schema=ChatRequest,
    response=InputTokens,
    id_prefix="chatcmpl-",
    words=words,
)
async def count_chat_tokens(request: RequestContext, body: ChatRequest) -> Response:
    """Return the number of prompt tokens that a conversation would have."""
    return json_response(InputTokens(await prompt_length(request, body, to_call)))


@post(
    router,
    "/v1/chat/completions/batch",
    schema=BatchChatRequest,
    response=ChatCompletion,
    id_prefix="chatcmpl-",
    words=words,
)
async def create_chat_completions(request: RequestContext, body: BatchChatRequest) -> Response:
    """Generate the next message of each of several conversations, as one choice each."""
    take_request_id(request, body.request_id)
    return await generate(request, body, batch_call, BatchChatWriter)


@post(
    router,
    "/v1/chat/completions/render",
    schema=ChatRenderRequest,
    response=TokenizedPrompt,
    id_prefix="chatcmpl-",
    words=words,
)
async def render_chat_completion(request: RequestContext, body: ChatRenderRequest) -> Response:
    """Return the token ids of a conversation's prompt, without generating a response."""
    take_request_id(request, body.request_id)
    refuse_offsets(body)
    generation = await prepared(request, body, to_call)
    (prompt,) = rendered(request, generation, with_text=bool(body.return_prompt_text))
    return json_response(prompt)
