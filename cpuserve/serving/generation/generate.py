"""Generation: run the sequences of a call; closing the generator of events aborts them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from cpuserve.base.errors import DeadlineExceeded, RequestError
from cpuserve.serving.calls.events import (
    Choice,
    Event,
    Finish,
    PromptProgress,
    PromptScores,
    SequenceFailure,
    TokenUsage,
    WholeResponse,
)
from cpuserve.serving.cancellation import CANCELLATIONS
from cpuserve.serving.generation.beam_search import beam_events
from cpuserve.serving.generation.fan_out import (
    admit,
    dismiss,
    start,
    usage_of,
)
from cpuserve.serving.generation.next_turn import TurnReader
from cpuserve.serving.generation.sequence import EventPace, SequenceRun
from cpuserve.serving.models.recent_prompts import as_shown, difference
from cpuserve.serving.threads import run_sized
from cpuserve.serving.tools.search_round import MOST_ROUNDS, SearchRound, after_search

if TYPE_CHECKING:
    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.sampling.beams import BeamRules
    from cpuserve.serving.calls.call import GenerateCall
    from cpuserve.serving.generation.plan import SequencePlan
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.models.recent_prompts import PromptDifference, RecentPrompt
    from cpuserve.serving.tools.use import ToolUse

# Lists of events per sequence that may be queued for a slow client,
# if a call has several sequences.
_QUEUED_PER_SEQUENCE = 8

Events = AsyncGenerator[list[Event], None]


Prepare = Callable[["GenerateCall"], Awaitable["Generation"]]


class Generation:
    """A checked call: its sequences, and their events while they run."""

    def __init__(
        self,
        context: ModelContext,
        call: GenerateCall,
        sequences: list[SequencePlan],
        prompt_tokens: int,
        tools: ToolUse | None = None,
        beginning: SequencePlan | None = None,
        *,
        turn: TurnReader | None = None,
        searches: tuple[GenerateCall, Prepare] | None = None,
    ) -> None:
        """beginning: computes the tokens that all prompts share, before the sequences run.

        turn: reads the response for the next turn of the conversation.
        searches: the call with its inputs and how to prepare a further round,
          if searches for tools may need further prompts.
        """
        self.context = context
        self.call = call
        self.sequences = sequences
        self.prompt_tokens = prompt_tokens
        self._tools = tools
        self._turn = turn
        self._searches = searches
        self._beginning = beginning
        self._rounds = [self]  # a Generation for each round; a search for tools ends a round

    def usage(self) -> TokenUsage:
        """Return the token counts so far."""
        return usage_of(sum(round_.prompt_tokens for round_ in self._rounds), self.all_sequences)

    @property
    def all_sequences(self) -> list[SequencePlan]:
        """The sequences of all rounds so far, and the one that computes a shared beginning."""
        beginning = [] if self._beginning is None else [self._beginning]
        return [*beginning, *self.shown_sequences]

    @property
    def shown_sequences(self) -> list[SequencePlan]:
        """The sequences of all rounds so far."""
        return [sequence for round_ in self._rounds for sequence in round_.sequences]

    @property
    def searches_tools(self) -> bool:
        """Whether the server runs searches for tools that the model asks for."""
        return self._searches is not None

    def set_id(self, response_id: str) -> None:
        """Set the id of the response; later requests of the caller refer to its prompt by it."""
        if (recent := self.sequences[0].tally.recent) is not None:
            recent.response_id = response_id

    def earlier(self, response_id: str) -> RecentPrompt | None:
        """Return the prompt of an earlier response of this caller; None if it is not known."""
        recent = self.context.recent
        return (
            None if recent is None else recent.named(self.sequences[0].params.caller, response_id)
        )

    def difference_from(self, earlier_prompt: RecentPrompt) -> PromptDifference | None:
        """Return the first difference of this prompt from an earlier one; None if there is none."""
        recent = self.sequences[0].tally.recent
        if recent is None:
            return None
        prompt_difference = difference(earlier_prompt, recent, self.context.decoder)
        return as_shown(prompt_difference, recent.caller, earlier_prompt.response_id)

    def cache_miss(self) -> dict[str, object] | None:
        """Return why tokens of an earlier prompt are computed again (RecentPrompt.miss)."""
        return cache_miss(self.sequences[0])

    def events(self) -> Events:
        """Yield the events of all sequences as they arrive, and `[TokenUsage]` at the end.

        Closing the generator aborts unfinished sequences.

        Raises:
          TooManyRequests: there is no capacity any more.
          RequestError: a sequence failed, or the engine has ended.
        """
        if self._searches is not None:
            return self._searching(*self._searches)
        if self.call.beams is not None:
            return self._best_beams(self.call.beams)
        if self._beginning is not None:
            return self._after(self._beginning)
        return self._one(self.sequences[0]) if len(self.sequences) == 1 else self._several()

    async def folded(self) -> WholeResponse:
        """Run all sequences until they have ended, and join their events to a whole response."""
        choices = [
            Choice(
                sequence.index,
                sequence.prompt,
                sequence.index if sequence.scored_by is None else sequence.scored_by,
            )
            for sequence in self.sequences
        ]
        response = WholeResponse(choices)
        async with aclosing(self.events()) as batches:
            async for events in batches:
                response.add(events)
        if self.call.num_best is not None:
            response.keep_best(self.sequences[0].n, self.call.num_best)
        return response

    async def _one(self, sequence: SequencePlan) -> Events:
        admit(self.context, self.sequences)
        usage_in_each, turn, is_whole = self.call.usage_in_each, self._turn, False
        try:
            async with aclosing(_run(self.context, sequence, self._tools)) as batches:
                async for events in batches:
                    if turn is not None:
                        turn.add(events)
                    if usage_in_each:
                        events.append(self.usage())
                    yield events
            is_whole = True
        finally:
            if turn is not None:
                turn.end(whole=is_whole)
        yield [self.usage()]

    async def _after(self, beginning: SequencePlan) -> Events:
        """Compute the tokens that all prompts share, then run the sequences."""
        admit(self.context, [beginning])
        async with aclosing(_run(self.context, beginning, None)) as batches:
            async for _ in batches:
                pass
        spent_s = time.monotonic() - beginning.tally.started
        self.sequences[:] = [sequence.after(spent_s) for sequence in self.sequences]
        async with aclosing(self._several()) as batches:
            async for events in batches:
                yield events

    async def _searching(self, call: GenerateCall, prepare: Prepare) -> Events:
        """Run the response in rounds: each one ends where the model searches for tools."""
        current, calls, searches = self, 0, 0
        start_s = self.sequences[0].tally.started
        while True:
            assert call.tool_search is not None
            part = SearchRound(call.tool_search, calls, searches)
            admit(current.context, current.sequences)
            run = _run(current.context, current.sequences[0], current._tools)
            async with aclosing(run) as batches:
                async for events in batches:
                    if text_events := part.read(events):
                        yield text_events
            calls, searches = part.num_calls, searches + len(part.searches)
            if not part.goes_on:
                yield [part.finish or Finish(0, "stop")]
                break
            results = await run_sized(call.tool_search.num_chars, part.run)
            yield list(results)
            num_tokens = current.sequences[0].tally.completion_tokens
            following = after_search(call, part, results, num_tokens)
            if isinstance(following, Finish) or len(self._rounds) == MOST_ROUNDS:
                yield [following if isinstance(following, Finish) else Finish(0, "pause")]
                break
            call = following
            current = await prepare(msgspec.structs.replace(call))
            next_sequence = current.sequences[0]
            current.sequences[0] = next_sequence.after(next_sequence.tally.started - start_s)
            self._rounds.append(current)
        yield [self.usage()]

    async def _best_beams(self, rules: BeamRules) -> Events:
        """Run a beam search for each prompt."""
        context, sequences = self.context, self.sequences
        admit(context, sequences)
        prompts: dict[int, list[SequencePlan]] = {}
        for sequence in sequences:
            prompts.setdefault(id(sequence.prompt), []).append(sequence)
        searches = [
            asyncio.create_task(beam_events(context, of_prompt, rules, self._tools))
            for of_prompt in prompts.values()
        ]
        try:
            for search in searches:
                yield await search
        finally:
            for search in searches:
                search.cancel()
            await asyncio.gather(*searches, return_exceptions=True)
            for sequence in sequences:  # the search of a sequence may never have started
                dismiss(context, sequence)
        yield [self.usage()]

    async def _several(self) -> Events:
        sequences, context = self.sequences, self.context
        admit(context, sequences)
        queue: _Queue = asyncio.Queue(_QUEUED_PER_SEQUENCE * len(sequences))
        scores: dict[int | None, _Scores]
        scores = {
            sequence.scored_by: _Scores()
            for sequence in sequences
            if sequence.scored_by is not None
        }
        tasks = [
            asyncio.create_task(
                _pump(
                    _run(context, sequence, self._tools),
                    sequence,
                    queue,
                    scores.get(sequence.index),
                    scores.get(sequence.scored_by),
                )
            )
            for sequence in sequences
        ]
        try:
            num_left = len(sequences)
            while num_left:
                events = await queue.get()
                if isinstance(events, SequenceFailure):
                    raise events.error
                if events is None:
                    num_left -= 1
                    continue
                if self.call.usage_in_each:
                    events.append(self.usage())
                yield events
        finally:
            for sequence, task in zip(sequences, tasks, strict=True):
                task.cancel()
                dismiss(context, sequence)  # a task that never started has not dismissed it
            await asyncio.gather(*tasks, return_exceptions=True)
        yield [self.usage()]


def cache_miss(sequence: SequencePlan) -> dict[str, object] | None:
    """Return why tokens of an earlier prompt are computed again (RecentPrompt.miss), or None."""
    tally = sequence.tally
    if tally.recent is None:
        return None
    # A prompt with logprobs is computed even if it is cached.
    is_known = tally.first_output and sequence.params.prompt_logprobs is None
    return tally.recent.miss(tally.cached_tokens if is_known else None)


async def _run(context: ModelContext, sequence: SequencePlan, tools: ToolUse | None) -> Events:
    """Yield the events of an admitted sequence; closing the generator aborts it."""
    metrics, params, num_prompt = context.metrics, sequence.params, len(sequence.prompt.ids)
    tally = sequence.tally
    who = params.caller, params.adapter or ""
    meter = metrics.start(num_prompt, params.max_tokens or 0, sequence.n, *who)
    tally.meter = meter
    reason = "abort"
    run = None
    pace = EventPace(sequence.interval)
    try:
        run = SequenceRun(context, sequence, tools)
        while True:
            if run.turns:
                events, count = run.turn()
                tally.count(count, run.num_reasoning)
                if events := pace.push(events, ends=run.finish is not None):
                    yield events
                if run.finish is not None:
                    break
            stream = context.client.generate(
                run.request, timeout_s=run.timeout_s, payload_of=sequence.prompt.payload_of
            )
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    if output.queue_full:
                        raise context.backlog.refusal(output.error or "The queue is full")
                    if output.processed:
                        yield [sequence.progress_of(output)]
                        continue
                    events, count = run.push(output)
                    if tally.in_backlog:
                        start(context, sequence, output.cached_tokens)
                        tally.cached_tokens = output.cached_tokens
                        if (why := cache_miss(sequence)) is not None:
                            metrics.on_cache_miss(str(why["reason"]))
                    waits = output.queued, output.held
                    metrics.on_tokens(meter, count, output.cached_tokens, output.scheduled, waits)
                    tally.count(count, run.num_reasoning, len(output.tokens), output.drafts)
                    if events := pace.push(events, ends=run.finish is not None):
                        yield events
                    if run.finish is not None or run.turns:
                        break
            if not run.turns:
                break
        reason = run.finish or reason
    except RequestError as error:
        reason = "late" if isinstance(error, DeadlineExceeded) else "error"
        raise
    finally:
        dismiss(context, sequence, reason)
        metrics.finish(meter, reason)
        if run is not None and tally.first_output:
            tally.response_ids = run.response_ids
            if tally.recent is not None and context.recent is not None:
                stop_tokens = {*context.bounds.eos_ids, *params.stop_token_ids}
                context.recent.remember(tally.recent, run.response_ids, stop_tokens)
                if context.kept is not None:
                    context.kept.put(tally.recent)


# An item is the events of one output, the failure of a sequence, or None at a sequence's end.
_Queue = asyncio.Queue["list[Event] | SequenceFailure | None"]


class _Scores:
    """Passes prompt logprobs from the sequence that computes them to the prompt's others."""

    def __init__(self) -> None:
        self.known = asyncio.Event()
        self._rows: list[TokenLogprob | None] | None = None

    def give(self, events: list[Event]) -> None:
        """Store the prompt logprobs from the first events with tokens, which contain them."""
        if not self.known.is_set():
            event = events[0]
            self._rows = event.scores if isinstance(event, PromptScores) else None
            self.known.set()

    def put_into(self, events: list[Event], index: int) -> None:
        """Put the logprobs, which must be known, before the events of choice `index`."""
        if self._rows is not None:
            events.insert(0, PromptScores(index, self._rows))


