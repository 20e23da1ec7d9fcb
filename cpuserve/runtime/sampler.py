"""Samples one row of logits with numpy, for the executors that run on torch.

The semantics and their order follow csrc/kernels/table/sampling.h, "Sampling of one row".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cpuserve.runtime.sampler_chain import ChainRow, ChainSampler
from cpuserve.sampling.params import GREEDY_BELOW
from cpuserve.sampling.slot import SlotRequest

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]

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
