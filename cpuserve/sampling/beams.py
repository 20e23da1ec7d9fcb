"""BeamSearchParams: how a beam search runs, with the fields and defaults of vLLM."""

from __future__ import annotations

from typing import Any

import msgspec

from cpuserve.base.errors import InvalidRequest

# Each beam proposes twice as many tokens as there are beams; the engine reports at most 20 tokens.
MOST_BEAMS = 10
MOST_PENALTY = 16.0  # the limit of length_penalty, an exponent, so that no score overflows


class BeamRules(msgspec.Struct, frozen=True):
    """The width of a beam search, and the exponent of the length in the score of a beam."""

    width: int
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Raise InvalidRequest, with the name of the parameter, for a value out of range."""
        if not 1 <= self.width <= MOST_BEAMS:
            msg = f"a beam search has 1 to {MOST_BEAMS} beams, got {self.width}"
            raise InvalidRequest(msg, role="beam_width")
        if not -MOST_PENALTY <= self.length_penalty <= MOST_PENALTY:
            msg = (
                f"length_penalty must be between {-MOST_PENALTY:g} and {MOST_PENALTY:g}, "
                f"got {self.length_penalty}"
            )
            raise InvalidRequest(msg, role="length_penalty")


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """The parameters of `LLM.beam_search`.

    beam_width: how many beams go on at each step, and how many texts are returned,
      at most MOST_BEAMS.
    max_tokens: the most tokens that a text has after its prompt.
    length_penalty: the score of a text is its cumulative logprob divided by its length in tokens,
      prompt included, to this power.
    temperature: has no effect, because nothing is sampled.
    include_stop_str_in_output: whether the token that ends a text is among its tokens.
    skip_special_tokens: whether the texts leave out special tokens.
    structured_outputs, watermarking: refused if they are set.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None

    def __post_init__(self) -> None:
        """Raise InvalidRequest, with the name of the parameter, for a value out of range."""
        _ = self.rules
        for name in ("structured_outputs", "watermarking"):
            if getattr(self, name):
                msg = f"{name} is not possible in a beam search: omit it"
                raise InvalidRequest(msg, role=name)
        if self.max_tokens < 1:
            msg = f"max_tokens must be at least 1, got {self.max_tokens}"
            raise InvalidRequest(msg, role="max_tokens")

    @property
    def rules(self) -> BeamRules:
        """The width and the length penalty."""
        return BeamRules(self.beam_width, self.length_penalty)
