"""POST /v1/messages and /v1/messages/count_tokens.

MessageWriter writes generation events as a message, either as a stream or as one JSON body.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.anthropic.conversation import THOUGHTS
from cpuserve.api.anthropic.diagnostics import diagnostics_of
from cpuserve.api.anthropic.errors import ANTHROPIC, error_frame
from cpuserve.api.anthropic.schema import (
    ContentBlock,
    CountRequest,
    Message,
    MessagesRequest,
    MessageUsage,
    OutputTokensDetails,
    ServerToolUseBlock,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolSearchResultBlock,
    ToolUseBlock,
    to_call,
    words,
)
from cpuserve.api.anthropic.tool_references import SERVER_CALL
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.sealed import is_sealed
from cpuserve.api.request.sealed_texts import opened
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.response.stream import StreamFormat
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import generate, post, prompt_length
from cpuserve.serving.calls.events import (
    Choice,
    Event,
    Finish,
    PromptProgress,
    Text,
    Thought,
    Thoughts,
    TokenUsage,
    ToolCallDelta,
    ToolSearched,
    WholeResponse,
    WholeToolCall,
    json_object,
)
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from cpuserve.serving.generation.generate import Generation

router = APIRouter()


@post(
    router,
    "/v1/messages",
    schema=MessagesRequest,
    response=Message,
    dialect=ANTHROPIC,
    id_prefix="msg_",
    guards=True,
    stream=EVENTS,
    words=words,
)
async def create_message(request: RequestContext, body: MessagesRequest) -> Response:
    """Generate the next message of a conversation."""
    await request.choose(body.model)
    body.messages = await _with_opened(request, body.messages)
    return await generate(request, body, to_call, MessageWriter)


@post(
    router,
    "/v1/messages/count_tokens",
    schema=CountRequest,
    response=TokenCount,
    dialect=ANTHROPIC,
    id_prefix="msg_",
    words=words,
)
async def count_tokens(request: RequestContext, body: CountRequest) -> Response:
    """Return the number of prompt tokens that the messages, system texts and tools make."""
    await request.choose(body.model)
    body.messages = await _with_opened(request, body.messages)
    return json_response(TokenCount(await prompt_length(request, body, to_call)))


async def _with_opened(
    request: RequestContext, messages: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages with the texts of thoughts that this server sealed.

    Clients that request `display` "omitted" get the text of a thought only in its signature.
    For errors, see `opened`.
    """
    found = await run_sized(request.body_bytes, lambda: _sealed(messages))
    texts = await opened(request, found, "messages")
    return [_read(message, texts) for message in messages] if texts else messages


def _sealed(messages: list[dict[str, Any]]) -> list[str]:
    """Return the signatures that have the text of a thought."""
    parts = (block for message in messages for block in _content(message))
    return [block["signature"] for block in parts if _is_sealed(block)]


def _content(message: dict[str, Any]) -> list[Any]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_sealed(block: object) -> bool:
    """Return whether a block is a thought with its text in the signature only."""
    if not isinstance(block, dict) or block.get("type") not in THOUGHTS:
        return False
    return not block.get("thinking") and is_sealed(block.get("signature"))


