"""POST /v1/completions, and POST /v1/completions/render, which only tokenizes the prompts.

CompletionWriter writes generation events as chunks of a stream or as one JSON body.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.openai.checks import take_request_id
from cpuserve.api.openai.chunks import FORM, ChunkFormat, error_chunk, progress_member, to_json
from cpuserve.api.openai.completions.schema import (
    Completion,
    CompletionChoice,
    CompletionRenderRequest,
    CompletionRequest,
    to_call,
    words,
)
from cpuserve.api.openai.logprobs import LegacyBuilder, TokenNames, joined, prompt_logprobs
from cpuserve.api.openai.render import TokenizedPrompt, refuse_offsets, rendered
from cpuserve.api.openai.timings import timings_member, timings_of
from cpuserve.api.openai.usage import usage_body
from cpuserve.api.request.context import RequestContext
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import generate, post, prepared
from cpuserve.serving.calls.events import (
    Choice,
    Event,
    Finish,
    PromptProgress,
    PromptScores,
    Text,
    TokenUsage,
    WholeResponse,
)

if TYPE_CHECKING:
    from cpuserve.api.openai.schema import LegacyLogprobs, PromptLogprobs
    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.serving.calls.call import Prompt
    from cpuserve.serving.generation.generate import Generation

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
async def create_completion(request: RequestContext, body: CompletionRequest) -> Response:
    """Continue one or several prompts, or compute their logprobs."""
    take_request_id(request, body.request_id)
    return await generate(request, body, to_call, CompletionWriter)


@post(
    router,
    "/v1/completions/render",
    schema=CompletionRenderRequest,
    response=list[TokenizedPrompt],
    id_prefix="cmpl-",
    words=words,
)
async def render_completion(request: RequestContext, body: CompletionRenderRequest) -> Response:
    """Return the token ids of each prompt, without generating a response."""
    take_request_id(request, body.request_id)
    refuse_offsets(body)
    return json_response(rendered(request, await prepared(request, body, to_call)))


_NOTHING = b',"text":"","logprobs":null,"finish_reason":null'
_Scores = list["TokenLogprob | None"]


class CompletionWriter:
    """Writes the response to one completion request."""

    form = FORM

    def __init__(
        self, request: RequestContext, body: CompletionRequest, generation: Generation
    ) -> None:
        sequences = generation.sequences
        self._request = request
        self._model = request.served.name
        self._ids = bool(body.return_token_ids)
        self._prompt_top = body.prompt_logprobs
        options = body.stream_options
        self._chunks = ChunkFormat.of(request, "text_completion", options)
        echo, skip_special = bool(body.echo), sequences[0].params.skip_special_tokens
        self._names = TokenNames(
            request.context.get_tokenizer(),
            as_ids=bool(body.return_tokens_as_token_ids),
            skip_special_tokens=skip_special,
        )
        top = None if body.logprobs is None else sequences[0].params.num_top
        self._parts = [
            _Part(request, self._names, sequence.prompt, top, echo, skip_special)
            for sequence in sequences
        ]
        self._scored: dict[int, PromptLogprobs | None] = {}
        self._timed = generation if body.timings_per_token else None

    def frames(self, events: list[Event]) -> bytes:
        """Return the chunk for the events of one engine output; b"" if there is nothing to show."""
        first, last = events[0], events[-1]
        if isinstance(first, TokenUsage):
            return self._chunks.usage_chunk(first)
        index, usage = first.index, last if isinstance(last, TokenUsage) else None
        if isinstance(first, PromptProgress):
            return self._chunks.chunk(index, _NOTHING, None, progress_member(first))
        members = self._members(self._parts[index], events)
        if not members:
            return b""
        return self._chunks.chunk(index, members, usage, timings_member(self._timed))

    def _members(self, part: _Part, events: list[Event]) -> bytes:
        text, tokens, entries, scores, finish = "", [], None, None, None
        for event in events:
            if isinstance(event, Text):
                text, tokens, entries = event.text, event.token_ids, event.logprobs
            elif isinstance(event, Finish):
                finish = event
            elif isinstance(event, PromptScores):
                scores = event.scores
        first = part.first
        text = part.echoed_text() + text
        logprobs = part.logprobs(tokens, entries or [], scores)
        scored = scores is not None and self._prompt_top is not None
        wanted = scored or (tokens and (self._ids or part.has_logprobs))
        if not (text or wanted or finish is not None):
            return b""
        out = b',"text":%b,"logprobs":%b,"finish_reason":%b' % (
            to_json(text),
            to_json(logprobs),
            to_json(finish and finish.reason),
        )
        if finish is not None:
            out += b',"stop_reason":' + to_json(finish.stop_reason)
        if self._ids:
            out += b',"token_ids":' + to_json(tokens)
            if first:
                out += b',"prompt_token_ids":' + to_json(part.prompt.ids)
        if scored:
            rows = prompt_logprobs(scores, self._prompt_top, self._names)
            out += b',"prompt_logprobs":' + to_json(rows)
        return out

    def failed(self, error: BaseException) -> bytes:
        """Return the SSE event for an error after the stream has begun."""
        return error_chunk(error)

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole Completion as JSON."""
        request = self._request
        return msgspec.json.encode(
            Completion(
                request.id,
                "text_completion",
                request.created,
                self._model,
                request.context.fingerprint,
                [self._choice(*each) for each in enumerate(response.choices)],
                usage_body(response.usage),
                msgspec.UNSET if self._timed is None else timings_of(self._timed),
            )
        )

    def _choice(self, index: int, choice: Choice) -> CompletionChoice:
        part = self._parts[choice.index]  # with best_of, `index` numbers only the best choices
        text = part.echoed_text() + "".join(choice.text)
        return CompletionChoice(
            index,
            text,
            part.logprobs(choice.token_ids, choice.logprobs, choice.scores),
            choice.reason,
            choice.stop_reason,
            self._prompt_logprobs(choice),
            choice.token_ids if self._ids else msgspec.UNSET,
            choice.prompt.ids if self._ids else msgspec.UNSET,
        )

    def _prompt_logprobs(self, choice: Choice) -> PromptLogprobs | None:
        """Return the logprobs of a prompt's tokens, which all choices of the prompt share."""
        if choice.scorer not in self._scored:
            rows = prompt_logprobs(choice.scores, self._prompt_top, self._names)
            self._scored[choice.scorer] = rows
        return self._scored[choice.scorer]


