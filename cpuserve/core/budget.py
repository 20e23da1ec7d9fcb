"""PromptBudget: divide the prompt tokens of one step among the prompts in progress.

The prompt with the fewest remaining tokens is served first, so that a short request passes a long
prompt. A quarter of the step is reserved for the oldest prompt, so that no prompt waits forever.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cpuserve.core.cost import COARSE, FINE, LEAST_CHUNK, CostModel, StepWork
from cpuserve.core.request import Request
from cpuserve.core.step import SeqChunk

OLDEST_SHARE = 4  # 1 / OLDEST_SHARE of a step is reserved for the oldest prompt
# A smaller part is reserved if the first prompt is fresh (CallerShares.is_fresh):
# it may have waited for a step of others, and should not take twice as long as without them.
SHARE_BESIDE_FRESH = 8
# A step without running streams completes prompts with at most SHORT remaining tokens.
# Of a longer prompt, such a step computes a chunk. Chunks of 64 tokens are large enough to amortize
# reading the weights: they are 7 % slower than whole prompts. Chunks of 256 tokens are 2 %
# slower (SmolLM2-135M on two AVX2 cores).
SHORT = COARSE
LEAST_LONG, MOST_LONG = 64, COARSE
# A prompt of at most TOGETHER tokens takes little longer than one token,
# because every step reads all weights.
TOGETHER = 16
# When a short prompt arrives, the running step may be ended early. The prompts of that step then
# compute their tokens again, but each loses at most 1 / LOSS_SHARE of its tokens in this way.
LOSS_SHARE = 6


def loss_allowed(requests: Iterable[Request], chunks: Iterable[SeqChunk]) -> float:
    """Return the fraction of a step's computed tokens that may be lost if it is ended early."""
    pairs = zip(requests, chunks, strict=True)
    return min((may_lose(r) / len(c.token_ids) for r, c in pairs), default=0.0)


def may_lose(request: Request) -> float:
    """Return how many more tokens of `request` may be computed and thrown away."""
    return max(len(request.token_ids) / LOSS_SHARE - request.num_lost, 0.0)


def long_chunk(request: Request) -> int:
    """Return how many tokens of a long prompt to compute in a step without running streams.

    A step that is ended early loses the tokens that it computed.
    So a chunk has no more tokens than the prompt may still lose (`may_lose`).
    But it has at least LEAST_LONG tokens, because a step of this length need not be ended early.
    """
    most = int(may_lose(request)) // FINE * FINE
    return min(max(most, LEAST_LONG), MOST_LONG)


def only_decisions(prompts: Iterable[Request]) -> bool:
    """Whether every prompt is a decision (Request.decides), so that none waits for a later step."""
    return all(request.decides for request in prompts)


@dataclass(slots=True)
class PromptBudget:
    """The tokens and the time that a step still has for prompts.

    seconds: the time left for prompts; infinite if no stream runs.
    least: number of prompt tokens that may be computed even if no time remains.
    short: prompts with at most this number of remaining tokens are completed in this step.
    long: number of tokens that all longer prompts may compute together.
    alone: whether no stream runs: a prompt then waits only for the other prompts of the step.
    finishing: number of tokens of all prompts that the step completes.
    shortest: number of tokens of the first prompt that the step completes, 0 = none yet.
    closed: whether no further prompt gets tokens in this step.
    restored: whether the step has restored a block from an offload tier,
      which is progress even if the step computes nothing.
    oldest_share: 1 / oldest_share of the step is reserved for the oldest prompt.
    ends_early: whether no stream runs, so that the step can be ended early for a new request.
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
    oldest_share: int = OLDEST_SHARE
    ends_early: bool = False

    @classmethod
    def of_step(
        cls, prompts: Sequence[Request], tokens: int, work: StepWork, cost: CostModel, target: float
    ) -> PromptBudget:
        """Return the budget of a step for `prompts`, with a time limit if streams wait for it.

        tokens: the tokens that the step has left besides decode rows and draft tokens, which `work`
          describes.
        target: the longest time of a step with decode rows in seconds, 0 = no limit.
        """
        if target and not work.rows:
            long = max(long_chunk(request) for request in prompts)
            if cost.reads_experts:
                long = tokens
            alone = not only_decisions(prompts)
            return cls(tokens, math.inf, 0, SHORT, long, alone=alone, ends_early=True)
        seconds, least = math.inf, 0
        if target:
            seconds = cost.allowance(work.rows, work.keys, target)
            seconds -= cost.draft_seconds(work.rows, work.keys, work.drafts, slow=work.slow)
            other = cost.other_chunk
            tokens, least = min(tokens, other or tokens), other or LEAST_CHUNK
        return cls(tokens, seconds, least, tokens, tokens, alone=False)

    @property
    def is_spent(self) -> bool:
        """Whether the step has no tokens or no time left for prompts."""
        return self.closed or self.tokens <= 0 or (self.seconds <= 0.0 and not self.least)

    def finishes(self, left: int) -> bool:
        """Whether this step may complete a prompt with `left` remaining tokens.

        All prompts of a step get their first token when the step ends, and a step may be long
        if no stream runs. A prompt that is much longer than the shortest prompt of the step is
        therefore not completed in this step, because the shortest prompt would have to wait for it.
        """
        most = self.short
        if self.alone and self.shortest:
            most = min(most, max(5 * self.shortest // 4, TOGETHER))
        return left <= most

    def holds_up(self, left: int) -> bool:
        """Whether a prompt with `left` remaining tokens delays prompts that the step completes."""
        return self.alone and self.shortest > 0 and not self.finishes(left)

    def keep_back(self) -> PromptBudget:
        """Move the share that is reserved for the oldest prompt out of this budget; return it."""
        share = self.oldest_share
        kept = PromptBudget(
            max(self.tokens // share, 1),
            self.seconds / share,
            self.least // share,
            self.short,
            max(self.long // share, 1),
            self.alone,
            ends_early=self.ends_early,
        )
        self.tokens -= kept.tokens
        self.seconds *= 1.0 - 1.0 / share
        self.least -= kept.least
        self.long -= kept.long
        return kept

    def give_back(self, kept: PromptBudget) -> None:
        """Return the share `kept` to this budget, just before the oldest prompt is served."""
        self.tokens += kept.tokens
        self.seconds += kept.seconds
        self.least += kept.least
        self.long += kept.long
        self.restored = False
        if self.alone and self.shortest:
            tokens = self.finishing // (self.oldest_share - 1)
            self.long = min(self.long, max(tokens, LEAST_CHUNK // self.oldest_share))
        if self.ends_early and self.oldest_share == SHARE_BESIDE_FRESH:
            self.short = self.long

    def most(self, left: int, labels: int = 0) -> int:
        """Return how many of a prompt's `left` remaining tokens may run, however long they take.

        labels: number of logit rows that the prompt needs for its labels (Request.num_labels).
          A step has at most as many logit rows as tokens.
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
