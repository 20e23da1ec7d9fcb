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
# Chunks are sized for the target less this: steps take longer than predicted now and then, and
# what a client waits for is a step and the way to it.
MARGIN = 1.2
# Where decoding alone already takes most of the target, prompts may still take as much again; where
# it is far below, a prompt is not to be felt as a pause.
LEAST_STRETCH, MOST_STRETCH = 2.0, 3.0
# Until a longer one has been seen, a chunk beside streams is at most this, then twice the longest.
FIRST_CHUNK = 64
_ROWS, _KEYS, _TOKENS, _PAIRS = 16.0, 16384.0, 256.0, 256.0 * 16384.0
_GAIN_UP, _GAIN_DOWN, _MOST_ERROR = 0.5, 0.35, 0.5
_TRAINED = 8
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
        self._decode_steps = 0

    def decode_seconds(self, rows: int, keys: int) -> float:
        """The step without prompt tokens."""
        return self.base + self.row * (rows / _ROWS) + self.key * (keys / _KEYS)

    def prompt_seconds(self, tokens: int, pairs: float) -> float:
        """What prompt tokens add to a step."""
        return self.token * (tokens / _TOKENS) + self.pair * (pairs / _PAIRS)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step that took `seconds`."""
        decode = self.decode_seconds(work.rows, work.keys)
        if not work.tokens:
            if work.rows:
                self._decode_steps += 1
                self._fit_decode(work, seconds - decode, decode)
            return
        self.longest_chunk = max(self.longest_chunk, work.tokens)
        self._observe_rate(work.tokens, seconds)
        prompt = self.prompt_seconds(work.tokens, work.pairs)
        if self._decode_steps < _TRAINED:
            # What decoding takes is a guess still: an error is anybody's.
            self._fit_prompt(work, seconds - decode - prompt, decode + prompt, with_base=True)
        else:
            # The prompt's share, at least a tenth however fast the machine has become.
            took = max(seconds - decode, 0.1 * seconds)
            self._fit_prompt(work, took - prompt, prompt, with_base=False)

    def _observe_rate(self, tokens: int, seconds: float) -> None:
        rate = tokens / max(seconds, 1e-6)
        # Short chunks say little about the rate of prompts.
        gain = _RATE_GAIN * min(1.0, tokens / _TOKENS) if self.prompt_rate else 1.0
        self.prompt_rate += gain * (rate - self.prompt_rate)

    def _fit_decode(self, work: StepWork, error: float, predicted: float) -> None:
        row, key = work.rows / _ROWS, work.keys / _KEYS
        step = _damped(error, predicted) / (1.0 + row * row + key * key)
        self.base = max(self.base + step, 1e-5)
        self.row = max(self.row + step * row, 0.0)
        self.key = max(self.key + step * key, 0.0)

    def _fit_prompt(
        self, work: StepWork, error: float, predicted: float, *, with_base: bool
    ) -> None:
        token, pair = work.tokens / _TOKENS, work.pairs / _PAIRS
        step = _damped(error, predicted) / (with_base + token * token + pair * pair)
        if with_base:
            self.base = max(self.base + step, 1e-5)
        self.token = max(self.token + step * token, 1e-6 * _TOKENS)
        self.pair = max(self.pair + step * pair, 0.0)

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
        longest = min(max(target_s, LEAST_STRETCH * decode), MOST_STRETCH * decode)
        return longest / MARGIN - decode

    def chunk(self, start: int, seconds: float) -> int:
        """Most prompt tokens from position `start` that take at most `seconds`."""
        if seconds <= 0.0:
            return 0
        # pair / _PAIRS (n start + n^2 / 2) + token / _TOKENS n = seconds, solved for n.
        square, linear = 0.5 * self.pair / _PAIRS, self.token / _TOKENS + self.pair / _PAIRS * start
        count = 2.0 * seconds / (linear + math.sqrt(linear * linear + 4.0 * square * seconds))
        return min(int(count), max(FIRST_CHUNK, 2 * self.longest_chunk))


def _damped(error: float, predicted: float) -> float:
    """The part of `error` to correct; one step that was held up must not spoil the rest."""
    gain = _GAIN_UP if error > 0.0 else _GAIN_DOWN
    return gain * min(error, _MOST_ERROR * predicted)


def rounded_chunk(start: int, count: int) -> int:
    """`count`, or a little less if the chunk then ends where the kernels like it."""
    if count < FINE:
        return count
    for unit, share in ((COARSE, 16), (FINE, 8)):
        over = (start + count) % unit
        if share * over <= count:
            return count - over
    return count
