"""Predict how long a step takes on this host, learning from the steps that have run.

    seconds = base + row x (decode rows) + key x (keys that these rows read)
              + draft x (work of the rows of draft tokens) + token x (prompt tokens)
              + pair x ((query, key) pairs of the prompt chunks)
              + score x (scored prompt tokens)

The work of a row of a draft token depends on the number of rows before it (RowWork).
The weights base, row, key and so on are fitted online by normalized least mean squares.
Least mean squares needs a few multiplications per step,
stores no history, and adapts when other programs slow the machine.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuserve.core.kv.prefix import RestorePlan

# Prompt chunks end at a multiple of FINE tokens (a KV block), because kernels are fastest there.
# Long prompt chunks end at a multiple of COARSE tokens (an attention chunk).
FINE, COARSE = 32, 256
# A prompt chunk has at least this many tokens:
# a smaller one would read all weights of the model for almost no progress.
LEAST_CHUNK = 8
# The latency target should hold for slow steps as well. Chunks are therefore sized for the target
# divided by a quantile of (measured time / predicted time), which stays within two bounds. A step
# above the upper bound is not counted, because an interrupted step is late whatever its size.
SPREAD_QUANTILE, SPREAD_GAIN = 0.98, 0.05
LEAST_SPREAD, FIRST_SPREAD, MOST_SPREAD = 1.1, 1.2, 1.5
# Bounds for the time of a step with prompt tokens, as multiples of its time without prompt tokens.
# The first one lets prompts add two thirds of a decode step when decoding takes most of the target.
# The second one keeps a step short enough that running streams do not seem to pause.
LEAST_STRETCH, MOST_STRETCH = 1.67, 2.5
# In a step with running streams, a prompt chunk has at most FIRST_CHUNK tokens,
# or twice as many tokens as the longest chunk so far.
FIRST_CHUNK = 64
# The units of the weights of the cost model:
# `row` is the seconds of 16 decode rows, `key` is the seconds of 16384 keys, and so on.
_ROWS, _KEYS, _TOKENS, _PAIRS = 16.0, 16384.0, 256.0, 256.0 * 16384.0
# Few requests score their prompt (for logprobs), so `score` gets most of the error of such a step.
_SCORES = 64.0
# The unit of the weights of drafts: their rows do half the work of a step with one row.
_DRAFTS = 0.5
# Until the times of rows are measured, each row of a draft does this part of a step with one row.
_FIRST_DRAFT = 1.0 / 8
# The prices of other classes follow the learned one by this part of the difference in each step,
# because what slowed their last steps down may be over.
_OTHER_CLASSES = 0.002
# A row does at least this part of the work of a step with one row, for attention and sampling.
_LEAST_ROW = 1.0 / 256
# A pass of the kernels over the weights has at most this number of rows, or twice as many.
_PASS = 8
# The times of rows are known for steps of at most this number of rows. Every further row does
# as much work as a row of the upper half on average.
_MOST_ROWS = 256
# A step with drafts says what drafts add to the predicted time of a step without any, so that time
# must be right. After 4, 8, 16 and so on up to _DRAFT_STEPS steps in a row with drafts,
# _PLAIN_STEPS steps therefore have none, which costs about 1 % of the rate. There are two, because
# an error is corrected only if two steps in a row have it.
_FIRST_DRAFT_STEPS, _DRAFT_STEPS, _PLAIN_STEPS = 4, 64, 2
# Drafts that cost too much are not tried, so a price that slow steps raised would stay for ever. It
# falls by this factor in each step that leaves out likely drafts: by a third in 80 steps. A draft
# is a row of the step, so its price does not fall below the price of a decode row.
_FORGIVING_DRAFT = 0.995
_GAIN, _MOST_ERROR = 0.4, 0.5
_TRAINED = 8
# If prompts arrive without a pause, every step has decode rows and prompt tokens. Only the sum of
# their times is measured, so an error in the predicted decode time would never be corrected.
# One step in _MIXED_STEPS therefore gets a prompt chunk of another length, to separate the times.
# This costs 2 % of the prompt throughput if the chunk is as short as possible.
_MIXED_STEPS, _USUAL_GAIN = 24, 0.2
_RATE_GAIN = 0.2
_RESTORE_GAIN = 0.2
_FORGIVING = 0.98


@dataclass(slots=True)
class StepWork:
    """The numbers of rows, keys and tokens that decide how long a step takes.

    rows: number of decode rows.
    keys: number of keys that the decode rows read.
    tokens: number of prompt tokens.
    pairs: number of (query, key) pairs in the attention of the prompt tokens.
    scores: number of prompt tokens with requested log probabilities; each needs a row of logits.
    drafts: number of draft tokens that the step verifies.
    slow: whether the rows of drafts take more time to sample, for example with penalties.
    """

    rows: int = 0
    keys: int = 0
    tokens: int = 0
    pairs: float = 0.0
    scores: int = 0
    drafts: int = 0
    slow: bool = False

    def add_prompt(self, start: int, count: int, scores: int = 0) -> None:
        """Add a prompt chunk of `count` tokens at positions start, start + 1, ..."""
        self.tokens += count
        self.scores += scores
        self.pairs += count * (start + 0.5 * count)


class RowWork:
    """The work that further rows add to a step, as a fraction of a step with one row.

    Kernels multiply several rows in one pass over the weights, so the second row may cost almost
    nothing, while the first row of another pass costs as much as a step.

    times: (the number of rows, the seconds of a step with these rows), ascending from one row;
      the seconds of other numbers are interpolated. () = every row takes equally long.
    """

    def __init__(self, times: Sequence[tuple[int, float]] = ()) -> None:
        points = [(rows, seconds / times[0][1] - 1.0) for rows, seconds in times]
        if len(points) < 2:
            points = [(1, 0.0), (_MOST_ROWS, (_MOST_ROWS - 1) * _FIRST_DRAFT)]
        half = len(points) // 2
        (few, before), (many, after) = points[half - 1] if half else points[0], points[-1]
        self._last = max((after - before) / (many - few), _LEAST_ROW)
        self._work = [0.0, 0.0]  # of the rows after the first one, by the number of rows
        for (first, low), (last, high) in pairwise(points):
            each = max((high - max(low, self._work[-1])) / (last - first), _LEAST_ROW)
            self._work += [self._work[-1] + each * (i + 1) for i in range(last - first)]

    def of(self, rows: int, drafts: int) -> float:
        """Return the work that `drafts` rows add to a step of `rows` rows."""
        return self._after_first(rows + drafts) - self._after_first(rows)

    def _after_first(self, rows: int) -> float:
        known = len(self._work) - 1
        return self._work[min(rows, known)] + self._last * max(rows - known, 0)


# Prices of drafts are compared with each other, so time that other programs took must not be in
# them: they are the CPU time of the thread that runs the steps, where a clock can measure it.
_FINE_CLOCK = time.get_clock_info("thread_time").resolution < 1e-5
price_clock: Callable[[], float] = time.thread_time if _FINE_CLOCK else time.perf_counter

# Products with these numbers of rows are timed, with as many matrices as take ROWS_S with one row.
# Each is timed ROW_ROUNDS times, and the least time counts, because other programs can only slow
# a product down. All parts together take 0.4 s for a small model, and 1 s for a large one.
ROW_COUNTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
ROWS_S, ROW_ROUNDS = 0.005, 8


def row_times(
    probe: Callable[[int, int, int], object],
    matrices: int,
    most: int,
    clock: Callable[[], float] = price_clock,
) -> Iterator[list[tuple[int, float]]]:
    """Measure the same matrix products with 1 row and with more (Executor.row_times).

    probe: a function that runs products on this thread and others; it takes the number of rows,
      the first matrix and the number of matrices.
    most: the most rows.
    """
    if not matrices:
        return

    def seconds(rows: int, count: int) -> float:
        began = clock()
        probe(rows, 0, count)
        return clock() - began

    each = seconds(1, matrices) / matrices
    yield []
    count = min(matrices, max(round(ROWS_S / max(each, 1e-9)), 1))
    least = {rows: math.inf for rows in ROW_COUNTS if rows <= most}
    for _ in range(ROW_ROUNDS):
        for rows in least:
            least[rows] = min(least[rows], seconds(rows, count))
            yield []
    yield sorted(least.items())


# The price of a draft is learned for each class of steps with drafts (CostModel.class_of).
DraftClass = tuple[int, int, bool]


class CostModel:
    """Predicts step times. The initial weights predict more seconds than any machine should need.

    restore_s: seconds to restore one block from an offload tier, by kind of block
      (RestorePlan.kind). A kind of block that was never restored counts as 0 seconds.
    reads_experts: whether a chunk reads most experts of a mixture from the disk, however few tokens
      it has, so that a prompt in one chunk takes a fraction of the time.
    """

    def __init__(self) -> None:
        self.restore_s: dict[str, float] = {}
        self.reads_experts = False
        self.base, self.row, self.key = 0.02, 0.0003 * _ROWS, 0.002
        self.token, self.pair, self.score = 0.004 * _TOKENS, 0.1, 0.0
        self.row_work = RowWork()
        # The seconds of _DRAFTS work of drafts: as last learned (0: never), and in each class.
        self.draft = 0.0
        self._measured = 1.0  # the part of the measured price that is still believed
        self.drafts: dict[DraftClass, float] = {}
        self._forgiven = False
        self._draft_steps, self._most_draft_steps = 0, _FIRST_DRAFT_STEPS  # in a row, and at most
        self.longest_chunk = 0
        self.prompt_rate = 0.0
        self._rate_weight = 0.0
        self.spread = FIRST_SPREAD
        self._decode_steps = 0
        self._mixed_steps = 0
        self._usual_tokens = 0.0
        self._share_error = _Agreed()
        self._decode_error = _Agreed()
        self._draft_errors: defaultdict[DraftClass, _Agreed] = defaultdict(_Agreed)
        self._prompt_error = _Agreed()

    def decode_seconds(self, rows: int, keys: int, drafts: int = 0) -> float:
        """Return the predicted seconds of a step without prompt tokens."""
        decode = self.base + self.row * (rows / _ROWS) + self.key * (keys / _KEYS)
        return decode + self.draft_seconds(rows, keys, drafts) if drafts else decode

    def draft_seconds(self, rows: int, keys: int, drafts: int, *, slow: bool = False) -> float:
        """Return the predicted seconds that drafts add to a step with these decode rows."""
        work = self.row_work.of(rows, drafts) / _DRAFTS
        return self._draft_weight(class_of(rows, keys, drafts, slow=slow)) * work

    def _draft_weight(self, kind: DraftClass) -> float:
        """Return the seconds of _DRAFTS work, in this class or as last learned in another one."""
        return self.drafts.get(kind) or self.draft or self.base * _DRAFTS * self._measured

    def prompt_seconds(self, tokens: int, pairs: float, scores: int = 0) -> float:
        """Return the predicted seconds that prompt tokens add to a step."""
        linear = self.token * (tokens / _TOKENS) + self.score * (scores / _SCORES)
        return linear + self.pair * (pairs / _PAIRS)

    def step_seconds(self, work: StepWork) -> float:
        """Return the predicted seconds of a step with this work."""
        return self._decode_step(work) + self.prompt_seconds(work.tokens, work.pairs, work.scores)

    def _decode_step(self, work: StepWork) -> float:
        """Return the predicted seconds of a step without its prompts."""
        decode = self.decode_seconds(work.rows, work.keys)
        if not work.drafts:
            return decode
        return decode + self.draft_seconds(work.rows, work.keys, work.drafts, slow=work.slow)

    def observe(self, work: StepWork, seconds: float) -> None:
        """Correct the weights after a step with this work took `seconds`."""
        decode = self._decode_step(work)
        if not work.tokens:
            if work.rows:
                self._decode_steps += 1
                self._mixed_steps = 0
                self._observe_decode(work, seconds, decode)
            return
        prompt = self.prompt_seconds(work.tokens, work.pairs, work.scores)
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
            # The decode weights are not fitted yet, so the error may belong to any weight.
            error = _damped(seconds / (decode + prompt) - 1.0) * (decode + prompt)
            self._fit_prompt(work, error, with_base=True)
        else:
            # Assume that prompt tokens took a tenth of the step at least: `decode` may be too high.
            took = max(seconds - decode, 0.1 * seconds)
            error = self._prompt_error(took / prompt - 1.0) * prompt
            self._fit_prompt(work, error, with_base=False)

    def _observe_decode(self, work: StepWork, seconds: float, decode: float) -> None:
        """Correct the weights after a step without prompt tokens."""
        # An error is corrected only if two steps in a row have it. A step with drafts is compared
        # with the last one of its class, as other steps often run between them.
        error = seconds / decode - 1.0
        if work.drafts:
            self._forgiven = False
            kind = class_of(work.rows, work.keys, work.drafts, slow=work.slow)
            draft = self.row_work.of(work.rows, work.drafts) / _DRAFTS
            self._learn_draft(kind, self._draft_errors[kind](error) * decode / draft)
        else:
            self._fit_decode(work, self._decode_error(error) * decode)
        self._draft_steps += self.lacks_plain_steps or work.drafts > 0
        if self._draft_steps >= self._most_draft_steps + _PLAIN_STEPS:
            self._draft_steps = 0
            self._most_draft_steps = min(2 * self._most_draft_steps, _DRAFT_STEPS)
        elif not (work.drafts or self.lacks_plain_steps):
            self._draft_steps = 0

    @property
    def lacks_plain_steps(self) -> bool:
        """Whether the next step should have no drafts, so that its time without them is known."""
        return self._draft_steps >= self._most_draft_steps

    def _observe_rate(self, tokens: int, seconds: float) -> None:
        # Short chunks say little about prompt throughput, so they have less weight. The first chunk
        # sets the rate, but if it is short, the next chunk may still change the rate a lot.
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

    def _learn_draft(self, kind: DraftClass, change: float) -> None:
        """Add `change` to the price of drafts in a class."""
        self.draft = max(self._draft_weight(kind) + change, 1e-3 * self.base * _DRAFTS)
        for other, weight in self.drafts.items():
            self.drafts[other] = weight + _OTHER_CLASSES * (self.draft - weight)
        self.drafts[kind] = self.draft

    def forgive_drafts(self, steps: int = 1) -> None:
        """Reduce the learned time of drafts a little, after steps left out likely drafts."""
        factor = _FORGIVING_DRAFT**steps
        # The work of a row is at least _LEAST_ROW, so the price of a row stays above this weight.
        least = self.row / _ROWS * _DRAFTS / max(self.row_work.of(1, 16) / 16, _LEAST_ROW)
        for kind, weight in self.drafts.items():
            self.drafts[kind] = max(weight * factor, min(weight, least))
        self.draft = max(self.draft * factor, min(self.draft, least))
        self._measured = max(self._measured * factor, _LEAST_ROW)
        self._forgiven = True

    def most_drafts(self, rows: int) -> int:
        """Return the most drafts of the next step; 0 if its time without drafts is to be measured.

        A step that measures a forgiven price has the rows of one pass of the kernels.
        """
        if self._forgiven:
            return min(range(1, _PASS + 1), key=lambda n: self.row_work.of(rows, n) / n)
        return 0 if self.lacks_plain_steps else sys.maxsize

    def _fit_prompt(self, work: StepWork, error: float, *, with_base: bool) -> None:
        token, pair, score = work.tokens / _TOKENS, work.pairs / _PAIRS, work.scores / _SCORES
        step = error / (with_base + token * token + pair * pair + score * score)
        if with_base:
            self.base = max(self.base + step, 1e-5)
        self.token = max(self.token + step * token, 1e-6 * _TOKENS)
        self.pair = max(self.pair + step * pair, 0.0)
        self.score = max(self.score + step * score, 0.0)

    @property
    def other_chunk(self) -> int:
        """The tokens of the next prompt chunk if it must not have the usual length; else 0."""
        if self._mixed_steps < _MIXED_STEPS:
            return 0
        usual = round(self._usual_tokens)
        return LEAST_CHUNK if usual >= 2 * LEAST_CHUNK else usual + LEAST_CHUNK

    def _tells_apart(self, tokens: int) -> bool:
        return 2.0 * abs(tokens - self._usual_tokens) >= LEAST_CHUNK

    def _fit_shares(self, work: StepWork, error: float, prompt: float) -> None:
        # The prediction is right for steps of the usual length, and has to stay so. The time
        # of a prompt token is therefore multiplied by (1 + turn), and the decode time is reduced.
        usual = prompt * self._usual_tokens / work.tokens
        turn = max(self._share_error(error / (prompt - usual)), -_MOST_ERROR)
        self.token *= 1.0 + turn
        self.pair *= 1.0 + turn
        self.score *= 1.0 + turn
        # Only steps without prompts show the time of drafts.
        self._fit_decode(StepWork(work.rows, work.keys), -turn * usual)

    # --- restoring blocks from offload tiers --------------------------------------------------

    def restores(self, plan: RestorePlan, block_size: int) -> bool:
        """Whether restoring the blocks of `plan` is faster than computing them."""
        blocks = range(plan.begin, plan.end)
        start, tokens = plan.begin * block_size, len(blocks) * block_size
        seconds = sum(self.restore_s.get(plan.kind(block), 0.0) for block in blocks)
        if seconds <= self.prompt_seconds(tokens, tokens * (start + 0.5 * tokens)):
            return True
        # Reduce the learned time a little at each refusal, because the disk may have been busy only
        # for a moment. After some dozens of refusals, blocks are restored again.
        for kind in {plan.kind(block) for block in blocks} & self.restore_s.keys():
            self.restore_s[kind] *= _FORGIVING
        return False

    def observe_restore(self, kind: str, seconds: float) -> None:
        """Update the learned time for this kind of block, after restoring one took `seconds`."""
        before = self.restore_s.get(kind)
        gain = _RESTORE_GAIN if before is not None else 1.0
        self.restore_s[kind] = (before or 0.0) + gain * (seconds - (before or 0.0))

    # --- sizes of prompt chunks ---------------------------------------------------------------

    def allowance(self, rows: int, keys: int, target_s: float) -> float:
        """Return the seconds that prompt tokens may add to a step with these decode rows."""
        decode = self.decode_seconds(rows, keys)
        longest = max(target_s / self.spread, LEAST_STRETCH * decode)
        return min(longest, MOST_STRETCH * decode) - decode

    def chunk(self, start: int, seconds: float) -> int:
        """Return the most prompt tokens from position `start` that take at most `seconds`."""
        if seconds <= 0.0:
            return 0
        # Solve for n: pair / _PAIRS * (n * start + n^2 / 2) + token / _TOKENS * n = seconds.
        square, linear = 0.5 * self.pair / _PAIRS, self.token / _TOKENS + self.pair / _PAIRS * start
        count = 2.0 * seconds / (linear + math.sqrt(linear * linear + 4.0 * square * seconds))
        return min(int(count), max(FIRST_CHUNK, 2 * self.longest_chunk))


def class_of(rows: int, keys: int, drafts: int, *, slow: bool = False) -> DraftClass:
    """Return the class of a step with drafts, by its rows, the keys of a row, and sampling.

    The first class has 2 rows, and the next ones have up to 4, 8, 16 and so on.
    Contexts of up to 1k, 4k, 16k tokens and so on are different classes.
    """
    context = keys // max(rows, 1) >> 10
    return (rows + drafts - 1).bit_length(), (context.bit_length() + 1) // 2, slow


class _Agreed:
    """Returns the part of a relative error to correct: 0 unless the last error had the same sign.

    A single delayed step therefore does not change the weights of the cost model. If errors have
    both signs, predictions stay near the median of the step times. The mean is higher than the
    median, because of delayed steps.
    """

    def __init__(self, gain: float = _GAIN) -> None:
        self._before = 0.0
        self._gain = gain

    def __call__(self, error: float) -> float:
        before, self._before = self._before, error
        if (error > 0.0) != (before > 0.0):
            return 0.0
        return _damped(min(error, before, key=abs), self._gain)


def _damped(error: float, gain: float = _GAIN) -> float:
    """Return the part of a relative error to correct in one step: less than the whole error."""
    return gain * min(error, _MOST_ERROR)


def rounded_chunk(start: int, count: int) -> int:
    """Return `count`, or a little less to end the chunk at a boundary where kernels are fast."""
    if count < FINE:
        return count
    for unit, share in ((COARSE, 16), (FINE, 8)):
        over = (start + count) % unit
        if share * over <= count:
            return count - over
    return count
