"""BeamSearch: which continuations of a prompt go on, and which texts are the best.

A beam is a beginning of the response. At each step, the engine computes the most likely next tokens
of all beams, each as a request for one token after the tokens of the beam.
The blocks of these tokens are in the prefix cache, and logits do not depend on how a prompt
was computed. So the search is exact, and other requests in the same steps change no bit of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cpuserve.engine.ipc import TokenLogprob
from cpuserve.sampling.beams import BeamRules
from cpuserve.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Beam:
    """A beam: the tokens of a response, their logprobs, and `total`, the sum of the logprobs.

    score: the total divided by the length to the power of the length penalty.
    end: the last token, if this token ended the response; None = the response has not ended.
    """

    tokens: list[int]
    logprobs: list[TokenLogprob]
    total: float
    score: float
    end: int | None = None


def step_params(params: SamplingParams, rules: BeamRules) -> SamplingParams:
    """Return the parameters of the request for the next token of a beam."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        logprobs=max(2 * rules.width, params.logprobs or 0),
        cache_salt=params.cache_salt,
        adapter=params.adapter,
        adapter_scale=params.adapter_scale,
        caller=params.caller,
    )


class BeamSearch:
    """The search for the best responses to one prompt.

    Like vLLM and transformers, each step takes the 2 * width most likely tokens of each beam.
    A token that ends a text completes a response.
    The best `width` other continuations are the beams of the next step. The search ends
    after max_tokens, or when no beam can become better than the best `width` responses.
    """

    def __init__(
        self, num_prompt: int, rules: BeamRules, ends: Collection[int], max_tokens: int
    ) -> None:
        """num_prompt: the number of tokens of the prompt. ends: the tokens that end a text."""
        self.running = [Beam([], [], 0.0, 0.0)]
        self._ended: list[Beam] = []
        self._num_prompt = num_prompt
        self._rules = rules
        self._ends = ends
        self._most = max_tokens
        self._steps = 0

    @property
    def done(self) -> bool:
        """Whether the search has ended."""
        return self._steps >= self._most or not self.running or self._is_settled()

    def take(self, rows: Sequence[TokenLogprob]) -> None:
        """Do a search step; rows: for each beam of `running`, its likely next tokens (`top`)."""
        width = self._rules.width
        going: list[tuple[float, int, int, float, int]] = []
        for number, (beam, row) in enumerate(zip(self.running, rows, strict=True)):
            for rank, (token, logprob) in enumerate(row.top[: 2 * width], 1):
                if token in self._ends:
                    self._ended.append(self._grown(beam, row, token, logprob, rank, token))
                else:
                    going.append((beam.total + logprob, number, token, logprob, rank))
        going.sort(key=lambda each: -each[0])
        self.running = [
            self._grown(self.running[number], rows[number], token, logprob, rank)
            for _, number, token, logprob, rank in going[:width]
        ]
        self._ended = _best(self._ended, width)
        self._steps += 1

    def best(self, count: int) -> list[Beam]:
        """Return the best responses, best first, including those that max_tokens has cut."""
        return _best([*self._ended, *self.running], count)

    def _grown(
        self,
        beam: Beam,
        row: TokenLogprob,
        token: int,
        logprob: float,
        rank: int,
        end: int | None = None,
    ) -> Beam:
        entry = TokenLogprob(token, logprob, rank, row.top)
        tokens, total = [*beam.tokens, token], beam.total + logprob
        # As in transformers, the token that ends a text does not count for the length.
        score = self._score(total, len(tokens) - (end is not None))
        return Beam(tokens, [*beam.logprobs, entry], total, score, end)

    def _score(self, total: float, num_tokens: int) -> float:
        length = max(1, self._num_prompt + num_tokens)
        return float(total / length**self._rules.length_penalty)

    def _is_settled(self) -> bool:
        """Return whether no beam can become better than the responses that have ended.

        Each further token lowers the sum of the logprobs, and the length changes its divisor.
        So the best possible score is at the present length, or at the greatest one.
        """
        if len(self._ended) < self._rules.width:
            return False
        bound = self._ended[-1].score
        return all(
            max(self._score(beam.total, len(beam.tokens)), self._score(beam.total, self._most))
            <= bound
            for beam in self.running
        )


def _best(beams: Sequence[Beam], count: int) -> list[Beam]:
    return sorted(beams, key=lambda beam: -beam.score)[:count]
