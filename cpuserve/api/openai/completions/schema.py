"""The fields of POST /v1/completions, and the call that they make."""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.api.openai.beams import beam_rules
from cpuserve.api.openai.checks import (
    check_fields_together,
    form_field,
    length,
    length_field,
    repetition_penalty,
    usage_in_each,
)
from cpuserve.api.openai.schema import GenerationRequest, PromptLogprobs, Usage
from cpuserve.api.request.fields import refused_names, with_refused
from cpuserve.serving.call import GenerateCall, call_from

# max_tokens of completion requests that do not set it, as in the OpenAI API and vLLM. The server's
# default (from the model or --override-generation-config) applies if it is lower.
COMPLETION_TOKENS = 16


@with_refused("completions")
class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions; `prompt` is a text, token ids, or a list of texts or of token ids."""

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
    """POST /v1/completions/render."""

    return_token_offsets: bool | None = None


class LegacyLogprobs(msgspec.Struct):
    """The completions endpoint's parallel lists; `text_offset` counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct):
    """One of n continuations of one of the prompts."""

    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    """The body of POST /v1/completions."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    timings: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET


def to_call(request: CompletionRequest) -> GenerateCall:
    """Return the call; InvalidRequest for a field that is not supported or contradicts another."""
    check_fields_together(request)
    return call_from(
        request,
        refused_names(request),
        max_tokens=length(request),
        repetition_penalty=repetition_penalty(request),
        default_max_tokens=COMPLETION_TOKENS,
        usage_in_each=usage_in_each(request),
        beams=beam_rules(request),
    )


def words(request: CompletionRequest) -> dict[str, str]:
    """Return {RequestError.role: field of this API} for each role with another name."""
    return {"max_tokens": length_field(request), "structured_outputs": form_field(request)}
