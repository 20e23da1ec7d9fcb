"""The routes of chat completions: one or several conversations, their length, and the prompt.

ChatWriter writes generation events as chunks of a stream or as one JSON body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.openai.chat import schema
from cpuserve.api.openai.chat.conversation import chat_messages, continues
from cpuserve.api.openai.chat.schema import (
    ChatChoice,
    ChatCompletion,
    ChatFields,
    ChatMessage,
    ChatRenderRequest,
    ChatRequest,
    to_call,
    words,
)
from cpuserve.api.openai.checks import take_request_id
from cpuserve.api.openai.chunks import FORM, ChunkFormat, error_chunk, progress_member, to_json
from cpuserve.api.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from cpuserve.api.openai.render import TokenizedPrompt, prompt_text, refuse_offsets, rendered
from cpuserve.api.openai.schema import InputTokens
from cpuserve.api.openai.timings import timings_member, timings_of
from cpuserve.api.openai.usage import usage_body
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.fields import is_set, with_refused
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import generate, post, prepared, prompt_length
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import MAX_PROMPTS, GenerateCall, unsupported
from cpuserve.serving.calls.events import (
    Choice,
    Event,
    Finish,
    PromptProgress,
    PromptScores,
    Text,
    Thought,
    ThoughtGaps,
    TokenUsage,
    ToolCallDelta,
    WholeResponse,
    WholeToolCall,
)
from cpuserve.tokenizer.conversation import text_of
from cpuserve.tokenizer.messages import message_content

if TYPE_CHECKING:
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


_NO_LOGPROBS = b',"logprobs":null,"finish_reason":null'
_NOTHING = b',"delta":{}' + _NO_LOGPROBS


class ChatWriter:
    """Writes the response to one chat completion request."""

    form = FORM

    def __init__(self, request: RequestContext, body: ChatRequest, generation: Generation) -> None:
        first = generation.sequences[0]
        self._request = request
        self._model = request.served.name
        self._ids = self._ids_of_prompt = bool(body.return_token_ids)
        self._role, self._echoed = echoed(body, body.messages)
        self._top = first.params.num_top
        self._prompt_top = first.params.prompt_logprobs
        self._prompt_ids = first.prompt.ids
        options = body.stream_options
        self._chunks = ChunkFormat.of(request, "chat.completion.chunk", options)
        self._names = TokenNames(
            request.context.get_tokenizer(),
            as_ids=bool(body.return_tokens_as_token_ids),
            skip_special_tokens=first.params.skip_special_tokens,
        )
        self._started = [False] * len(generation.sequences)
        self._gaps = [ThoughtGaps() for _ in generation.sequences]
        self._timed = generation if body.timings_per_token else None
        self._prompt_text: str | None = None
        if body.return_prompt_text:
            self._prompt_text = prompt_text(request, generation)

    def frames(self, events: list[Event]) -> bytes:
        """Return the chunks for the events of one engine output; b"" if they show nothing yet."""
        first, last = events[0], events[-1]
        if isinstance(first, TokenUsage):
            return self._chunks.usage_chunk(first)
        index, usage = first.index, last if isinstance(last, TokenUsage) else None
        out = b""
        if not (self._started[index] or isinstance(first, PromptProgress)):
            self._started[index] = True
            first_delta = {"role": self._role, "content": self._echoed}
            members = b',"delta":%b%b' % (to_json(first_delta), _NO_LOGPROBS)
            out = self._chunks.chunk(index, members, usage, self._of_prompt(first))
        for event in events:
            gap = self._gaps[index].before(event)
            if isinstance(event, Text):
                if event.text or (event.token_ids and (self._top is not None or self._ids)):
                    more = timings_member(self._timed)
                    out += self._chunks.chunk(index, self._text(event), usage, more)
            elif isinstance(event, Thought):
                more = timings_member(self._timed)
                out += self._chunks.chunk(index, _thought_part(gap + event.text), usage, more)
            elif isinstance(event, ToolCallDelta):
                more = timings_member(self._timed)
                out += self._chunks.chunk(index, _call_part(event), usage, more)
            elif isinstance(event, Finish):
                members = b',"delta":{},"logprobs":null,"finish_reason":%b,"stop_reason":%b' % (
                    to_json(event.reason),
                    to_json(event.stop_reason),
                )
                out += self._chunks.chunk(index, members, usage, timings_member(self._timed))
            elif isinstance(event, PromptProgress):
                out += self._chunks.chunk(index, _NOTHING, usage, progress_member(event))
        return out

    def _of_prompt(self, event: Event) -> bytes:
        """Return the JSON members about the prompt, which only the first chunk has."""
        more = b""
        if self._ids:
            more += b',"prompt_token_ids":' + to_json(self._prompt_ids)
        if self._prompt_text is not None:
            more += b',"prompt_text":' + to_json(self._prompt_text)
        if isinstance(event, PromptScores) and self._prompt_top is not None:
            rows = prompt_logprobs(event.scores, self._prompt_top, self._names)
            more += b',"prompt_logprobs":' + to_json(rows)
        return more

    def _text(self, event: Text) -> bytes:
        logprobs, ids = b"null", b""
        if self._top is not None:
            logprobs = to_json(chat_logprobs(event.logprobs or [], self._top, self._names))
        if self._ids:
            ids = b',"token_ids":' + to_json(event.token_ids)
        return b',"delta":{"content":%b},"logprobs":%b,"finish_reason":null%b' % (
            to_json(event.text),
            logprobs,
            ids,
        )

    def failed(self, error: BaseException) -> bytes:
        """Return the SSE event for an error after the stream has begun."""
        return error_chunk(error)

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole ChatCompletion as JSON."""
        request = self._request
        return msgspec.json.encode(
            ChatCompletion(
                request.id,
                "chat.completion",
                request.created,
                self._model,
                request.context.fingerprint,
                [self._choice(choice) for choice in response.choices],
                usage_body(response.usage),
                prompt_logprobs(response.choices[0].scores, self._prompt_top, self._names),
                self._prompt_ids if self._ids_of_prompt else msgspec.UNSET,
                msgspec.UNSET if self._prompt_text is None else self._prompt_text,
                msgspec.UNSET if self._timed is None else timings_of(self._timed),
            )
        )

    def _message(self, choice: Choice) -> ChatMessage:
        text, thought = self._echoed + "".join(choice.text), choice.reasoning or msgspec.UNSET
        calls = [_whole_call(call) for call in choice.calls]
        content = (text or None) if calls else text
        return ChatMessage(self._role, content, None, calls or msgspec.UNSET, thought, thought)

    def _choice(self, choice: Choice) -> ChatChoice:
        logprobs = None
        if self._top is not None:
            logprobs = chat_logprobs(choice.logprobs, self._top, self._names)
        return ChatChoice(
            choice.index,
            self._message(choice),
            logprobs,
            choice.reason,
            choice.stop_reason,
            choice.token_ids if self._ids else msgspec.UNSET,
        )


