"""PromptBudget: divide the prompt tokens of one step among the prompts in progress.

The prompt with the fewest remaining tokens is served first, so that a short request passes a long
prompt. A quarter of the step is reserved for the oldest prompt, so that no prompt waits forever.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cpuserve.core.cost import COARSE, FINE, LEAST_CHUNK
from cpuserve.core.request import Request

OLDEST_SHARE = 4  # 1 / OLDEST_SHARE of a step is reserved for the oldest prompt
# A step without running streams completes prompts with at most SHORT remaining tokens, and computes
# a part of longer ones. Parts of 64 tokens are large enough to amortize reading the weights: they
# are 7 % slower than whole prompts (SmolLM2-135M on two AVX2 cores), and parts of 256 tokens 2 %.
SHORT = COARSE
LEAST_PART, MOST_PART = 64, COARSE
# A prompt of at most TOGETHER tokens takes little longer than one token, because every step reads
# all weights.
TOGETHER = 16
# A step may be ended early when a short prompt arrives. The step's prompts then compute the same
# tokens again: in total at most 1 / LOSS_SHARE of each prompt.
LOSS_SHARE = 6


def may_lose(request: Request) -> float:
    """Return how many more tokens of `request` may be computed and thrown away."""
    return max(len(request.token_ids) / LOSS_SHARE - request.num_lost, 0.0)


def part_of(request: Request) -> int:
    """Return how many tokens of a long prompt to compute in a step without running streams.

    A step that is ended early loses the tokens that it computed. So a part has at most as many
    tokens as the prompt may still lose (`may_lose`), but at least LEAST_PART, because so short a
    step need not be ended.
    """
    most = int(may_lose(request)) // FINE * FINE
    return min(max(most, LEAST_PART), MOST_PART)


def only_decisions(prompts: Iterable[Request]) -> bool:
    """Whether all prompts are decisions, so that none has to wait for a later step."""
    return all(request.decides for request in prompts)


@dataclass(slots=True)
class PromptBudget:
    """The tokens and the time that a step still has for prompts.

    seconds: infinite if no stream runs.
    least: tokens that may be computed even if no time remains.
    short: prompts with at most so many remaining tokens are completed.
    long: tokens for all longer prompts together.
    alone: no stream runs, so a prompt that this step completes waits only for the other prompts of
      the step.
    finishing: tokens of all prompts that the step completes.
    shortest: tokens of the first prompt that it completes, 0 = none yet.
    closed: no further prompt gets tokens in this step.
    restored: the step has restored a block from an offload tier, which is progress even if the step
      computes nothing.
    """

    tokens: int
    seconds: float
    least: int
    short: int
    long: int
    alone: bool
    finishing: int = 0
    shortest: int = 0
    closed: bool = False
    restored: bool = False

    @property
    def is_spent(self) -> bool:
        """Whether the step has no tokens or no time left for prompts."""
        return self.closed or self.tokens <= 0 or (self.seconds <= 0.0 and not self.least)

    def finishes(self, left: int) -> bool:
        """Whether this step may complete a prompt with `left` tokens, if its budget suffices.

        All prompts of a step get their first token at its end. Without running streams, a step may
        be long. So a prompt that is much longer than the shortest prompt of the step is not
        completed in it: the shortest one would have to wait.
        """
        most = self.short
        if self.alone and self.shortest:
            most = min(most, max(5 * self.shortest // 4, TOGETHER))
        return left <= most

    def holds_up(self, left: int) -> bool:
        """Whether a prompt with `left` remaining tokens would delay prompts that this step ends."""
        return self.alone and self.shortest > 0 and not self.finishes(left)

    def keep_back(self) -> PromptBudget:
        """Remove the share of the oldest prompt from this budget and return it."""
        kept = PromptBudget(
            max(self.tokens // OLDEST_SHARE, 1),
            self.seconds / OLDEST_SHARE,
            self.least // OLDEST_SHARE,
            self.short,
            max(self.long // OLDEST_SHARE, 1),
            self.alone,
        )
        self.tokens -= kept.tokens
        self.seconds *= 1.0 - 1.0 / OLDEST_SHARE
        self.least -= kept.least
        self.long -= kept.long
        return kept

    def give_back(self, kept: PromptBudget) -> None:
        """Add the share `kept` of the oldest prompt again, just before this prompt is served."""
        self.tokens += kept.tokens
        self.seconds += kept.seconds
        self.least += kept.least
        self.long += kept.long
        self.restored = False
        if self.alone and self.shortest:
            share = self.finishing // (OLDEST_SHARE - 1)
            self.long = min(self.long, max(share, LEAST_CHUNK // OLDEST_SHARE))

    def most(self, left: int, labels: int = 0) -> int:
        """Return how many of a prompt's `left` remaining tokens may run, not counting the time.

        labels: how many rows score labels, besides a row for each token at most. A step has at most
        as many logit rows as tokens.
        """
        most = min(left, self.tokens - labels)
        return most if most == left and self.finishes(left) else min(most, self.long)

    def spend(self, count: int, seconds: float, *, finishes: bool) -> None:
        """Subtract a chunk of `count` tokens that takes `seconds`."""
        self.tokens -= count
        self.seconds -= seconds
        self.least = max(0, self.least - count)
        if finishes:
            self.finishing += count
            self.shortest = self.shortest or count
        else:
            self.long = max(0, self.long - count)
