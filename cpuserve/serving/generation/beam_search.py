"""Beam search: which continuations of a prompt go on, the best texts, and their events.

A beam is a beginning of the response. At each step, the engine computes the most likely next tokens
of all beams, each as a request for one token after the tokens of the beam.
The blocks of these tokens are in the prefix cache, and logits do not depend on how a prompt
was computed. So the search is exact, and other requests in the same steps change no bit of it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from cpuserve.base.errors import DeadlineExceeded
from cpuserve.core.exclusion import stop_ids
from cpuserve.engine.ipc import AddRequest, Output, TokenLogprob
from cpuserve.sampling.beams import BeamRules
from cpuserve.sampling.params import SamplingParams
from cpuserve.serving.cancellation import CANCELLATIONS
from cpuserve.serving.generation.fan_out import dismiss, start
from cpuserve.serving.generation.sequence import SequenceRun
from cpuserve.serving.generation.text import check_failed

if TYPE_CHECKING:
    from cpuserve.serving.calls.events import Event
    from cpuserve.serving.generation.plan import SequencePlan
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.tools.use import ToolUse


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
        self, num_prompt: int, rules: BeamRules, stop_tokens: Collection[int], max_tokens: int
    ) -> None:
        """num_prompt: the number of tokens of the prompt. ends: the tokens that end a text."""
        self.running = [Beam([], [], 0.0, 0.0)]
        self._ended: list[Beam] = []
        self._num_prompt = num_prompt
        self._rules = rules
        self._ends = stop_tokens
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
        going.sort(key=lambda candidate: -candidate[0])
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


async def beam_events(
    context: ModelContext,
    sequences: list[SequencePlan],
    rules: BeamRules,
    tools: ToolUse | None,
) -> list[Event]:
    """Search for the best responses to one prompt; return their events, the best response first.

    Cancelling this coroutine aborts the search.

    Raises:
      RequestError: the engine failed or has ended, or the request took too long.
    """
    first = sequences[0]
    metrics, params = context.metrics, first.params
    num_prompt, max_tokens = len(first.prompt.ids), params.max_tokens or 0
    who = params.caller, params.adapter or ""
    meters = [metrics.start(num_prompt, max_tokens, first.n, *who) for _ in sequences]
    for sequence, meter in zip(sequences, meters, strict=True):
        sequence.tally.meter = meter
    reasons, ended = ["error"] * len(sequences), ""
    try:
        run = _Run(context, sequences, rules)
        beams = await run.best()
        if tools is not None:  # a search cannot end a thought that is too long
            tools = replace(tools, thoughts=replace(tools.thoughts, budget=None))
        events: list[Event] = []
        for i, (sequence, beam) in enumerate(zip(sequences, beams, strict=False)):
            text = SequenceRun(context, sequence, tools)
            shown, count = text.push(_output(beam, context.bounds.eos_ids, params.logprobs))
            metrics.on_tokens(
                meters[i], count, sequence.tally.cached_tokens, run.scheduled, run.waits
            )
            sequence.tally.count(count, text.num_reasoning)
            sequence.tally.response_ids = text.response_ids
            reasons[i] = text.finish or "length"
            events += shown
        return events
    except (*CANCELLATIONS, DeadlineExceeded):
        ended = "abort"
        raise
    finally:
        for sequence, meter, reason in zip(sequences, meters, reasons, strict=True):
            dismiss(context, sequence, ended)
            metrics.finish(meter, reason)


def _output(beam: Beam, eos_ids: frozenset[int], num_top: int | None) -> Output:
    """Return the Output that the engine would send for the whole response of a beam."""
    finish = "length" if beam.end is None else "stop"
    stop_id = None if beam.end is None or beam.end in eos_ids else beam.end
    rows = None
    if num_top is not None:
        rows = [_shown(row, num_top) for row in beam.logprobs]
    return Output(0, beam.tokens, finish, stop_id, rows)


def _shown(row: TokenLogprob, num_top: int) -> TokenLogprob:
    return TokenLogprob(row.token, row.logprob, row.rank, row.top[:num_top])


class _Run:
    """The search for one prompt.

    scheduled: time.monotonic() when the engine first scheduled the prompt, 0.0 before.
    waits: Output.queued and Output.held of the prompt.
    """

    def __init__(
        self, context: ModelContext, sequences: list[SequencePlan], rules: BeamRules
    ) -> None:
        self.scheduled = 0.0
        self.waits: tuple[dict[str, float], dict[str, float]] = {}, {}
        self._context = context
        self._sequences = sequences
        sequence = sequences[0]
        params = sequence.params
        self._params = step_params(params, rules)
        stop_tokens = stop_ids(params, context.bounds.eos_ids)
        num_prompt = len(sequence.prompt.ids)
        self._search = BeamSearch(num_prompt, rules, stop_tokens, params.max_tokens or 0)

    async def best(self) -> list[Beam]:
        """Run the search, and return a beam for each sequence."""
        search, is_first = self._search, True
        while not search.done:
            steps = [
                asyncio.create_task(self._next(beam, is_first=is_first)) for beam in search.running
            ]
            try:
                rows = await asyncio.gather(*steps)
            finally:
                for step in steps:
                    step.cancel()
                await asyncio.gather(*steps, return_exceptions=True)
            search.take(rows)
            is_first = False
        return search.best(len(self._sequences))

    async def _next(self, beam: Beam, *, is_first: bool) -> TokenLogprob:
        """Return the most likely next tokens of a beam."""
        context, sequence = self._context, self._sequences[0]
        timeout = sequence.timeout_s
        if timeout is not None:
            timeout = max(1e-3, timeout - (time.monotonic() - sequence.tally.started))
        prompt = sequence.prompt
        request = AddRequest.of(
            [*prompt.ids, *beam.tokens],
            self._params,
            sequence.priority,
            continues=not is_first,
            media=prompt.media,
        )
        stream = context.client.generate(request, timeout_s=timeout, payload_of=prompt.payload_of)
        logprob: TokenLogprob | None = None
        async with aclosing(stream) as outputs:
            async for output in outputs:
                if output.queue_full:
                    raise context.backlog.refusal(output.error or "The queue is full")
                if sequence.tally.in_backlog:
                    self._begin(output)
                check_failed(output)
                if output.logprobs:
                    logprob = output.logprobs[0]
        assert logprob is not None
        return logprob

    def _begin(self, output: Output) -> None:
        """Count the sequences as running; called for the first output of the search."""
        self.scheduled, self.waits = output.scheduled, (output.queued, output.held)
        for sequence in self._sequences:
            sequence.tally.cached_tokens = output.cached_tokens
            start(self._context, sequence, output.cached_tokens)