def _read(message: dict[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    if not any(map(_is_sealed, _content(message))):
        return message
    content = [
        {**block, "thinking": texts.get(block["signature"])} if _is_sealed(block) else block
        for block in message["content"]
    ]
    return {**message, "content": content}


_to_json = msgspec.json.Encoder().encode
_SEARCH_RESULT = "tool_search_tool_result"
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "pause": "pause_turn"}


class MessageWriter:
    """Writes the response to one request as a sequence of content blocks."""

    form = StreamFormat()

    def __init__(
        self, request: RequestContext, body: MessagesRequest, generation: Generation
    ) -> None:
        self._request = request
        self._model = request.served.name
        self._generation = generation
        self._begun = False
        self._num_blocks = 0
        self._open: str | None = None  # the type of the content block that is being written
        self._thought: list[str] = []  # pieces of text of the open block, if it is a thought
        self._shows_thoughts = (body.thinking or {}).get("display") != "omitted"
        self._finish: Finish | None = None
        self._diagnostics = diagnostics_of(body.diagnostics, generation)
        most, (sequence,) = generation.call.max_tokens, generation.sequences
        # Whether the length of the context reduced the max_tokens of the request.
        self._cut = most is not None and (sequence.params.max_tokens or 0) < most

    def frames(self, events: list[Event]) -> bytes:
        """Return the SSE frames for the events of one engine output."""
        out = b""
        if not self._begun:
            self._begun = True
            start = self._message([], None, self._usage_at(events[0]))
            out = _frame("message_start", {"message": start})
        for event in events:
            if isinstance(event, Text):
                if event.text:
                    out += self._text(event.text)
            elif isinstance(event, Thought):
                out += self._think(event.text)
            elif isinstance(event, ToolCallDelta):
                out += self._call(event)
            elif isinstance(event, ToolSearched):
                out += self._searched(event)
            elif isinstance(event, Finish):
                self._finish = event
            elif isinstance(event, PromptProgress):
                out += _frame("ping", {})
            elif isinstance(event, TokenUsage):
                out += self._close() + self._end(event)
        return out

    def _usage_at(self, first: Event) -> TokenUsage:
        """Return the token counts before any output; `first`: the first event of the stream."""
        known = self._generation.usage()
        cached = first.cached if isinstance(first, PromptProgress) else known.cached
        return TokenUsage(known.prompt, 0, cached)

    def failed(self, error: BaseException) -> bytes:
        """Return the frame for an error after the stream has begun."""
        return error_frame(error, self._request.request_id)

    def _text(self, text: str) -> bytes:
        out = b""
        if self._open != "text":
            out = self._start("text", {"type": "text", "text": ""})
        return out + self._delta({"type": "text_delta", "text": text})

    def _think(self, text: str) -> bytes:
        out = b""
        if self._open != "thinking":
            out = self._start("thinking", {"type": "thinking", "thinking": "", "signature": ""})
        self._thought.append(text)
        shown = self._shows_thoughts
        return out + self._delta({"type": "thinking_delta", "thinking": text}) if shown else out

    def _call(self, event: ToolCallDelta) -> bytes:
        out = b""
        if event.id is not None:
            block: dict[str, object] = {"type": "tool_use", "id": event.id, "name": event.name}
            out = self._start("tool_use", {**block, "input": {}})
        return out + self._delta({"type": "input_json_delta", "partial_json": event.arguments})

    def _searched(self, event: ToolSearched) -> bytes:
        """Return the frames of a tool search that this server ran: its call and its result."""
        call, result = _search_blocks(event)
        begun: dict[str, object] = {
            "type": "server_tool_use",
            "id": call.id,
            "name": call.name,
            "input": {},
        }
        out = self._start("server_tool_use", begun)
        written = bytes(call.input).decode()  # {} if the model wrote no JSON object
        out += self._delta({"type": "input_json_delta", "partial_json": written})
        told = {"tool_use_id": result.tool_use_id, "content": result.content}
        out += self._start(_SEARCH_RESULT, {"type": _SEARCH_RESULT, **told})
        return out + self._close()

    def _start(self, kind: str, block: dict[str, object]) -> bytes:
        out = self._close()
        self._open = kind
        self._num_blocks += 1
        body = {"index": self._num_blocks - 1, "content_block": block}
        return out + _frame("content_block_start", body)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _frame("content_block_delta", {"index": self._num_blocks - 1, "delta": delta})

    def _close(self) -> bytes:
        out = b""
        if self._open is None:
            return out
        if self._open == "thinking":
            signature = self._request.state.seal.sealed("".join(self._thought))
            out = self._delta({"type": "signature_delta", "signature": signature})
            self._thought.clear()
        self._open = None
        return out + _frame("content_block_stop", {"index": self._num_blocks - 1})

    def _end(self, usage: TokenUsage) -> bytes:
        reason, sequence = self._stop(self._finish)
        body = {"delta": {"stop_reason": reason, "stop_sequence": sequence}, "usage": _usage(usage)}
        return _frame("message_delta", body) + _frame("message_stop", {})

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as the JSON of a Message."""
        (choice,) = response.choices
        finish = Finish(0, choice.reason or "stop", choice.stop_reason)
        return _to_json(self._message(self._content(choice), finish, response.usage))

    def _message(
        self, content: list[ContentBlock], finish: Finish | None, usage: TokenUsage
    ) -> Message:
        reason, sequence = (None, None) if finish is None else self._stop(finish)
        counts = _usage(usage)
        return Message(
            self._request.id,
            "message",
            "assistant",
            self._model,
            content,
            reason,
            sequence,
            counts,
            self._diagnostics,
        )

    def _content(self, choice: Choice) -> list[ContentBlock]:
        blocks: list[ContentBlock] = []
        for part in choice.parts:
            if isinstance(part, ToolSearched):
                blocks += _search_blocks(part)
            else:
                blocks.append(self._block(part))
        return blocks

    def _block(self, part: str | Thoughts | WholeToolCall) -> ContentBlock:
        if isinstance(part, str):
            return TextBlock(part)
        if isinstance(part, WholeToolCall):
            return ToolUseBlock(part.id, part.name, json_object("".join(part.arguments)))
        thought = "".join(part.text)
        signature = self._request.state.seal.sealed(thought)
        return ThinkingBlock(thought if self._shows_thoughts else "", signature)

    def _stop(self, finish: Finish | None) -> tuple[str, str | None]:
        """Return (stop_reason, stop_sequence) of the message."""
        if finish is None:
            return "end_turn", None
        if finish.reason == "stop" and isinstance(finish.stop_reason, str):
            return "stop_sequence", finish.stop_reason
        if finish.reason == "length" and self._cut:
            return "model_context_window_exceeded", None
        return _REASONS.get(finish.reason, "end_turn"), None


def _search_blocks(event: ToolSearched) -> tuple[ServerToolUseBlock, ToolSearchResultBlock]:
    number = f"{SERVER_CALL}{event.id}"
    content: dict[str, Any]
    if event.error:
        content = {
            "type": "tool_search_tool_result_error",
            "error_code": "invalid_tool_input",
            "error_message": event.error,
        }
    else:
        found = [{"type": "tool_reference", "tool_name": name} for name in event.found]
        content = {"type": "tool_search_tool_search_result", "tool_references": found}
    call = ServerToolUseBlock(number, event.name, json_object(event.arguments))
    return call, ToolSearchResultBlock(number, content)


def _frame(kind: str, body: dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _to_json({"type": kind, **body}))


def _usage(usage: TokenUsage) -> MessageUsage:
    details = OutputTokensDetails(usage.reasoning) if usage.reasoning else msgspec.UNSET
    return MessageUsage(usage.prompt - usage.cached, 0, usage.cached, usage.completion, details)
