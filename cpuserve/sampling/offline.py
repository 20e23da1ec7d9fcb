"""Fields of SamplingParams in vLLM that only `LLM` reads, or that are refused if they are set.

Programs for the offline API of vLLM set them.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Any

from cpuserve.errors import InvalidRequest
from cpuserve.sampling.chain import ChainParams


class RequestOutputKind(Enum):
    """Which outputs a request yields while it runs. `LLM` returns only final outputs."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(IntEnum):
    """How tokens are chosen: the most likely one, at random, or at random from a seed."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


# The fields that must have one of these values, and why other values are refused.
REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "watermarking": ((None, False), "texts have no watermark"),
    "prompt_logprob_token_ids": ((None,), "logprobs of a prompt are those of the likeliest tokens"),
    "prompt_logprob_start": ((None, 0), "prompt_logprobs has the whole prompt"),
    "flat_logprobs": ((False,), "logprobs are dicts of Logprob"),
    "routed_experts_prompt_start": ((0,), "the experts of tokens are not returned"),
    "trace_decode_token_ids": ((None,), "tokens are sampled, and not replayed"),
    "extra_args": ((None, {}), "no plugins read them"),
}


class OfflineFields(ChainParams, kw_only=True):
    """The fields of vLLM for `LLM`, besides those of ChainParams.

    detokenize: False = the text of the output stays empty.
    skip_reading_prefix_cache: True = the whole prompt is computed.
    thinking_token_budget: the most tokens of a thought in `LLM.chat`; None or -1 = any number.
    output_kind, stream_interval, skip_clone, output_text_buffer_length,
      spaces_between_special_tokens: have no effect, because `LLM` does not stream
      and no tokenizer adds spaces.

    Other values of the other fields are refused (REFUSED).
    """

    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    stream_interval: int | None = None
    skip_clone: bool = False
    output_text_buffer_length: int = 0
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    watermarking: bool | None = None
    prompt_logprob_token_ids: Any = None
    prompt_logprob_start: int | None = None
    flat_logprobs: bool = False
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: Any = None
    extra_args: dict[str, Any] | None = None


def check_offline(params: OfflineFields) -> None:
    """Raise InvalidRequest, with the name of the field, for a value that is refused."""
    for name, (neutral, why) in REFUSED.items():
        value = getattr(params, name)
        if value is not None and value not in neutral:
            msg = f"{name} is not supported, because {why}: omit it"
            raise InvalidRequest(msg, role=name)
    budget = params.thinking_token_budget
    if budget is not None and budget < -1:
        msg = f"thinking_token_budget must be -1 (any number) or at least 0, got {budget}"
        raise InvalidRequest(msg, role="thinking_token_budget")


def bias_by_id(bias: dict[Any, float]) -> dict[int, float]:
    """Return logit_bias with token ids as its keys, which may be texts as in JSON.

    Raises:
        InvalidRequest: a key is not a token id.
    """
    try:
        return {int(key): value for key, value in bias.items()}
    except (TypeError, ValueError):
        bad = next(key for key in bias if not str(key).lstrip("-").isdigit())
        msg = f"logit_bias must have token ids as its keys, got {bad!r}"
        raise InvalidRequest(msg, role="logit_bias") from None
