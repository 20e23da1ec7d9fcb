"""Request and response types of the OpenAI API, with vLLM's extensions.

Clients send null for "not set", so every optional request field accepts null. Fields that are not
listed are accepted and ignored. Fields that would change the answer but are not implemented are
listed as Any and refused by name (check_supported).
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
    """The fields that chat completions, completions and responses share, beside those of a call."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_progress: bool | None = None
    user: str | None = None
    # llama.cpp's names for repetition_penalty and max_tokens, and the tokens that penalties count.
    repeat_penalty: float | None = None
    n_predict: int | None = None
    repeat_last_n: int | None = None
    # Refused by name when set, because ignoring them would change the answer (request/fields.py).
    best_of: Any = None
    bad_words: Any = None
    chat_template: Any = None
    documents: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_whitespace_pattern: Any = None
    include_reasoning: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_embeds: Any = None
    repetition_detection: Any = None
    return_prompt_text: Any = None
    suffix: Any = None
    thinking: Any = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None
    audio: Any = None
    web_search_options: Any = None
    adaptive_target: Any = None
    dry_multiplier: Any = None
    dynatemp_range: Any = None
    grammar: Any = None
    image_data: Any = None
    json_schema: Any = None
    lora: Any = None
    min_keep: Any = None
    mirostat: Any = None
    n_cmpl: Any = None
    n_indent: Any = None
    n_probs: Any = None
    penalize_nl: Any = None
    post_sampling_probs: Any = None
    reasoning_budget_tokens: Any = None
    response_fields: Any = None
    return_tokens: Any = None
    samplers: Any = None
    t_max_predict_ms: Any = None
    tfs_z: Any = None
    thinking_budget_tokens: Any = None
    top_n_sigma: Any = None
    typical_p: Any = None
    xtc_probability: Any = None


class PromptTokensDetails(msgspec.Struct):
    """How many of the prompt's tokens came from the prefix cache."""

    cached_tokens: int = 0


class Usage(msgspec.Struct):
    """Exact token counts of the request over all choices; each prompt counts once."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int
    prompt_tokens_details: PromptTokensDetails


class PromptLogprob(msgspec.Struct):
    """One possible token at a position of the prompt; rank 1 is the most likely."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
