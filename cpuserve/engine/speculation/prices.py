"""GuessPrices: which texts get a guess of a drafter that has an executor of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cpuserve.core.speculation.budget import DraftBudget
from cpuserve.engine.speculation.texts import DraftTexts, DraftTurn

# The draft model runs whatever it costs until its first TRIALS steps have been measured.
# Where no draft pays, one is tried after TRY_AFTER rounds, because texts and prices change.
TRIALS, TRY_AFTER = 8, 64
# A guess may pay only with those after it: up to FARTHEST are considered, while their chance is at
# least UNLIKELY.
FARTHEST, UNLIKELY = 4, 0.1


class GuessPrices:
    """Chooses the texts that get another guess, so that the tokens per second are the most.

    texts: the texts, whose cost model has the seconds of a step that guesses.
    most_rests: after so many rounds without a draft, one is tried; earlier at first (TRY_AFTER).
    is_worth: whether a text is worth its missing keys, if drafts save so many seconds a token;
      None = every text is.
    """

    def __init__(
        self,
        texts: DraftTexts,
        most_rests: int = TRY_AFTER,
        is_worth: Callable[[DraftTurn, float], bool] | None = None,
    ) -> None:
        self._texts = texts
        self._most_rests = most_rests
        self._is_worth = is_worth
        self._rests = 0  # the rounds since the last one with a draft
        self._try_after = TRY_AFTER

    @property
    def is_trained(self) -> bool:
        """Whether enough steps of the drafter were measured to know their prices."""
        return self._texts.num_steps >= TRIALS

    def rest_for(self, rounds: int) -> bool:
        """Whether no guess has paid for a while, and none is tried in the next `rounds` rounds."""
        return 0 < self._rests < self._try_after - rounds

    def choose(self, turns: list[DraftTurn], budget: DraftBudget) -> list[DraftTurn]:
        """Return the turns that pay; now and then one that does not, to learn whether it would."""
        if not turns or not self.is_trained:
            return turns[:1]
        step_tokens, step_s = budget.num_tokens, budget.step_s
        paying = self.paying(turns, budget)
        if paying:
            self._rests, self._try_after = 0, TRY_AFTER
            if self._is_worth is None:
                return paying
            saved_s = self._saved(paying, step_tokens, step_s, budget.draft_s)
            return [turn for turn in paying if self._is_worth(turn, saved_s)]
        self._rests += 1
        if self._rests < self._try_after:
            return []
        self._rests, self._try_after = 0, min(2 * self._try_after, self._most_rests)
        turns[0].request.most_drafts = 1
        return turns[:1]

    def paying(self, turns: list[DraftTurn], budget: DraftBudget) -> list[DraftTurn]:
        """Return the turns whose next guesses pay together, and take them from the budget."""
        turns.sort(key=lambda turn: -turn.expected)
        num_paying, highest_rate, guess_s = 0, budget.num_tokens / budget.step_s, 0.0
        gain, keys = 0.0, 0
        for count, turn in enumerate(turns, 1):
            gain += turn.expected
            keys += turn.text.computed
            seconds = self._texts.cost.decode_seconds(count, keys)
            rate = _highest_rate(gain, turn.text.chances.mean, count, seconds, budget)
            if rate > highest_rate:
                num_paying, highest_rate, guess_s = count, rate, seconds
        budget.num_tokens += sum(turn.expected for turn in turns[:num_paying])
        budget.base_s += guess_s
        budget.num_drafts += num_paying
        return turns[:num_paying]

    def _saved(
        self, turns: Sequence[DraftTurn], step_tokens: float, step_s: float, draft_s: float
    ) -> float:
        """Return the seconds that guesses of these turns are expected to save for each token.

        step_tokens, step_s: the tokens and the seconds of a step without drafts.
        """
        count = len(turns)
        guess_s = self._texts.cost.decode_seconds(count, 0) + count * draft_s
        mean = sum(turn.expected for turn in turns) / count
        tokens, seconds, gain = step_tokens, step_s, count * mean
        while gain * seconds > tokens * guess_s and gain > 1e-3:
            tokens, seconds, gain = tokens + gain, seconds + guess_s, gain * mean
        return max(step_s - seconds * step_tokens / tokens, 0.0)


def _highest_rate(
    gain: float, mean: float, count: int, seconds: float, budget: DraftBudget
) -> float:
    """Return the tokens per second with the best number of further guesses of `count` turns.

    A row may be the first one of another pass over the weights, so that it pays only with
    the rows after it.

    gain: the tokens that the next guesses are expected to give; later ones, `mean` times as
      many each. seconds: the time of a step of the draft model.
    """
    tokens, step_s, rate = budget.num_tokens, budget.step_s, 0.0
    for guesses in range(1, FARTHEST + 1):
        tokens += gain
        gain *= mean
        seconds_to_verify = budget.seconds_for(guesses * count)
        rate = max(rate, tokens / (step_s + guesses * seconds + seconds_to_verify))
        if gain < count * UNLIKELY:
            break
    return rate
