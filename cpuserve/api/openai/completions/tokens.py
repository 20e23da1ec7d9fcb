"""POST /inference/v1/generate of vLLM: the prompt and the response are token ids."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.openai.checks import take_request_id
from cpuserve.api.openai.chunks import FORM, error_chunk, to_json
from cpuserve.api.openai.completions.schema import CompletionRequest, to_call
from cpuserve.api.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from cpuserve.api.openai.schema import ChatLogprobs, PromptLogprobs, StreamOptions, Usage
from cpuserve.api.openai.usage import usage_body
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.fields import TOKENS, check_fields, with_refused
from cpuserve.api.response.openapi import EVENTS
from cpuserve.api.route import generate, post
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import GenerateCall, unsupported
from cpuserve.serving.calls.events import Finish, PromptScores, Text, TokenUsage

if TYPE_CHECKING:
    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.serving.calls.events import Event, WholeResponse
    from cpuserve.serving.generation.generate import Generation

router = APIRouter()
# Fields of /v1/completions that are not sampling parameters, so sampling_params cannot have them.
_NO_PARAMETERS = frozenset(
    {
        *("prompt", "model", "stream", "stream_options", "stream_interval", "echo", "suffix"),
        *("user", "request_id", "timeout", "priority", "cache_salt", "return_token_ids"),
        *("return_tokens_as_token_ids", "return_progress", "timings_per_token", "best_of"),
        *("use_beam_search", "length_penalty", "add_special_tokens", "thinking"),
    }
)
# Sampling parameters of vLLM that concern only its processes or texts; this route returns ids.
_NO_EFFECT = frozenset({"detokenize", "output_kind", "skip_clone"})


@with_refused(TOKENS)
class TokensRequest(msgspec.Struct, kw_only=True):
    """The body of POST /inference/v1/generate.

    sampling_params: the sampling parameters in the format that the `.../render` routes return.
    """

    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class TokensChoice(msgspec.Struct):
    """One of n generated token sequences for the prompt."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int]


class TokensResponse(msgspec.Struct):
    """The body of the response to POST /inference/v1/generate."""

    request_id: str
    model: str
    created: int
    choices: list[TokensChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: None = None


class TokensChunk(msgspec.Struct):
    """A chunk of a streamed response: new tokens of one choice, or only the token usage."""

    request_id: str
    choices: list[TokensChoice]
    usage: Usage | None
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


def tokens_call(request: TokensRequest) -> GenerateCall:
    """Return the GenerateCall; InvalidRequest for a parameter that is not supported."""
    fields = {
        name: value
        for name, value in request.sampling_params.items()
        if value is not None and name not in _NO_EFFECT
    }
    for name in fields:
        if name in _NO_PARAMETERS or name not in CompletionRequest.__struct_fields__:
            msg = f"sampling_params: {name[:60]} is not supported: omit it"
            raise unsupported(msg, "sampling_params")
    shared = {
        "prompt": request.token_ids,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "timeout": request.timeout,
        "stream": request.stream,
        "stream_options": request.stream_options,
    }
    try:
        body = msgspec.convert({**fields, **shared}, CompletionRequest)
    except msgspec.ValidationError as error:
        msg = f"sampling_params: {error}"
        raise InvalidRequest(msg, param="sampling_params") from None
    check_fields(body)
    call = to_call(body)
    call.model = request.model
    call.default_max_tokens = None  # as in vLLM: the default is the rest of the context
    return call


@post(
    router,
    "/inference/v1/generate",
    schema=TokensRequest,
    response=TokensResponse,
    id_prefix="",
    stream=EVENTS,
    words=lambda _: {"prompt": "token_ids"},
)
async def generate_tokens(request: RequestContext, body: TokensRequest) -> Response:
    """Generate tokens that continue the token ids of a prompt."""
    take_request_id(request, body.request_id)
    return await generate(request, body, tokens_call, TokensWriter)


class TokensWriter:
    """Writes the response to a request to /inference/v1/generate."""

    form = FORM

    def __init__(
        self, request: RequestContext, body: TokensRequest, generation: Generation
    ) -> None:
        first, options = generation.sequences[0].params, body.stream_options
        self._request, self._id = request, request.id
        self._with_usage = bool(options and options.include_usage)
        self._top, self._prompt_top = first.num_top, first.prompt_logprobs
        tokenizer = request.context.get_tokenizer()
        self._names = TokenNames(tokenizer, as_ids=True, skip_special_tokens=False)

    def frames(self, events: list[Event]) -> bytes:
        """Return the chunk for the events of one engine output; b"" if there is nothing to show."""
        last = events[-1]
        usage = usage_body(last) if isinstance(last, TokenUsage) else None
        if isinstance(events[0], TokenUsage):
            return self._chunk([], usage) if self._with_usage else b""
        tokens: list[int] = []
        entries: list[TokenLogprob] = []
        reason: str | None = None
        rows: PromptLogprobs | None = None
        for event in events:
            if isinstance(event, Text):
                tokens, entries = event.token_ids, event.logprobs or []
            elif isinstance(event, Finish):
                reason = event.reason
            elif isinstance(event, PromptScores):
                rows = prompt_logprobs(event.scores, self._prompt_top, self._names)
        if not tokens and reason is None and rows is None:
            return b""
        choice = self._choice(events[0].index, entries, reason, tokens)
        return self._chunk([choice], usage, rows)

    def _chunk(
        self,
        choices: list[TokensChoice],
        usage: Usage | None,
        rows: PromptLogprobs | None = None,
    ) -> bytes:
        chunk = TokensChunk(self._id, choices, usage, rows or msgspec.UNSET)
        return b"data: " + to_json(chunk) + b"\n\n"

    def failed(self, error: BaseException) -> bytes:
        """Return the SSE event for an error after the stream has begun."""
        return error_chunk(error)

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        request = self._request
        scores = response.choices[0].scores
        rows = prompt_logprobs(scores, self._prompt_top, self._names)
        choices = [
            self._choice(choice.index, choice.logprobs, choice.reason, choice.token_ids)
            for choice in response.choices
        ]
        usage, model = usage_body(response.usage), request.served.name
        return to_json(TokensResponse(self._id, model, request.created, choices, usage, rows))

    def _choice(
        self, index: int, entries: list[TokenLogprob], reason: str | None, tokens: list[int]
    ) -> TokensChoice:
        logprobs = None
        if self._top is not None:
            logprobs = chat_logprobs(entries, self._top, self._names)
        return TokensChoice(index, logprobs, reason, tokens)
