"""SlotRequest: the sampling state of a request when an executor begins with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cpuserve.sampling.chain import Chain
from cpuserve.sampling.params import SamplingParams

_MASK64 = 2**64 - 1


@dataclass(slots=True)
class SlotRequest:
    """The sampler state that a request begins with. It has all attributes of its `params` as well.

    The struct SlotRequest of csrc/runtime/sampler.h is set from these attributes.

    seed: any integer; its lowest 64 bits count.
    prompt_ids: the tokens of the prompt.
    output_ids: tokens that the request has already generated (after a preemption).
    stop_ids: ids that are banned until the request has params.min_tokens output tokens.
    chain: params.chain, which is computed once.
    """

    params: SamplingParams
    seed: int
    prompt_ids: list[int]
    output_ids: list[int]
    stop_ids: list[int]
    chain: Chain | None = field(init=False)

    def __post_init__(self) -> None:
        """Keep the bits of the seed that count, and compute the chain."""
        self.seed &= _MASK64
        self.chain = self.params.chain

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of `params`."""
        return getattr(self.params, name)

    @property
    def prompt(self) -> list[int]:
        """The tokens of the prompt, or none if the sampler does not look back at them."""
        return self.prompt_ids if self._looks_back else []

    @property
    def output(self) -> list[int]:
        """The tokens of the output, or none if the sampler does not look back at them."""
        counts = (
            self.params.min_tokens > 0
            or self.params.bad_word_ids
            or self.params.banned_ngram_size > 0
        )
        return self.output_ids if counts or self._looks_back else []

    @property
    def _looks_back(self) -> bool:
        """Whether penalties or DRY depend on the tokens before."""
        return self.params.penalizes or (self.chain is not None and "dry" in self.chain.stages)
