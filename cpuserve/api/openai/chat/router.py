"""The routes of chat completions: one or several conversations, their length, and the prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response

from cpuserve.api.openai.chat.conversation import chat_messages, continues
from cpuserve.api.openai.chat.schema import (
    ChatCompletion,
    ChatFields,
    ChatMessage,
    ChatRenderRequest,
    ChatRequest,
    to_call,
    words,
)
from cpuserve.api.openai.chat.writer import ChatWriter, echoed
from cpuserve.api.openai.checks import take_request_id
from cpuserve.api.openai.render import TokenizedPrompt, refuse_offsets, rendered
from cpuserve.api.openai.schema import InputTokens
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.fields import is_set, with_refused
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import generate, post, prepared, prompt_length
from cpuserve.errors import InvalidRequest
from cpuserve.serving.calls.call import MAX_PROMPTS, GenerateCall, unsupported

if TYPE_CHECKING:
    from cpuserve.serving.calls.events import Choice
    from cpuserve.serving.generation.generate import Generation

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


# Fields that a request with several conversations cannot have.
_OF_ONE = (
    *("stream", "tools", "use_beam_search", "prompt_logprobs", "return_prompt_text"),
    "return_progress",
)


@with_refused("chat")
class BatchChatRequest(ChatFields, kw_only=True):
    """The body of POST /v1/chat/completions/batch: `messages` is a list of conversations."""

    messages: list[list[dict[str, Any]]]


def batch_call(request: BatchChatRequest) -> GenerateCall:
    """Return a GenerateCall with a prompt for each conversation; for errors, see `to_call`."""
    if not 0 < len(request.messages) <= MAX_PROMPTS:
        msg = f"messages has {len(request.messages)} conversations: send 1 to {MAX_PROMPTS}"
        raise InvalidRequest(msg, param="messages")
    for name in _OF_ONE:
        value = getattr(request, name)
        if is_set(value) or (name == "prompt_logprobs" and value is not None):
            msg = f"{name} is not possible with several conversations: omit it"
            raise unsupported(msg, name)
    if request.n not in (None, 1):
        msg = "n must be 1, because each conversation has one response: omit it"
        raise InvalidRequest(msg, param="n")
    goes_on = {continues(each, request.continue_final_message) for each in request.messages}
    if len(goes_on) > 1:
        msg = "prefix must be true in the last message of every conversation, or of none"
        raise InvalidRequest(msg, param="messages")
    (request.continue_final_message,) = goes_on
    call = to_call(_first(request))
    others = [chat_messages(messages) for messages in request.messages[1:]]
    call.conversations = [call.messages or [], *others]
    return call


def _first(request: BatchChatRequest) -> ChatRequest:
    """Return a ChatRequest for the first conversation, with the other fields of `request`."""
    names = [name for name in ChatRequest.__struct_fields__ if name != "messages"]
    shared = {name: getattr(request, name) for name in names}
    return ChatRequest(messages=request.messages[0], **shared)


class BatchChatWriter(ChatWriter):
    """Writes a response with one choice for each conversation."""

    def __init__(
        self, request: RequestContext, body: BatchChatRequest, generation: Generation
    ) -> None:
        super().__init__(request, _first(body), generation)
        self._ids_of_prompt = False
        self._begun = [echoed(body, messages) for messages in body.messages]

    def _message(self, choice: Choice) -> ChatMessage:
        self._role, self._echoed = self._begun[choice.index]
        return super()._message(choice)


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
