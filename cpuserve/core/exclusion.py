"""Find the fields of a request that exclude every token, so that none can be sampled."""

from __future__ import annotations

import math
from collections.abc import Iterable

from cpuserve.sampling.params import SamplingParams


def stop_ids(params: SamplingParams, eos_ids: Iterable[int]) -> frozenset[int]:
    """Return the ids of tokens that end the text of a request, and that min_tokens excludes."""
    goes_on = params.ignore_eos and not params.masks_tokens
    eos = frozenset() if goes_on else frozenset(eos_ids)
    return eos | frozenset(params.stop_token_ids)


def excludes_all(params: SamplingParams, stops: frozenset[int]) -> bool:
    """Return whether no token can be sampled, whatever the model's logits are.

    stops: the ids of tokens that would end a text with fewer than min_tokens tokens; else empty.
    A grammar is not taken into account: the text ends where the grammar allows no further token.
    """
    barred = _barred(params) | {word[0] for word in params.bad_word_ids if len(word) == 1}
    allowed = params.allowed_token_ids
    return allowed is not None and all(i in stops or i in barred for i in allowed)


def excluding_fields(params: SamplingParams, stops: frozenset[int]) -> list[str]:
    """Return the request fields that may exclude every token; [] if a token certainly remains.

    stops: the ids of tokens that min_tokens excludes now. A grammar alone is not listed,
    because it always allows a token, or else the engine ends the request.
    """
    form = params.structured_outputs if params.masks_tokens else None
    allowed = params.allowed_token_ids
    ngrams = params.banned_ngram_size > 0
    may_bar = ngrams or any(len(word) > 1 for word in params.bad_word_ids)
    if form is None and allowed is not None and not (may_bar or excludes_all(params, stops)):
        return []
    barred = _barred(params)
    fields = {
        "allowed_token_ids": allowed is not None,
        "logit_bias": bool(barred),
        "bad_words": bool(params.bad_word_ids),
        params.ngram_field: ngrams,
        "min_tokens": bool(stops),
    }
    found = [name for name, is_used in fields.items() if is_used]
    if form is not None:
        return [form.role, *found] if found else []
    return found if allowed is not None or barred or params.bad_word_ids or ngrams else []


def no_token_left(fields: list[str]) -> str:
    """Return the error message for a request that has these fields, which exclude every token."""
    exclude, omit = ("excludes", "it")
    if len(fields) > 1:
        exclude, omit = ("together exclude", "one of the fields")
    return (
        f"{' and '.join(fields)} {exclude} every token, so that none is left to sample: allow more "
        f"tokens, or omit {omit}"
    )


def _barred(params: SamplingParams) -> set[int]:
    return {i for i, bias in (params.logit_bias or {}).items() if bias == -math.inf}
