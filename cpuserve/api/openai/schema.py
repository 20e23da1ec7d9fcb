"""Request and response types that the endpoints of the OpenAI API share, with vLLM extensions.

Clients send null for "not set", so every optional request field accepts null.
Fields that no schema lists are accepted and ignored. Fields that this server does not implement,
but that would change the response, raise an error with the name of the field (request/fields.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.serving.calls.call import CommonFields


class StreamOptions(msgspec.Struct):
    """The field stream_options: which chunks of a stream contain token usage."""

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
    # The llama.cpp fields for repetition_penalty and max_tokens.
    repeat_penalty: float | None = None
    n_predict: int | None = None
    # Fields of older versions of vLLM; each is a member of structured_outputs today.
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    best_of: Any = None
    thinking: Any = None
    # Arguments of plugins of vLLM; EXTRAS lists the honoured ones (sampling/extra_args.py).
    vllm_xargs: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None


class ScaledImage(msgspec.Struct):
    """A picture that was scaled to less than half of a side, so small text in it may be lost.

    index: its number among the pictures of the request, pages of documents included.
    width, height: the size in pixels that was sent; used_width, used_height: what the model saw.
    """

    index: int
    width: int
    height: int
    used_width: int
    used_height: int


class PromptTokensDetails(msgspec.Struct):
    """The number of prompt tokens that came from the prefix cache, and of pictures.

    multimodal_tokens: {"image": number}, as in vLLM.
    scaled_images: the pictures that lost much of their detail.
    """

    cached_tokens: int = 0
    multimodal_tokens: dict[str, int] | msgspec.UnsetType = msgspec.UNSET
    scaled_images: list[ScaledImage] | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(msgspec.Struct):
    """The number of completion tokens that belong to thoughts, and of draft tokens.

    accepted_prediction_tokens, rejected_prediction_tokens: if there were draft tokens.
    """

    reasoning_tokens: int = 0
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Usage(msgspec.Struct):
    """Exact token counts of a request over all its choices; each prompt is counted once."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(msgspec.Struct):
    """The logprob of one possible token at a prompt position; rank 1 is the most likely token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position; `bytes` are its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """The generated token at a position, and the most likely tokens there in descending order."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The logprobs of a message: one entry per generated token."""

    content: list[ChatLogprob]


class LegacyLogprobs(msgspec.Struct):
    """Logprobs as parallel lists, one entry per token; `text_offset` counts characters."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class InputTokens(msgspec.Struct):
    """The response to POST /v1/responses/input_tokens: the length of the prompt."""

    input_tokens: int
    object: str = "response.input_tokens"
