"""The body of POST /v1/completions, its conversion to a GenerateCall, and the response objects."""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.api.openai.beams import beam_rules, sampled_best_of
from cpuserve.api.openai.checks import (
    form_field,
    length,
    length_field,
    shared_values,
    usage_in_each,
)
from cpuserve.api.openai.schema import GenerationRequest, LegacyLogprobs, PromptLogprobs, Usage
from cpuserve.api.request.fields import with_refused
from cpuserve.serving.calls.call import GenerateCall, call_from

# The default of max_tokens in completion requests, as in the OpenAI API and vLLM.
# A lower default of the server (from the model or --override-generation-config) takes precedence.
COMPLETION_TOKENS = 16


@with_refused("completions")
class CompletionRequest(GenerationRequest, kw_only=True):
    """The body of POST /v1/completions; `prompt` is text, token ids, or a list of either."""

    prompt: str | list[str | int | list[int]]
    max_completion_tokens: int | None = None
    logprobs: int | None = None
    suffix: str | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    echo: bool | None = None
    request_id: str | None = None
    timings_per_token: bool | None = None


@with_refused("completions")
class CompletionRenderRequest(CompletionRequest, kw_only=True):
    """The body of POST /v1/completions/render."""

    return_token_offsets: bool | None = None


class CompletionChoice(msgspec.Struct):
    """One of n continuations of one prompt of the request."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """The body of the response to POST /v1/completions."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    timings: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def to_call(request: CompletionRequest) -> GenerateCall:
    """Return the GenerateCall; InvalidRequest if fields are not supported or contradictory."""
    best_of = sampled_best_of(request, stream=bool(request.stream))
    chosen: dict[str, Any] = {}
    if best_of is not None:
        chosen = {"n": best_of, "num_best": request.n or 1, "logprobs": request.logprobs or 0}
    return call_from(
        request,
        **chosen,
        **shared_values(request),
        max_tokens=length(request),
        usage_in_each=usage_in_each(request),
        default_max_tokens=COMPLETION_TOKENS,
        beams=beam_rules(request),
    )


def words(request: CompletionRequest) -> dict[str, str]:
    """Return the field of this API for each RequestError.role that has another name here."""
    found = {"max_tokens": length_field(request), "structured_outputs": form_field(request)}
    return found if request.best_of is None else {**found, "n": "best_of"}
