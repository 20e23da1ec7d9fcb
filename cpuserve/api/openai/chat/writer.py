"""Write generation events of a chat completion, as chunks of a stream or as one JSON body."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.openai.chat import schema
from cpuserve.api.openai.chat.schema import ChatChoice, ChatCompletion, ChatMessage
from cpuserve.api.openai.chunks import FORM, ChunkFormat, error_chunk, progress_member, to_json
from cpuserve.api.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from cpuserve.api.openai.render import prompt_text
from cpuserve.api.openai.timings import timings_member, timings_of
from cpuserve.api.openai.usage import usage_body
from cpuserve.serving.calls.events import (
    Choice,
    Event,
    Finish,
    PromptProgress,
    PromptScores,
    Text,
    Thought,
    TokenUsage,
    ToolCallDelta,
    WholeResponse,
    WholeToolCall,
)
from cpuserve.tokenizer.conversation import text_of
from cpuserve.tokenizer.messages import message_content

if TYPE_CHECKING:
    from cpuserve.api.openai.chat.schema import ChatFields, ChatRequest
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.generation.generate import Generation

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
            if isinstance(event, Text):
                if event.text or (event.token_ids and (self._top is not None or self._ids)):
                    more = timings_member(self._timed)
                    out += self._chunks.chunk(index, self._text(event), usage, more)
            elif isinstance(event, Thought):
                more = timings_member(self._timed)
                out += self._chunks.chunk(index, _thought_part(event), usage, more)
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


def _thought_part(event: Thought) -> bytes:
    """Return the members of a chunk with a piece of a thought, in both fields that clients read."""
    text = to_json(event.text)
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
