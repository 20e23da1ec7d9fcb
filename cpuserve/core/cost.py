"""What a step will take on this host, learned from the steps that have run.

    seconds = base + row x decode rows + key x keys they read + token x prompt tokens
              + pair x (query, key) pairs of the prompt chunks

The weights are fitted online by normalized least mean squares: a handful of multiplications a step,
no history to invert, and it follows a machine whose speed others change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Prompt chunks end where kernels like it: a block, and an attention chunk for long ones.
FINE, COARSE = 32, 256
# Fewer tokens than these would cost a step of reading all weights for next to nothing.
LEAST_CHUNK = 8
# The target is for what clients see at their worst, so chunks aim below it, by as much as steps
# here take longer than predicted: the quantile of took / predicted, within bounds. Steps beyond the
# upper one do not count: a step that was stopped for long is late whatever its size.
SPREAD_QUANTILE, SPREAD_GAIN = 0.98, 0.05
LEAST_SPREAD, FIRST_SPREAD, MOST_SPREAD = 1.1, 1.2, 1.5
# A step with a prompt, in decode steps: where decoding alone takes most of the target, prompts may
# still take two thirds of it on top; where it is far below, they are not to be felt as a pause.
LEAST_STRETCH, MOST_STRETCH = 1.67, 2.5
# Until a longer one has been seen, a chunk beside streams is at most this, then twice the longest.
FIRST_CHUNK = 64
_ROWS, _KEYS, _TOKENS, _PAIRS = 16.0, 16384.0, 256.0, 256.0 * 16384.0
_GAIN, _MOST_ERROR = 0.4, 0.5
_TRAINED = 8
# Where prompts never end, every step has both, and its time tells their sum only: a slow minute of
# decoding would be believed for as long as they come. One step in so many has a chunk of another
# length, which tells them apart; with the least one that costs 2 % of the prompts' rate.
_MIXED_STEPS, _USUAL_GAIN = 24, 0.2
_RATE_GAIN = 0.2
_RESTORE_GAIN = 0.2
_FORGIVING = 0.98


@dataclass(slots=True)
class StepWork:
    """What a step computes: decode rows and the keys they read, prompt tokens and their pairs."""

    rows: int = 0
    keys: int = 0
    tokens: int = 0
    pairs: float = 0.0

    def add_prompt(self, start: int, count: int) -> None:
        """A chunk of `count` tokens at positions start, start + 1, ..."""
        self.tokens += count
        self.pairs += count * (start + 0.5 * count)


class CostModel:
    """Predicts step times; starts slower than any machine should be.

    restore_s: seconds that restoring a KV block takes, by where it comes from; starts quicker than
    any memory should be.
    """

    def __init__(self) -> None:
        self.restore_s: dict[str, float] = {}
        self.base, self.row, self.key = 0.02, 0.0003 * _ROWS, 0.002
        self.token, self.pair = 0.004 * _TOKENS, 0.1
        self.longest_chunk = 0
        self.prompt_rate = 0.0
        self._rate_weight = 0.0
        self.spread = FIRST_SPREAD
        self._decode_steps = 0
        self._mixed_steps = 0
        self._usual_tokens = 0.0
        self._share_error = _Agreed()
        self._decode_error = _Agreed()
        self._prompt_error = _Agreed()

    def decode_seconds(self, rows: int, keys: int) -> float:
        """The step without prompt tokens."""
        return self.base + self.row * (rows / _ROWS) + self.key * (keys / _KEYS)

    def prompt_seconds(self, tokens: int, pairs: float) -> float:
        """What prompt tokens add to a step."""
        return self.token * (tokens / _TOKENS) + self.pair * (pairs / _PAIRS)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        decode = self.decode_seconds(work.rows, work.keys)
        prompt = self.prompt_seconds(work.tokens, work.pairs)
        if not work.tokens:
            if work.rows:
                self._decode_steps += 1
                self._mixed_steps = 0
                self._fit_decode(work, self._decode_error(seconds / decode - 1.0) * decode)
            return
        if work.rows and self._decode_steps >= _TRAINED:
            if self._mixed_steps >= _MIXED_STEPS and self._tells_apart(work.tokens):
                self._mixed_steps = 0
                self._fit_shares(work, seconds - decode - prompt, prompt)
                return
            self._mixed_steps += 1
            self._usual_tokens += _USUAL_GAIN * (work.tokens - self._usual_tokens)
            self._observe_spread(seconds / (decode + prompt))
        self.longest_chunk = max(self.longest_chunk, work.tokens)
        self._observe_rate(work.tokens, seconds)
        if self._decode_steps < _TRAINED:
            # What decoding takes is a guess still: an error is anybody's.
            error = _damped(seconds / (decode + prompt) - 1.0) * (decode + prompt)
            self._fit_prompt(work, error, with_base=True)
        else:
            # The prompt's share, at least a tenth however fast the machine has become.
            took = max(seconds - decode, 0.1 * seconds)
            error = self._prompt_error(took / prompt - 1.0) * prompt
            self._fit_prompt(work, error, with_base=False)

    def _observe_rate(self, tokens: int, seconds: float) -> None:
        # Short chunks say little about the rate of prompts. The first one is all there is, and yet
        # weighs no more than it says beside the next.
        weight = _RATE_GAIN * min(1.0, tokens / _TOKENS)
        self._rate_weight += weight * (1.0 - self._rate_weight)
        rate = tokens / max(seconds, 1e-6)
        self.prompt_rate += weight / self._rate_weight * (rate - self.prompt_rate)

    def _observe_spread(self, ratio: float) -> None:
        if ratio < MOST_SPREAD:
            step = SPREAD_GAIN * (SPREAD_QUANTILE - (ratio < self.spread))
            self.spread = min(max(self.spread + step, LEAST_SPREAD), MOST_SPREAD)

    def _fit_decode(self, work: StepWork, error: float) -> None:
        row, key = work.rows / _ROWS, work.keys / _KEYS
        step = error / (1.0 + row * row + key * key)
        self.base = max(self.base + step, 1e-5)
        self.row = max(self.row + step * row, 0.0)
        self.key = max(self.key + step * key, 0.0)

    def _fit_prompt(self, work: StepWork, error: float, *, with_base: bool) -> None:
        token, pair = work.tokens / _TOKENS, work.pairs / _PAIRS
        step = error / (with_base + token * token + pair * pair)
        if with_base:
            self.base = max(self.base + step, 1e-5)
        self.token = max(self.token + step * token, 1e-6 * _TOKENS)
        self.pair = max(self.pair + step * pair, 0.0)

    @property
    def other_chunk(self) -> int:
        """Prompt tokens that the next step should have, to tell them from decoding; 0: any."""
        if self._mixed_steps < _MIXED_STEPS:
            return 0
        usual = round(self._usual_tokens)
        return LEAST_CHUNK if usual >= 2 * LEAST_CHUNK else usual + LEAST_CHUNK

    def _tells_apart(self, tokens: int) -> bool:
        return 2.0 * abs(tokens - self._usual_tokens) >= LEAST_CHUNK

    def _fit_shares(self, work: StepWork, error: float, prompt: float) -> None:
        # What was learned holds for steps of the usual length, so the line through them turns:
        # what a token takes becomes (1 + turn) of it, and decoding the less for that.
        usual = prompt * self._usual_tokens / work.tokens
        turn = max(self._share_error(error / (prompt - usual)), -_MOST_ERROR)
        self.token *= 1.0 + turn
        self.pair *= 1.0 + turn
        self._fit_decode(work, -turn * usual)

    # --- restoring ----------------------------------------------------------------------------

    def restores(self, where: str, start: int, tokens: int) -> bool:
        """Restoring a block of `tokens` from position `start` is quicker than computing it."""
        seconds = self.restore_s.get(where, 0.0)
        if seconds <= self.prompt_seconds(tokens, tokens * (start + 0.5 * tokens)):
            return True
        # A disk may have been busy just then: after some dozens of refusals it gets another chance.
        self.restore_s[where] = _FORGIVING * seconds
        return False

    def observe_restore(self, where: str, seconds: float) -> None:
        """Restoring a block from `where` took `seconds`."""
        before = self.restore_s.get(where)
        gain = _RESTORE_GAIN if before is not None else 1.0
        self.restore_s[where] = (before or 0.0) + gain * (seconds - (before or 0.0))

    # --- chunks -------------------------------------------------------------------------------

    def allowance(self, rows: int, keys: int, target_s: float) -> float:
        """Seconds that prompt tokens may add to a step with these decode rows."""
        decode = self.decode_seconds(rows, keys)
        longest = max(target_s / self.spread, LEAST_STRETCH * decode)
        return min(longest, MOST_STRETCH * decode) - decode

    def chunk(self, start: int, seconds: float) -> int:
        """Most prompt tokens from position `start` that take at most `seconds`."""
        if seconds <= 0.0:
            return 0
        # pair / _PAIRS (n start + n^2 / 2) + token / _TOKENS n = seconds, solved for n.
        square, linear = 0.5 * self.pair / _PAIRS, self.token / _TOKENS + self.pair / _PAIRS * start
        count = 2.0 * seconds / (linear + math.sqrt(linear * linear + 4.0 * square * seconds))
        return min(int(count), max(FIRST_CHUNK, 2 * self.longest_chunk))


class _Agreed:
    """The part to correct of a relative error: what this step and the one before agree on.

    A step that was held up teaches nothing, and where noise goes both ways what is learned stays
    at its middle rather than at its mean, which the held-up ones raise.
    """

    def __init__(self) -> None:
        self._before = 0.0

    def __call__(self, error: float) -> float:
        before, self._before = self._before, error
        if (error > 0.0) != (before > 0.0):
            return 0.0
        return _damped(min(error, before, key=abs))


def _damped(error: float) -> float:
    """The part of a relative error to correct."""
    return _GAIN * min(error, _MOST_ERROR)


def rounded_chunk(start: int, count: int) -> int:
    """`count`, or a little less if the chunk then ends where the kernels like it."""
    if count < FINE:
        return count
    for unit, share in ((COARSE, 16), (FINE, 8)):
        over = (start + count) % unit
        if share * over <= count:
            return count - over
    return count
