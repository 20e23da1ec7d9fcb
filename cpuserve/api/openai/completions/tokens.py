"""POST /inference/v1/generate of vLLM: tokens in, tokens out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.openai.chat.schema import ChatLogprobs
from cpuserve.api.openai.checks import take_request_id
from cpuserve.api.openai.completions.schema import CompletionRequest, to_call
from cpuserve.api.openai.logprobs import TokenNames, chat_logprobs, prompt_logprobs
from cpuserve.api.openai.schema import PromptLogprobs
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.fields import check_fields, is_set
from cpuserve.api.route import generate, post
from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import GenerateCall, unsupported

if TYPE_CHECKING:
    from cpuserve.serving.events import Choice, WholeResponse
    from cpuserve.serving.generate import Generation

router = APIRouter()
# Fields of the request that are refused if they are set.
_REFUSED = ("stream", "stream_options", "features", "kv_transfer_params")
# Fields of /v1/completions that are no sampling parameters.
_NO_PARAMETERS = frozenset(
    {
        *("prompt", "model", "stream", "stream_options", "stream_interval", "echo", "suffix"),
        *("user", "request_id", "timeout", "priority", "cache_salt", "return_token_ids"),
        *("return_tokens_as_token_ids", "return_progress", "timings_per_token", "best_of"),
        *("use_beam_search", "length_penalty", "add_special_tokens", "thinking"),
    }
)
# Parameters of vLLM about its own processes, and about texts, which are not returned.
_NO_EFFECT = frozenset({"detokenize", "output_kind", "skip_clone"})


class TokensRequest(msgspec.Struct, kw_only=True):
    """POST /inference/v1/generate; sampling_params: as the render routes return them."""

    token_ids: list[int]
    sampling_params: dict[str, Any]
    model: str | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    timeout: float | None = None
    stream: Any = None
    stream_options: Any = None
    features: Any = None
    kv_transfer_params: Any = None


class TokensChoice(msgspec.Struct):
    """One of n responses."""

    index: int
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: list[int]


class TokensResponse(msgspec.Struct):
    """The body of POST /inference/v1/generate."""

    request_id: str
    choices: list[TokensChoice]
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: None = None


def tokens_call(request: TokensRequest) -> GenerateCall:
    """Return the call; InvalidRequest for a field or a parameter that is not supported."""
    for name in _REFUSED:
        if is_set(getattr(request, name)):
            msg = f"{name} is not supported yet: omit it"
            raise unsupported(msg, name)
    given = {
        name: value
        for name, value in request.sampling_params.items()
        if value is not None and name not in _NO_EFFECT
    }
    for name in given:
        if name in _NO_PARAMETERS or name not in CompletionRequest.__struct_fields__:
            msg = f"sampling_params: {name[:60]} is not supported: omit it"
            raise unsupported(msg, "sampling_params")
    shared = {
        "prompt": request.token_ids,
        "cache_salt": request.cache_salt,
        "priority": request.priority,
        "timeout": request.timeout,
    }
    try:
        asked = msgspec.convert({**given, **shared}, CompletionRequest)
    except msgspec.ValidationError as error:
        msg = f"sampling_params: {error}"
        raise InvalidRequest(msg, param="sampling_params") from None
    check_fields(asked)
    call = to_call(asked)
    call.model = request.model
    return call


@post(
    router,
    "/inference/v1/generate",
    schema=TokensRequest,
    response=TokensResponse,
    id_prefix="",
    words=lambda _: {"prompt": "token_ids"},
)
async def generate_tokens(received: RequestContext, asked: TokensRequest) -> Response:
    """Continue the tokens of a prompt, and return tokens."""
    take_request_id(received, asked.request_id)
    return await generate(received, asked, tokens_call, TokensWriter)


class TokensWriter:
    """Writes the response of /inference/v1/generate."""

    def __init__(
        self, received: RequestContext, _asked: TokensRequest, generation: Generation
    ) -> None:
        first = generation.sequences[0].params
        self._id = received.id
        self._top, self._prompt_top = first.num_top, first.prompt_logprobs
        tokenizer = received.context.get_tokenizer()
        self._names = TokenNames(tokenizer, as_ids=True, skip_special_tokens=False)

    def whole(self, response: WholeResponse) -> bytes:
        """Return the whole response as JSON."""
        scores = response.choices[0].scores
        rows = prompt_logprobs(scores, self._prompt_top, self._names)
        choices = [self._choice(choice) for choice in response.choices]
        return msgspec.json.encode(TokensResponse(self._id, choices, rows))

    def _choice(self, choice: Choice) -> TokensChoice:
        logprobs = None
        if self._top is not None:
            logprobs = chat_logprobs(choice.logprobs, self._top, self._names)
        return TokensChoice(choice.index, logprobs, choice.reason, choice.token_ids)
