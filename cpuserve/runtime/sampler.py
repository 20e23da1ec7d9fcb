"""Samples one row of logits with numpy, for the executors that run on torch.

The semantics and their order follow csrc/kernels/table/sampling.h, "Sampling of one row".
The samplers of llama.cpp (STAGES of sampling/chain.py) follow csrc/runtime/sampler_chain.cpp.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cpuserve.sampling.chain import Chain
from cpuserve.sampling.params import GREEDY_BELOW, SamplingParams
from cpuserve.sampling.slot import SlotRequest

Ids = npt.NDArray[np.intp]
Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

XTC_SEED = 0x2545F4914F6CDD1D  # xtc and the choice of the token need different random numbers
MIROSTAT_TOKENS = 100  # m in the paper on mirostat: the likeliest m tokens are fitted
MERGED_PREFIXES = 256  # number of candidates that infill compares in pairs
INFILL_SHARE = 0.2  # infill keeps candidates with at least this probability
LARGEST_LOG = 88.7228391  # limits the exponent of dry, so that the penalty is finite in fp32


@dataclass
class Candidates:
    """The tokens that can still be sampled: ids and logits [n], the most likely token first.

    If logits are equal, the lower id comes first.
    """

    ids: Ids
    logits: Float32

    @classmethod
    def of(cls, ids: Ids, logits: Float32) -> Candidates:
        """Return candidates with these ids and logits, sorted."""
        order = np.lexsort((ids, -logits))
        return cls(ids[order], logits[order])

    @property
    def p(self) -> Float64:
        """Return the probabilities of the candidates [n]."""
        mass: Float64 = np.exp(self.logits.astype(np.float64) - float(self.logits[0]))
        mass /= mass.sum()
        return mass

    @property
    def surprise(self) -> Float64:
        """Return the negative logarithms of the probabilities [n]."""
        x = self.logits.astype(np.float64)
        return float(x[0]) + float(np.log(np.exp(x - x[0]).sum())) - x

    @property
    def entropy(self) -> float:
        """Return the entropy: the expected surprise of the next token."""
        p = self.p
        return float((p[p > 0] * self.surprise[p > 0]).sum())

    def only(self, which: npt.NDArray[np.bool_] | slice) -> Candidates:
        """Return the candidates that `which` selects."""
        return Candidates(self.ids[which], self.logits[which])

    def first(self, count: int) -> Candidates:
        """Return the `count` most likely candidates."""
        return self.only(slice(0, count))


@dataclass(frozen=True)
class ChainRow:
    """The inputs of the samplers for one row.

    logits: [vocab], -inf for barred tokens.
    penalize: a function that applies the penalties to logits [vocab].
    stops: the tokens that may end the text.
    uniform(change): returns a random number in [0, 1) for the seed xor `change`.
    """

    logits: Float32
    penalize: Callable[[Float32], Float32]
    stops: Collection[int]
    uniform: Callable[[int], float]


class ChainSampler:
    """Samples the tokens of one request with a chain of samplers."""

    def __init__(
        self, chain: Chain, params: SamplingParams, tokens: Sequence[int], vocab: int
    ) -> None:
        self._chain = chain
        self._params = params
        self._tokens = list(tokens)
        self._vocab = vocab
        self._breakers: dict[int, list[list[int]]] = {}  # sequence breakers of dry, by first token
        for begin, end in itertools.pairwise([0, *chain.dry_breaker_ends]):
            breaker = chain.dry_breaker_ids[begin:end]
            self._breakers.setdefault(breaker[0], []).append(breaker)
        self._prefixes = np.asarray(chain.infill_prefixes, np.int32)
        self.mu = chain.mirostat_mu
        self.last = Candidates(np.zeros(0, np.intp), np.zeros(0, np.float32))

    def sample(self, row: ChainRow) -> int:
        """Return the next token, and count it. At least one logit must be finite."""
        ids = np.flatnonzero(row.logits > -np.inf)
        found = Candidates.of(ids, row.logits[ids])
        for stage in self._chain.stages:
            found = self._run(stage, found, row)
        if self._chain.mirostat:
            found = self._mirostat(found)
        p, by_id = found.p, np.argsort(found.ids)
        running = np.cumsum(p[by_id])
        at = int(np.searchsorted(running, row.uniform(0) * running[-1], "right"))
        chosen = by_id[min(at, int(np.flatnonzero(p[by_id]).max()))]
        token = int(found.ids[chosen])
        surprise = -float(np.log2(p[chosen]))
        self.mu -= self._chain.mirostat_eta * (surprise - self._chain.mirostat_tau)
        self.last = found
        self._tokens.append(token)
        return token

    def report(self, token: int, count: int) -> tuple[float, Ids, Float32]:
        """Return the logprob of the sampled token, and ids and logprobs of the likeliest tokens."""
        with np.errstate(divide="ignore"):
            logprobs = np.log(self.last.p)
        at = int(np.flatnonzero(self.last.ids == token)[0])
        return float(logprobs[at]), self.last.ids[:count], logprobs[:count].astype(np.float32)

    def _run(self, stage: str, found: Candidates, row: ChainRow) -> Candidates:
        """Return the candidates that are left after sampler `stage`."""
        samplers: dict[str, Callable[[], Candidates]] = {
            "penalties": lambda: self._changed(found, row.penalize),
            "dry": lambda: self._changed(found, self._dry),
            "top_n_sigma": lambda: self._top_n_sigma(found),
            "top_k": lambda: found.first(self._params.top_k) if self._params.top_k > 0 else found,
            "typ_p": lambda: self._typical(found),
            "top_p": lambda: self._top_p(found),
            "min_p": lambda: self._min_p(found),
            "xtc": lambda: self._xtc(found, row.uniform),
            "temperature": lambda: self._tempered(found),
            "infill": lambda: self._infill(found, row),
        }
        return samplers[stage]()

    def _changed(self, found: Candidates, change: Callable[[Float32], Float32]) -> Candidates:
        """Return the candidates after `change`, which takes and returns logits [vocab]."""
        row = np.full(self._vocab, -np.inf, np.float32)
        row[found.ids] = found.logits
        with np.errstate(invalid="ignore"):
            row = change(row)
        return Candidates.of(found.ids, row[found.ids])

    def _dry(self, row: Float32) -> Float32:
        chain = self._chain
        last = chain.dry_penalty_last_n
        tokens = self._tokens if last < 0 else self._tokens[max(0, len(self._tokens) - last) :]
        allowed = chain.dry_allowed_length
        limit = self._since_breaker(tokens)
        if len(tokens) <= allowed or limit < allowed:
            return row
        longest: dict[int, int] = {}
        for i, repeat in enumerate(_repeats(tokens)):
            repeat = min(repeat, limit)
            if repeat >= allowed:
                token = tokens[i + 1]
                longest[token] = max(longest.get(token, 0), repeat)
        base = chain.dry_base
        most = int(LARGEST_LOG / float(np.log(base))) if base > 1.000001 else 0
        for token, repeat in longest.items():
            exponent = repeat - allowed
            exponent = min(exponent, most) if most else exponent
            row[token] -= np.float32(chain.dry_multiplier * base**exponent)
        return row

    def _since_breaker(self, tokens: list[int]) -> int:
        """Return the number of tokens after the last sequence breaker."""
        for begin in range(len(tokens) - 1, -1, -1):
            breakers = self._breakers.get(tokens[begin], ())
            sizes = [len(b) for b in breakers if tokens[begin : begin + len(b)] == b]
            if sizes:
                return len(tokens) - begin - max(sizes)
        return len(tokens)

    def _top_n_sigma(self, found: Candidates) -> Candidates:
        x = found.logits[found.logits > -np.inf].astype(np.float64)
        if self._chain.top_n_sigma <= 0 or len(found.ids) <= 1:
            return found
        return found.only(found.logits >= x.max() - self._chain.top_n_sigma * x.std())

    def _typical(self, found: Candidates) -> Candidates:
        if self._chain.typical_p >= 1:
            return found
        order = np.lexsort((found.ids, np.abs(found.surprise - found.entropy)))
        count = int((np.cumsum(found.p[order]) <= self._chain.typical_p).sum()) + 1
        chosen = order[: max(count, self._chain.min_keep)]
        return Candidates.of(found.ids[chosen], found.logits[chosen])

    def _top_p(self, found: Candidates) -> Candidates:
        if self._params.top_p >= 1:
            return found
        count = int((np.cumsum(found.p) < self._params.top_p).sum()) + 1
        return found.first(max(count, self._chain.min_keep))

    def _min_p(self, found: Candidates) -> Candidates:
        if self._params.min_p <= 0:
            return found
        least = float(found.logits[0]) + float(np.log(self._params.min_p))
        count = int((found.logits >= least).sum())
        return found.first(max(count, self._chain.min_keep))

    def _xtc(self, found: Candidates, uniform: Callable[[int], float]) -> Candidates:
        chain = self._chain
        if chain.xtc_probability <= 0 or chain.xtc_threshold > 0.5 or len(found.ids) < 2:
            return found
        if uniform(XTC_SEED) > chain.xtc_probability:
            return found
        dropped = int((found.p >= chain.xtc_threshold).sum()) - 1
        if dropped < 1 or len(found.ids) - dropped < chain.min_keep:
            return found
        return found.only(slice(dropped, None))

    def _tempered(self, found: Candidates) -> Candidates:
        temperature, spread = self._params.temperature, self._chain.dynatemp_range
        if spread > 0:
            if len(found.ids) <= 1:
                return found
            share = max(0.0, found.entropy / float(np.log(len(found.ids))))
            low = max(0.0, temperature - spread)
            width = temperature + spread - low
            temperature = low + width * share**self._chain.dynatemp_exponent
        if temperature >= GREEDY_BELOW:
            return Candidates.of(found.ids, found.logits / np.float32(temperature))
        logits = np.full(len(found.ids), -np.inf, np.float32)
        logits[0] = found.logits[0]
        return Candidates.of(found.ids, logits)

    def _infill(self, found: Candidates, row: ChainRow) -> Candidates:
        p, stop = found.p, np.isin(found.ids, list(row.stops))
        if 3 * p[stop].sum() * len(p) > p[~stop].sum():
            return found.only(stop)
        p, is_left = self._merged(found)
        kept = is_left & (stop | (p >= INFILL_SHARE))
        texts = int((kept & ~stop).sum())
        if texts == 0:
            ends = [i for i in sorted(row.stops) if row.logits[i] > -np.inf]
            token = max(ends, key=lambda i: row.logits[i]) if ends else int(found.ids[0])
            return Candidates(np.array([token], np.intp), row.logits[[token]])
        return found.only(kept & (stop | (p / p[kept].sum() >= 1 / (texts + 1))))

    def _merged(self, found: Candidates) -> tuple[Float64, npt.NDArray[np.bool_]]:
        """Merge each candidate with one that begins with its text; return (probabilities, mask).

        mask: True for the candidates that are left.
        """
        p, is_left = found.p, np.ones(len(found.ids), bool)

        def begins(token: int, text: int) -> bool:
            while token not in (-1, text):
                token = int(self._prefixes[token])
            return token == text

        count = min(MERGED_PREFIXES, len(p))
        for i, j in itertools.product(range(count), range(count)):
            if i == j or not (is_left[i] and is_left[j]):
                continue
            if begins(int(found.ids[j]), int(found.ids[i])):
                to, source = (j, i) if p[j] > p[i] else (i, j)
                p[to] += p[source]
                p[source], is_left[source] = 0, False
        return p, is_left

    def _mirostat(self, found: Candidates) -> Candidates:
        p = found.p
        with np.errstate(divide="ignore"):
            bits = -np.log2(p)
        if self._chain.mirostat == 2:
            keep = bits <= self.mu
            keep[0] = True
            return found.only(keep)
        count = min(MIROSTAT_TOKENS, int((p > 0).sum()))
        if count < 2:
            return found.first(1)
        ranks = np.arange(count - 1)
        t = np.log((ranks + 2) / (ranks + 1))
        s = float((t * np.log(p[: count - 1] / p[1:count])).sum() / (t * t).sum())
        with np.errstate(all="ignore"):
            excess = np.float64(s - 1)
            ratio = excess / (1 - np.float64(self._vocab) ** -excess)
            kept = (2.0**self.mu * ratio) ** (1 / np.float64(s))
        return found.first(max(int(kept), 1)) if kept < len(p) else found


def _repeats(tokens: Sequence[int]) -> list[int]:
    """For each token but the last, return how many tokens that end there equal the last tokens."""
    back = tokens[::-1]
    found, start, end = [0] * len(back), 0, 0
    for i in range(1, len(back)):  # this loop is the Z algorithm
        n = min(end - i, found[i - start]) if i < end else 0
        while i + n < len(back) and back[n] == back[i + n]:
            n += 1
        found[i] = n
        if i + n > end:
            start, end = i, i + n
    return found[:0:-1]


MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class TokenScore:
    """The logprob and rank of one token, and the requested alternatives, most likely first."""

    logprob: float
    rank: int
    top_ids: Int32
    top_logprobs: Float32


def score(logits: Float32, token: int, num_top: int, scored_ids: Sequence[int] = ()) -> TokenScore:
    """Return the score of `token` by unmodified logits [vocab], with `num_top` alternatives.

    If alternatives have equal logits, the lower id comes first.

    scored_ids: ids to report as the alternatives instead of the most likely ids.
    """
    top = float(logits.max())
    log_sum = top + float(np.log(np.exp(logits.astype(np.float64) - top).sum()))
    rank = 1 + int((logits > logits[token]).sum())
    ids = np.asarray(scored_ids, np.intp) if scored_ids else _descending(logits, num_top)
    logprobs = (logits[ids] - log_sum).astype(np.float32)
    return TokenScore(float(logits[token]) - log_sum, rank, ids.astype(np.int32), logprobs)


class SlotSampler:
    """The sampler state of one request slot: parameters and token counts."""

    def __init__(self, request: SlotRequest, vocab: int) -> None:
        params, prompt, output = request.params, request.prompt_ids, request.output_ids
        for what, ids in (
            ("the prompt", prompt),
            ("the output", output),
            ("stop ids", request.stop_ids),
            ("logit_bias", list(params.logit_bias or ())),
            ("allowed_token_ids", params.allowed_token_ids or []),
            ("bad_words", [i for word in params.bad_word_ids for i in word]),
            ("logprob_token_ids", params.scored_ids),
        ):
            if ids and not (min(ids) >= 0 and max(ids) < vocab):
                msg = f"{what} has a token id outside the vocabulary of {vocab}"
                raise ValueError(msg)
        self._params = params
        self._seed = request.seed
        self._stop_ids = request.stop_ids
        self._in_prompt = np.zeros(vocab, bool)
        self._in_prompt[prompt] = True
        self._counts = np.bincount(np.asarray(output, np.int64), minlength=vocab)
        self._num_outputs = len(output)
        window = params.penalty_window
        self._window: deque[int] | None = None
        if window >= 0:  # penalties count only the last `window` tokens, prompt or not
            counted = [*prompt, *output]
            self._window = deque(counted[max(0, len(counted) - window) :], maxlen=window)
            self._in_prompt[:] = False
            self._counts = np.bincount(np.asarray(self._window, np.int64), minlength=vocab)
        chain = request.chain
        self._chain: ChainSampler | None = None
        if chain is not None:
            self._chain = ChainSampler(chain, params, [*prompt, *output], vocab)
        self._output = list(output) if params.banned_ngram_size else None
        longest = max(map(len, params.bad_word_ids), default=0)
        self._recent = deque(output[-longest:], maxlen=longest)

    @property
    def mirostat_mu(self) -> float:
        """Return the value mu of mirostat; 0 without mirostat."""
        return self._chain.mu if self._chain else 0.0

    def score(self, logits: Float32, token: int, num_top: int) -> TokenScore:
        """Return the score of the token that was sampled last (see the function `score`)."""
        found = score(logits, token, num_top, self._params.scored_ids)
        if self._chain is None or not self._params.post_sampling_probs:
            return found
        logprob, ids, logprobs = self._chain.report(token, num_top)
        return TokenScore(logprob, found.rank, ids.astype(np.int32), logprobs)

    def sample(self, logits: Float32, position: int, mask: Int32 | None = None) -> int:
        """Sample the token at absolute `position` from logits [vocab], and count it as output.

        mask: one bit for each token id, 1 = allowed (StepArrays.masks); None = all are allowed.

        Returns -1 if no token can be sampled (see `is_distribution`).
        """
        with np.errstate(over="ignore"):
            if self._chain is None:
                adjusted = self._adjusted(logits, mask)
            else:  # a sampler of the chain applies the penalties
                adjusted = self._barred(logits, mask)
        if not is_distribution(adjusted):
            return -1
        token = self._choose(adjusted, position)
        self._count(token)
        self._num_outputs += 1
        self._recent.append(token)
        if self._output is not None:
            self._output.append(token)
        return token

    def _count(self, token: int) -> None:
        window = self._window
        if window is not None:
            if window.maxlen == 0:
                return
            if len(window) == window.maxlen:
                self._counts[window[0]] -= 1
            window.append(token)
        self._counts[token] += 1

    def _adjusted(self, logits: Float32, mask: Int32 | None = None) -> Float32:
        """Return the logits after steps 2 and 3 of sampling.h: barred ids, then penalties."""
        return self._penalized(self._barred(logits, mask))

    def _barred(self, logits: Float32, mask: Int32 | None) -> Float32:
        """Return the logits after step 2 of sampling.h: bias, allowed and banned ids, mask."""
        p = self._params
        x = logits.astype(np.float32, copy=True)
        for id_, value in (p.logit_bias or {}).items():
            x[id_] += np.float32(value)
        if p.allowed_token_ids is not None:
            barred = np.ones(len(x), bool)
            barred[p.allowed_token_ids] = False
            x[barred] = -np.inf
        if self._num_outputs < p.min_tokens:
            x[self._stop_ids] = -np.inf
        for *before, last in p.bad_word_ids:
            if before == list(self._recent)[len(self._recent) - len(before) :]:
                x[last] = -np.inf
        if self._output is not None:
            x[list(repeated_ends(self._output, p))] = -np.inf
        if mask is not None:
            x[~allowed_by(mask, len(x))] = -np.inf
        return x

    def _penalized(self, x: Float32) -> Float32:
        """Return the logits after step 3 of sampling.h: penalties."""
        p = self._params
        if p.repetition_penalty != 1.0:
            seen = self._in_prompt | (self._counts > 0)
            penalty = np.float32(p.repetition_penalty)
            x[seen] = np.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
        if p.frequency_penalty or p.presence_penalty:
            counts = self._counts.astype(np.float32)
            x -= np.float32(p.frequency_penalty) * counts
            x -= np.float32(p.presence_penalty) * (counts > 0)
        return x

    def _choose(self, x: Float32, position: int) -> int:
        """Return the likeliest token, or a random one after temperature and filters (steps 4-6)."""
        p = self._params
        if self._chain is not None:
            stops = self._stop_ids if self._num_outputs >= p.min_tokens else []
            random = lambda change: uniform((self._seed ^ change) & MASK64, position)  # noqa: E731
            return self._chain.sample(ChainRow(x, self._penalized, stops, random))
        if p.temperature < GREEDY_BELOW:
            return int(x.argmax())
        scaled = (x / np.float32(p.temperature)).astype(np.float64)
        mass = np.exp(scaled - scaled.max())
        kept = np.flatnonzero(keep(mass, p.min_p, p.top_k, p.top_p))
        running = np.cumsum(mass[kept])
        at = int(np.searchsorted(running, uniform(self._seed, position) * running[-1], "right"))
        return int(kept[min(at, len(kept) - 1)])


def repeated_ends(output: Sequence[int], params: SamplingParams) -> set[int]:
    """Return the ids that would complete an n-gram of the output again, but for exempt_ids."""
    size, window = params.banned_ngram_size, params.banned_ngram_window
    seen = list(output) if window < 0 else list(output[-window:])
    before = list(output[len(output) - size + 1 :])
    ends = (seen[at + size - 1] for at in range(len(seen) - size + 1)
            if seen[at : at + size - 1] == before)  # fmt: skip
    return set(ends) - set(params.exempt_ids)


def allowed_by(mask: Int32, vocab: int) -> npt.NDArray[np.bool_]:
    """Return a bool array [vocab]: whether the bit of each token id is set in `mask`."""
    bits = np.unpackbits(mask.astype("<i4").view(np.uint8), bitorder="little", count=vocab)
    return bits.astype(bool)


def is_distribution(logits: Float32) -> bool:
    """Return whether no logit is NaN and the largest logit is finite."""
    return bool(np.isfinite(logits.max()))


def keep(mass: Float64, min_p: float, top_k: int, top_p: float) -> npt.NDArray[np.bool_]:
    """Return a mask of the ids that min_p, top_k and top_p keep; mass [vocab] is unnormalized."""
    kept: npt.NDArray[np.bool_] = (mass > 0) & (mass >= min_p * mass.max())
    if 0 < top_k < int(kept.sum()):
        chosen = _descending(np.where(kept, mass, -1.0), top_k)
        kept = np.zeros(len(mass), bool)
        kept[chosen] = True
    if top_p < 1.0:
        order = np.flatnonzero(kept)
        order = order[np.argsort(-mass[order], kind="stable")]
        running = np.cumsum(mass[order])
        # The fewest of the most likely ids that have a share of top_p or more of the mass.
        length = int(np.searchsorted(running, top_p * running[-1], "left")) + 1
        kept[order[length:]] = False
    return kept


def uniform(seed: int, position: int) -> float:
    """Return the top 53 bits of splitmix64's finalizer for (seed, position), in [0, 1)."""
    z = (seed + GOLDEN * (position + 1)) & MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    z ^= z >> 31
    return (z >> 11) * 2.0**-53


def _descending(x: npt.NDArray[np.floating], count: int) -> npt.NDArray[np.intp]:
    """Return the indices of the `count` largest values, descending; ties in index order."""
    count = min(count, len(x))
    if count <= 0:
        return np.zeros(0, np.intp)
    limit = np.partition(x, len(x) - count)[len(x) - count]
    above = np.flatnonzero(x >= limit)
    return above[np.argsort(-x[above], kind="stable")][:count]
