"""The sampling parameters of llama-server: their defaults, and how responses show them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cpuserve.sampling.chain import DEFAULT_BREAKERS, chain_of
from cpuserve.sampling.fields import CHAINED
from cpuserve.serving.calls.call import NO_LIMIT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpuserve.sampling.params import SamplingParams

# Defaults of request fields, unless the model or the command line of the server overrides them.
DEFAULTS: Mapping[str, int | float] = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
}


def shown_params(params: SamplingParams, longest: int) -> dict[str, Any]:
    """Return the sampling parameters with the keys that llama-server uses.

    longest: the maximum number of tokens of the response; NO_LIMIT is shown as -1.
    """
    length = -1 if longest == NO_LIMIT else longest
    return {
        "n_predict": length,
        "max_tokens": length,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "repeat_last_n": params.penalty_window,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        **_sampler_fields(params),
        "ignore_eos": params.ignore_eos,
        "stop": params.stop,
    }


def _sampler_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters of samplers that are specific to llama-server, such as DRY."""
    chain = chain_of(params, reports=True)
    assert chain is not None, "a chain that reports exists"
    return {
        "min_keep": chain.min_keep,
        **{name: getattr(chain, name) for name in CHAINED},
        "post_sampling_probs": bool(params.post_sampling_probs),
        "dry_sequence_breakers": list(params.dry_sequence_breakers or DEFAULT_BREAKERS),
        "samplers": list(chain.stages),
    }