async def _pump(
    source: Events,
    sequence: SequencePlan,
    queue: _Queue,
    scores_to_give: _Scores | None,
    scores_to_take: _Scores | None,
) -> None:
    """Put the events of `sequence`, from `source`, into `queue`.

    scores_to_give: where to store the prompt logprobs that this sequence computes for others.
    scores_to_take: where to get the prompt logprobs that another sequence computes for this one.
    """
    # Events that arrive before the prompt logprobs are kept here. Events must not stay unread
    # in the engine's stream, because stop strings are found only when the text is read.
    held_events: list[list[Event]] = []

    async def show(scores: _Scores) -> None:
        await scores.known.wait()
        scores.put_into(held_events[0], sequence.index)
        for events in held_events:
            await queue.put(events)
        held_events.clear()

    try:
        async with aclosing(source) as batches:
            async for events in batches:
                progresses = isinstance(events[0], PromptProgress)
                if scores_to_give is not None and not progresses:
                    scores_to_give.give(events)
                if scores_to_take is None or progresses:
                    await queue.put(events)
                    continue
                held_events.append(events)
                if scores_to_take.known.is_set():
                    await show(scores_to_take)
                    scores_to_take = None
        if scores_to_take is not None and held_events:
            await show(scores_to_take)
        await queue.put(None)
    except CANCELLATIONS:
        raise
    except BaseException as error:
        await queue.put(SequenceFailure(error))