def _thought_part(piece: str) -> bytes:
    """Return the members of a chunk with a piece of a thought, in both fields that clients read."""
    text = to_json(piece)
    return (
        b',"delta":{"reasoning_content":%b,"reasoning":%b},"logprobs":null,"finish_reason":null'
        % (text, text)
    )


def _call_part(event: ToolCallDelta) -> bytes:
    """Return the members of a chunk with a piece of a call; only the first has its id and name."""
    kind, member = ("custom", "input") if event.custom else ("function", "arguments")
    called: dict[str, object] = {member: event.arguments}
    part: dict[str, object] = {"index": event.call, kind: called}
    if event.id is not None:
        called = {"name": event.name, member: event.arguments}
        part = {"index": event.call, "id": event.id, "type": kind, kind: called}
    return b',"delta":{"tool_calls":[%b]},"logprobs":null,"finish_reason":null' % to_json(part)


def _whole_call(call: WholeToolCall) -> schema.ToolCall:
    written = "".join(call.arguments)
    if call.custom:
        return schema.ToolCall(call.id, "custom", custom=schema.CustomInput(call.name, written))
    return schema.ToolCall(call.id, "function", schema.FunctionCall(call.name, written))


def echoed(body: ChatFields, messages: list[dict[str, Any]]) -> tuple[str, str]:
    """Return (role of the response, text of the last message if `echo` repeats it, else "").

    As in vLLM, the last message is echoed if it has the role of the response. A response
    that continues the last message, or gets no generation prompt, has the role of that message.
    """
    role = "assistant"
    if not (body.echo and messages):
        return role, ""
    last = messages[-1]
    if body.continue_final_message or body.add_generation_prompt is False:
        role = last["role"]
    if last["role"] != role:
        return role, ""
    return role, text_of(message_content(last, f"messages[{len(messages) - 1}]"))


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
