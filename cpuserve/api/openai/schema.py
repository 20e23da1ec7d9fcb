"""Request and response types of the OpenAI API, with the vLLM extensions.

Clients send null for "not set", so every optional request field accepts null. Fields that are not
listed are accepted and ignored. Fields that are not implemented, but would change the response, are
refused by name (request/fields.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.serving.call import CommonFields


class StreamOptions(msgspec.Struct):
    """The stream_options of a request: which chunks of a stream contain the usage."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(CommonFields, kw_only=True):
    """The fields that chat completions, completions and responses share, besides CommonFields."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_progress: bool | None = None
    stream_interval: int | None = None
    user: str | None = None
    # The names that llama.cpp has for repetition_penalty and max_tokens.
    repeat_penalty: float | None = None
    n_predict: int | None = None
    best_of: Any = None
    thinking: Any = None


class PromptTokensDetails(msgspec.Struct):
    """How many of the prompt's tokens came from the prefix cache."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """How many of the completion's tokens are thoughts."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct):
    """Exact token counts of the request over all choices; each prompt counts once."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(msgspec.Struct):
    """One possible token at a position of the prompt; rank 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
