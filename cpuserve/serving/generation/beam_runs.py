"""Run a beam search with the engine of a server: the events of its best responses."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING

from cpuserve.core.exclusion import stop_ids
from cpuserve.engine.client import EngineRequest
from cpuserve.engine.ipc import Output, TokenLogprob
from cpuserve.serving.generation.beam_search import BeamSearch, step_params
from cpuserve.serving.generation.fan_out import dismiss, start
from cpuserve.serving.generation.sequence import SequenceRun
from cpuserve.serving.generation.text import check_failed

if TYPE_CHECKING:
    from cpuserve.sampling.beams import BeamRules
    from cpuserve.serving.calls.events import Event
    from cpuserve.serving.generation.beam_search import Beam
    from cpuserve.serving.generation.fan_out import SequenceRequest
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.tools.use import ToolUse


async def beam_events(
    context: ModelContext,
    sequences: list[SequenceRequest],
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
    num_prompt, most = len(first.prompt.ids), params.max_tokens or 0
    who = params.caller, params.adapter or ""
    meters = [metrics.start(num_prompt, most, first.n, *who) for _ in sequences]
    for sequence, meter in zip(sequences, meters, strict=True):
        sequence.meter = meter
    reasons = ["error"] * len(sequences)
    try:
        run = _Run(context, sequences, rules)
        beams = await run.best()
        if tools is not None:  # a search cannot end a thought that is too long
            tools = replace(tools, thoughts=replace(tools.thoughts, budget=None))
        events: list[Event] = []
        for i, (sequence, beam) in enumerate(zip(sequences, beams, strict=False)):
            text = SequenceRun(context, sequence, tools)
            shown, count = text.push(_output(beam, context.bounds.eos_ids, params.logprobs))
            metrics.on_tokens(meters[i], count, sequence.cached_tokens, run.scheduled)
            sequence.count(count, text.num_reasoning)
            sequence.response_ids = text.response_ids
            reasons[i] = text.finish or "length"
            events += shown
        return events
    finally:
        for sequence, meter, reason in zip(sequences, meters, reasons, strict=True):
            dismiss(context, sequence)
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
    """

    def __init__(
        self, context: ModelContext, sequences: list[SequenceRequest], rules: BeamRules
    ) -> None:
        self.scheduled = 0.0
        self._context = context
        self._sequences = sequences
        first = sequences[0]
        params = first.params
        self._params = step_params(params, rules)
        ends = stop_ids(params, context.bounds.eos_ids)
        num_prompt = len(first.prompt.ids)
        self._search = BeamSearch(num_prompt, rules, ends, params.max_tokens or 0)

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
        context, first = self._context, self._sequences[0]
        timeout = first.timeout_s
        if timeout is not None:
            timeout = max(1e-3, timeout - (time.monotonic() - first.started))
        request = EngineRequest(
            [*first.prompt.ids, *beam.tokens],
            self._params,
            first.priority,
            timeout_s=timeout,
            continues=not is_first,
        )
        found: TokenLogprob | None = None
        async with aclosing(context.client.generate(request)) as outputs:
            async for output in outputs:
                if output.queue_full:
                    raise context.backlog.refusal(output.error or "The queue is full")
                if first.waits:
                    self._begin(output)
                check_failed(output)
                if output.logprobs:
                    found = output.logprobs[0]
        assert found is not None
        return found

    def _begin(self, output: Output) -> None:
        """Count the sequences as running; called for the first output of the search."""
        self.scheduled = output.scheduled
        for sequence in self._sequences:
            sequence.cached_tokens = output.cached_tokens
            start(self._context, sequence, output.cached_tokens)