class _Part:
    """The state of one choice in a stream: whether it has begun, its echo, and text offsets."""

    def __init__(
        self,
        request: RequestContext,
        names: TokenNames,
        prompt: Prompt,
        top: int | None,
        echo: bool,
        skip_special: bool,
    ) -> None:
        self.prompt = prompt
        self.first = True
        self.has_logprobs = top is not None
        self._tokenizer = request.context.get_tokenizer()
        self._echo = echo
        self._skip_special = skip_special
        self._legacy = None if top is None else LegacyBuilder(names, top)

    def echoed_text(self) -> str:
        """Return the prompt text that the first chunk echoes, as sent or decoded from ids."""
        if not (self._echo and self.first):
            return ""
        if self.prompt.text is not None:
            return self.prompt.text
        return self._tokenizer.decode(self.prompt.ids, skip_special_tokens=self._skip_special)

    def logprobs(
        self, tokens: list[int], entries: list[TokenLogprob], scores: _Scores | None
    ) -> LegacyLogprobs | None:
        """Return the logprobs of `tokens`; the first call adds the logprobs of an echoed prompt."""
        first, self.first = self.first, False
        if self._legacy is None:
            return None
        if not (self._echo and first):
            return self._legacy.piece(tokens, entries)
        strips = self._tokenizer.strips_leading_space
        rows = scores or [None] * len(self.prompt.ids)
        echoed = self._legacy.prompt(self.prompt, rows, strips)
        return joined(echoed, self._legacy.piece(tokens, entries))
