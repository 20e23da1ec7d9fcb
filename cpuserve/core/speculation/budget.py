"""DraftBudget: how many draft tokens of a step are worth their time.

A draft token adds a row to the step. A row gets the number of draft tokens with the most expected
tokens per second. Reading the weights limits a step of one sequence: a row costs little,
so uncertain drafts pay.
Arithmetic limits a step of many sequences, so only drafts that are almost certainly right pay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cpuserve.core.cost import CostModel, StepWork

# A draft that is right this often is likely: it would pay if it took a quarter of the step.
LIKELY = 0.25
# Whether any draft can pay is asked for these numbers of certain drafts.
CERTAIN = (1, 2, 3, 4, 6, 8, 12, 16)
# Drafts have to pay although they take CAUTION times as long as predicted: prices and chances are
# measured with errors of 10 to 20 %, and drafts that seem to pay are more often those with errors.
CAUTION = 1.2
MOST_JUMPS = 128  # the most tokens of grammars that need no sampling in a step
# Beside prompts, drafts take at most a fourth of the tokens and of the time that prompts may take.
BESIDE_PROMPTS = 4


@dataclass(slots=True)
class StepLimits:
    """The limits of every step: the cost model, the most tokens, and the longest time.

    target_s: the longest time of a step with decode rows in seconds, 0 = no limit.
    prices: the cost model that decides which drafts pay; None = `cost` does.
    """

    cost: CostModel
    tokens: int
    target_s: float = 0.0
    prices: CostModel | None = None

    @property
    def price(self) -> CostModel:
        """The cost model that decides which drafts pay."""
        return self.prices or self.cost

    def seconds(self, rows: int, keys: int) -> float:
        """Return the seconds of `price` that drafts may add to a step with these decode rows."""
        if not self.target_s:
            return math.inf
        step_s = self.cost.decode_seconds(rows, keys)
        share = self.cost.allowance(rows, keys, self.target_s) / step_s
        return share * self.price.decode_seconds(rows, keys)


@dataclass(slots=True)
class DraftBudget:
    """The tokens and the time that a step has left for drafts.

    rows: number of decode rows of the step, with the tokens that are sure.
    keys: number of keys that the decode rows read.
    num_tokens: number of tokens that the step is expected to generate, with the drafts so far.
    base_s: seconds that the step is expected to take without drafts.
    num_drafts: number of draft tokens in the step so far.
    slow: whether some of the drafts so far are slow to sample (Request.samples_slowly).
    refused: whether a likely draft was left out because of its time.
    may_take_blocks: whether a sequence may take new blocks for draft tokens.
    """

    cost: CostModel
    tokens: int
    seconds: float
    rows: int
    keys: int
    num_tokens: float
    base_s: float
    num_drafts: int = 0
    slow: bool = False
    refused: bool = False
    may_take_blocks: bool = True

    @classmethod
    def after(cls, work: StepWork, limits: StepLimits) -> DraftBudget:
        """Return the budget that the decode rows and the sure tokens of `work` leave."""
        cost, rows = limits.price, work.rows + work.drafts
        return cls(
            cost,
            min(limits.tokens - rows, cost.most_drafts(rows)),
            seconds=limits.seconds(work.rows, work.keys),
            rows=rows,
            keys=work.keys,
            num_tokens=rows,
            base_s=cost.decode_seconds(work.rows, work.keys, work.drafts),
        )

    @property
    def step_s(self) -> float:
        """The seconds that the step is expected to take, with the drafts so far."""
        return self.base_s + self._seconds_of(self.num_drafts)

    @property
    def draft_s(self) -> float:
        """The seconds that one more draft token adds to the step."""
        return self.seconds_for(1)

    @property
    def most_jumps(self) -> int:
        """How many tokens that need no sampling are worth their time in the step."""
        return self.count([1.0] * min(self.tokens, MOST_JUMPS))

    @property
    def is_worth(self) -> bool:
        """Whether a draft that is certainly right would be worth its time in the step."""
        return any(
            n * self.base_s > self.num_tokens * CAUTION * self._seconds_of(n) for n in CERTAIN
        )

    def seconds_for(self, drafts: int) -> float:
        """Return the seconds that this number of further draft tokens adds to the step."""
        return self._seconds_of(self.num_drafts + drafts) - self._seconds_of(self.num_drafts)

    def share_with_prompts(self) -> None:
        """Leave most of the step to its prompts, which may also need the free blocks."""
        self.tokens //= BESIDE_PROMPTS
        self.seconds /= BESIDE_PROMPTS
        self.may_take_blocks = False

    def count(self, chances: Sequence[float]) -> int:
        """Return the number of draft tokens of a row with the most expected tokens per second.

        chances: the probability of each draft token, if the draft tokens before it are right.
        """
        seconds_before = self._seconds_of(self.num_drafts)
        num_tokens, chance, longest = self.num_tokens, 1.0, 0.0
        best, best_tokens, best_s = 0, num_tokens, self.base_s + seconds_before
        for count, right in enumerate(chances[: max(self.tokens, 0)], 1):
            chance *= right
            num_tokens += chance
            longest = max(longest, self._seconds_of(self.num_drafts + count) - seconds_before)
            if longest > self.seconds:
                break
            seconds = self.base_s + seconds_before + CAUTION * longest
            if num_tokens * best_s > best_tokens * seconds:
                best, best_tokens, best_s = count, num_tokens, seconds
        return best

    def take(self, chances: Sequence[float], *, slow: bool = False) -> int:
        """Take draft tokens with these chances that are worth their time; return how many.

        slow: whether their rows are slow to sample.
        """
        was_slow, seconds_before = self.slow, self._seconds_of(self.num_drafts)
        self.slow |= slow
        count = self.count(chances)
        if not count:
            self.slow = was_slow
            self.refused |= self.may_take_blocks and self.tokens > 0 and chances[0] >= LIKELY
            return 0
        self.tokens -= count
        self.num_drafts += count
        self.seconds -= self._seconds_of(self.num_drafts) - seconds_before
        chance = 1.0
        for right in chances[:count]:
            chance *= right
            self.num_tokens += chance
        return count

    def close(self) -> int:
        """Return the number of draft tokens in the step, after all rows have had their turn."""
        if self.refused and not self.num_drafts:
            self.cost.forgive_drafts()
        return self.num_drafts

    def _seconds_of(self, drafts: int) -> float:
        return self.cost.draft_seconds(self.rows, self.keys, drafts, slow=self.slow)
