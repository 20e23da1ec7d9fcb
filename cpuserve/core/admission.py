"""Which requests can be served at all. Asked by the front end (400) and again by the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cpuserve.errors import InvalidRequest
from cpuserve.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sequence may be. kv_tokens: the whole KV cache. max_top: most alternatives."""

    max_model_len: int
    kv_tokens: int
    vocab: int
    max_top: int = 20


def output_limit(num_prompt: int, params: SamplingParams, limits: Limits) -> int:
    """Outputs that request may have: max_tokens cut to the context and to the KV cache.

    The last output never enters the KV cache, hence the + 1.
    """
    room = min(limits.max_model_len, limits.kv_tokens + 1) - num_prompt
    return room if params.max_tokens is None else min(params.max_tokens, room)


def check_request(prompt: Sequence[int], params: SamplingParams, limits: Limits) -> None:
    """Raise InvalidRequest if this request could not run even with the engine to itself."""
    check_prompt(prompt, params, limits)
    check_params(params, limits)


def check_prompt(prompt: Sequence[int], params: SamplingParams, limits: Limits) -> None:
    """The part of check_request that differs between the prompts of one request."""
    _check_length(len(prompt), params, limits)
    _check_ids("prompt", prompt, limits.vocab)


def check_params(params: SamplingParams, limits: Limits) -> None:
    """The part of check_request that all prompts of one request share."""
    _check_ids("logit_bias", params.logit_bias or (), limits.vocab)
    _check_ids("allowed_token_ids", params.allowed_token_ids or (), limits.vocab)
    _check_ids("stop_token_ids", params.stop_token_ids, limits.vocab)
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        msg = "allowed_token_ids is empty: no token could ever be chosen"
        raise InvalidRequest(msg, param="allowed_token_ids")
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(params, name) or 0) > limits.max_top:
            msg = f"{name} is {getattr(params, name)}, at most {limits.max_top} are served"
            raise InvalidRequest(msg, param=name)


def _check_length(num_prompt: int, params: SamplingParams, limits: Limits) -> None:
    if not num_prompt:
        msg = "the prompt is empty: it needs at least one token"
        raise InvalidRequest(msg, param="prompt")
    scores_only = params.max_tokens == 0
    if num_prompt + (not scores_only) > limits.max_model_len:
        msg = (
            f"the prompt has {num_prompt} tokens; this model's maximum context length is "
            f"{limits.max_model_len} tokens, prompt and output together. Shorten the prompt"
        )
        raise InvalidRequest(msg, param="prompt")
    wanted = num_prompt + max((params.max_tokens or 1) - 1, 0)
    wanted = min(wanted, max(limits.max_model_len - 1, num_prompt))
    if wanted > limits.kv_tokens:
        msg = (
            f"the request needs {wanted} tokens of KV cache (prompt and max_tokens), the whole "
            f"cache holds {limits.kv_tokens}. Lower max_tokens, or serve with a larger KV cache"
        )
        raise InvalidRequest(msg, param="max_tokens")


def _check_ids(name: str, ids: Iterable[int], vocab: int) -> None:
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= vocab:
        bad = low if low < 0 else high
        msg = f"{name} contains token id {bad}; this model's ids are 0 to {vocab - 1}"
        raise InvalidRequest(msg, param=name)
