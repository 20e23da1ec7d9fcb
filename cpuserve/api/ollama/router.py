"""POST /api/chat and /api/generate.

OllamaWriter writes generation events in the Ollama format, as lines of JSON or as one body.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api import route
from cpuserve.api.ollama.common import check_text, keep_alive_s, nanoseconds, to_json
from cpuserve.api.ollama.errors import OLLAMA, ollama_error
from cpuserve.api.ollama.schema import (
    OllamaAnswer,
    OllamaChat,
    OllamaGenerate,
    OllamaMessage,
    OllamaRequest,
    chat_call,
    generate_call,
    words,
)
from cpuserve.api.openai.logprobs import TokenNames, chat_logprobs
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.listed import timestamp
from cpuserve.api.response.openapi import LINES
from cpuserve.api.response.stream import StreamFormat
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import post
from cpuserve.serving.calls.events import (
    Event,
    Finish,
    Text,
    Thought,
    ThoughtGaps,
    TokenUsage,
    ToolCallDelta,
    WholeResponse,
    WholeToolCall,
    json_object,
)

if TYPE_CHECKING:
    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.serving.calls.call import GenerateCall
    from cpuserve.serving.generation.generate import Generation

router = APIRouter()
T = TypeVar("T", bound=OllamaRequest)


@post(
    router,
    "/api/chat",
    schema=OllamaChat,
    response=OllamaAnswer,
    dialect=OLLAMA,
    id_prefix="ollama-",
    stream=LINES,
    words=words,
)
async def chat(request: RequestContext, body: OllamaChat) -> Response:
    """Generate the next message of a conversation."""
    if not body.asks:
        check_text(body, "/api/chat", "messages")
    return await _respond(request, body, chat_call, chat=True)


@post(
    router,
    "/api/generate",
    schema=OllamaGenerate,
    response=OllamaAnswer,
    dialect=OLLAMA,
    id_prefix="ollama-",
    stream=LINES,
    words=words,
)
async def generate(request: RequestContext, body: OllamaGenerate) -> Response:
    """Generate the response to a prompt."""
    if not body.asks:
        check_text(body, "/api/generate", "prompt")
    return await _respond(request, body, partial(generate_call, request), chat=False)


async def _respond(
    request: RequestContext, body: T, to_call: Callable[[T], GenerateCall], *, chat: bool
) -> Response:
    """Return the response; without text, load the model, or unload it if keep_alive is 0."""
    seconds = keep_alive_s(body.keep_alive)
    if body.asks:

        def call(body: T) -> GenerateCall:
            request.keep_loaded(seconds)
            return to_call(body)

        return await route.generate(request, body, call, partial(OllamaWriter, chat=chat))
    if seconds == 0:
        # Unload the model if it is loaded, without loading it first.
        request.note_model(body.model)
        name, reason = request.models.resolve(body.model), "unload"
        await request.models.unload(name)
    else:
        name, reason = await request.choose(body.model), "load"
        request.keep_loaded(seconds)
    return json_response(part_of(name, "", chat=chat, done=True, done_reason=reason))


def part_of(
    model: str,
    text: str,
    calls: list[dict[str, Any]] | None = None,
    *,
    chat: bool,
    thought: str = "",
    **more: Any,
) -> OllamaAnswer:
    """Return a chunk of a response; `more`: further members, such as the final token counts."""
    part = OllamaAnswer(model=model, created_at=timestamp(time.time()), **more)
    thinking = thought or msgspec.UNSET
    if chat:
        part.message = OllamaMessage("assistant", text, thinking, calls or msgspec.UNSET)
    else:
        part.response, part.thinking = text, thinking
    return part


class OllamaWriter:
    """Writes the response to one request: lines of JSON if streamed, otherwise one JSON body."""

    def __init__(
        self,
        request: RequestContext,
        body: OllamaRequest,
        generation: Generation,
        *,
        chat: bool,
    ) -> None:
        """chat: whether the request is for /api/chat.

        Responses of /api/generate without `raw` have their token ids in the member `context`,
        except for prompts with media, which token ids do not have.
        """
        self._gives_ids = not chat and not getattr(body, "raw", False)
        self._part = partial(part_of, request.served.name, chat=chat)
        self._sequences = generation.sequences
        self._generation = generation
        self._names: TokenNames | None = None
        self._call: WholeToolCall | None = None  # the tool call that is being generated
        self._num_calls = 0
        self._gaps = ThoughtGaps()
        self._reason = "stop"
        self.form = StreamFormat(b"application/x-ndjson", self._line(self._part("")))

    def frames(self, events: list[Event]) -> bytes:
        """Return the JSON lines for the events of one engine output."""
        out = b""
        for event in events:
            gap = self._gaps.before(event)
            if isinstance(event, Text):
                logprobs = self._logprobs(event.logprobs)
                if event.text or "logprobs" in logprobs:
                    out += self._line(self._part(event.text, **logprobs))
            elif isinstance(event, Thought):
                out += self._line(self._part("", thought=gap + event.text))
            elif isinstance(event, ToolCallDelta):
                if event.id is not None:
                    out += self._end_call()
                    self._call = WholeToolCall(event.id, event.name or "")
                if self._call is not None:
                    self._call.arguments.append(event.arguments)
            elif isinstance(event, Finish):
                out += self._end_call()
                self._reason = event.reason
            elif isinstance(event, TokenUsage):
                out += self._line(self._part("", **self._end(event)))
        return out

    def _end_call(self) -> bytes:
        """Return the line of a finished tool call, if any; Ollama never streams parts of calls."""
        call, self._call = self._call, None
        if call is None:
            return b""
        self._num_calls += 1
        return self._line(self._part("", [_call_body(call, self._num_calls - 1)]))

    def failed(self, error: BaseException) -> bytes:
        """Return the JSON line for an error after the stream has begun."""
        return ollama_error(error) + b"\n"

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        (choice,) = response.choices
        self._reason = choice.reason or "stop"
        calls = [_call_body(call, number) for number, call in enumerate(choice.calls)]
        told = {**self._logprobs(choice.logprobs), **self._end(response.usage)}
        thought = choice.reasoning
        return to_json(self._part("".join(choice.text), calls, thought=thought, **told))

    def _logprobs(self, entries: list[TokenLogprob] | None) -> dict[str, Any]:
        """Return the member `logprobs` of a response; {} if no logprobs were requested."""
        if not entries:
            return {}
        if self._names is None:
            tokenizer = self._generation.context.get_tokenizer()
            self._names = TokenNames(tokenizer, as_ids=False, skip_special_tokens=True)
        top = self._sequences[0].params.logprobs or 0
        return {"logprobs": chat_logprobs(entries, top, self._names).content}

    def _line(self, part: OllamaAnswer) -> bytes:
        return to_json(part) + b"\n"

    def _end(self, usage: TokenUsage) -> dict[str, Any]:
        (sequence,) = self._sequences
        now = time.monotonic()
        begun = sequence.tally.first_output or now
        return {
            "done": True,
            "done_reason": "length" if self._reason == "length" else "stop",
            "total_duration": nanoseconds(now - sequence.tally.started),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt,
            "prompt_eval_cached_count": usage.cached,
            "prompt_eval_duration": nanoseconds(begun - sequence.tally.started),
            "eval_count": usage.completion,
            "eval_duration": nanoseconds(now - begun),
            **self._context(),
        }

    def _context(self) -> dict[str, Any]:
        """Return the member `context`: the token ids of prompt and response, for a next request."""
        (sequence,) = self._sequences
        if not self._gives_ids or sequence.prompt.media:
            return {}
        return {"context": [*sequence.prompt.ids, *sequence.tally.response_ids]}


def _call_body(call: WholeToolCall, number: int) -> dict[str, Any]:
    """Return a tool call as JSON; arguments that are not a valid JSON object become {}."""
    arguments = json_object("".join(call.arguments))
    function = {"index": number, "name": call.name, "arguments": arguments}
    # LiteLLM merges calls unless each one has an index outside of `function`.
    return {"id": call.id, "index": number, "function": function}
