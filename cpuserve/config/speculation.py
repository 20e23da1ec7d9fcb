"""Settings of speculative decoding, with the keys of --speculative-config in vLLM."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

# With more draft tokens than this, a step takes more time than the accepted tokens save.
MOST_TOKENS = 64
MOST_LOOKUP = 32


class Speculation(msgspec.Struct, kw_only=True, frozen=True):
    """Propose up to num_speculative_tokens draft tokens for a sequence in each step.

    method "ngram": find an earlier occurrence of the last prompt_lookup_max tokens
    (or fewer, down to prompt_lookup_min) in the sequence, and propose the tokens after it.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int


def read_speculation(values: Mapping[str, object]) -> Speculation:
    """Return the settings; if only one of prompt_lookup_max and _min is set, it sets both.

    Raises a ValueError for an unknown name or a value that is not supported.
    """
    known = Speculation.__struct_fields__
    if unknown := [name for name in values if name not in known]:
        names = ", ".join(map(repr, unknown[:8]))
        msg = f"unknown setting {names}; supported: {', '.join(known)}"
        raise ValueError(msg)
    if values.get("method") != "ngram":
        msg = 'method must be "ngram", the only one that is supported'
        raise ValueError(msg)
    tokens = _whole(values, "num_speculative_tokens", MOST_TOKENS) or 5
    most, least = (
        _whole(values, name, MOST_LOOKUP) for name in ("prompt_lookup_max", "prompt_lookup_min")
    )
    most, least = most or least or 4, least or most or 2
    if least > most:
        msg = f"prompt_lookup_min ({least}) must not exceed prompt_lookup_max ({most})"
        raise ValueError(msg)
    return Speculation(
        method="ngram",
        num_speculative_tokens=tokens,
        prompt_lookup_max=most,
        prompt_lookup_min=least,
    )


def _whole(values: Mapping[str, object], name: str, most: int) -> int:
    """Return the setting; 0 if it is missing or null."""
    value = values.get(name)
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        msg = f"{name} must be a whole number from 1 to {most}"
        raise ValueError(msg)
    return value
