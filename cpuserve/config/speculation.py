"""Settings of speculative decoding, with the keys of --speculative-config in vLLM."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

# `--speculate auto`: few draft tokens, and small indexes. The logits of a step have no more rows
# than without drafts, because steps with many sequences hardly have drafts that pay.
AUTO = "auto"
AUTO_TOKENS, AUTO_INDEX_BYTES = 7, 4 << 20
# With more draft tokens than this, a step takes more time than the accepted tokens save.
MOST_TOKENS = 64
MOST_LOOKUP = 32
# The indexes of n-grams of all running requests take at most this memory: with the default sizes
# of n-grams, it is enough for ten texts of 128k tokens.
MOST_INDEX_BYTES = 64 << 20


class Speculation(msgspec.Struct, kw_only=True, frozen=True):
    """Propose up to num_speculative_tokens draft tokens for a sequence in each step.

    method "ngram": find an earlier occurrence of the last prompt_lookup_max tokens
    (or fewer, down to prompt_lookup_min) in the sequence, and propose the tokens after it.
    method AUTO: the same, with less memory (`automatic`).
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_max: int
    prompt_lookup_min: int

    @property
    def rows_of_sequence(self) -> int:
        """The most rows that a step samples for a sequence: one more than draft tokens."""
        return 1 + self.num_speculative_tokens

    @property
    def logit_rows(self) -> int:
        """How many rows of a sequence the memory for logits is made for, if all have drafts."""
        return 1 if self.method == AUTO else self.rows_of_sequence

    def indexed_tokens(self, requests: int, longest: int) -> int:
        """Return how many tokens all indexes of n-grams may have together.

        longest: number of tokens of the longest request.
        """
        most = AUTO_INDEX_BYTES if self.method == AUTO else MOST_INDEX_BYTES
        return min(requests * longest, most // self._token_bytes)

    def index_bytes(self, requests: int, longest: int) -> int:
        """Return the bytes of all indexes of n-grams (csrc/runtime/ngram_index.h)."""
        return self.indexed_tokens(requests, longest) * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        """The most bytes of an index for a token of its text.

        There is an entry of 4 bytes for each size of n-grams, 5 of 8 entries of a full table
        are in use, and the tables and the text have space for as many tokens again.
        """
        sizes = self.prompt_lookup_max - self.prompt_lookup_min + 1
        return 2 * (4 + -(-4 * 8 * sizes // 5))


def automatic() -> Speculation:
    """Return the settings of `--speculate auto`."""
    return Speculation(
        method=AUTO,
        num_speculative_tokens=AUTO_TOKENS,
        prompt_lookup_max=4,
        prompt_lookup_min=2,
    )


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
