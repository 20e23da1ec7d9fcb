"""Run many prompts on an engine in this process: the serving pipeline of `LLM`."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from cpuserve.base.errors import EngineDead, InvalidRequest
from cpuserve.core.admission import output_limit
from cpuserve.core.exclusion import stop_ids
from cpuserve.serving.calls.call import Prompt
from cpuserve.serving.calls.events import Choice
from cpuserve.serving.generation.beam_search import BeamSearch, step_params
from cpuserve.serving.generation.fan_out import sequences_of, shared_beginning
from cpuserve.serving.generation.plan import SequencePlan
from cpuserve.serving.generation.prepare import read_prompts
from cpuserve.serving.generation.sequence import SequenceRun
from cpuserve.serving.prompts.chat_prompt import media_prompt as placed_prompt
from cpuserve.serving.tools.use import response_structure

if TYPE_CHECKING:
    from cpuserve.engine.inline import InlineClient, Sink
    from cpuserve.engine.ipc import Output
    from cpuserve.metrics.server import Sequence as Record
    from cpuserve.metrics.server import ServerMetrics
    from cpuserve.sampling.beams import BeamRules
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.calls.call import GenerateCall
    from cpuserve.serving.calls.events import Event
    from cpuserve.serving.generation.beam_search import Beam
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.tools.use import ToolUse
    from cpuserve.tokenizer.conversation import MediaPart

T = TypeVar("T")
Ended = Callable[[int, Choice], None]


@dataclass(slots=True)
class BatchItem:
    """The sequences of one prompt; `run_batch` sets `choices`, `cached_tokens` and `records`.

    tools: how to find thoughts and tool calls in the response; None = the response is only text.
    records: the times and counts of each sequence.
    """

    sequences: Sequence[SequencePlan]
    tools: ToolUse | None = None
    choices: Sequence[Choice] = ()
    cached_tokens: int = 0
    records: Sequence[Record] = ()

    @classmethod
    def of(cls, ids: list[int], params: SamplingParams, priority: int = 0) -> BatchItem:
        """Return the item of a prompt of token ids."""
        return cls(sequences_of(Prompt(ids), params, priority))

    @property
    def prompt(self) -> Prompt:
        """The prompt, which all sequences share."""
        return self.sequences[0].prompt


def chat_items(
    context: ModelContext, calls: Sequence[GenerateCall], params: Sequence[SamplingParams]
) -> list[BatchItem]:
    """Return the items of calls with messages, which are rendered and tokenized here.

    params: the sampling parameters of each call. Sampling fields of the call itself have no effect,
    but its structured_outputs must be equal to those in `params`.

    Raises:
        InvalidRequest: a call is invalid, or this model cannot serve it.
    """

    async def read() -> list[BatchItem]:
        return [
            await _chat_item(context, *call_params)
            for call_params in zip(calls, params, strict=True)
        ]

    return _result(read())


def media_prompt(
    context: ModelContext,
    ids: list[int],
    parts: Sequence[MediaPart],
    settings: Mapping[str, Any],
    salt: str | None,
) -> Prompt:
    """Return a prompt of token ids with one marker for each media item, which becomes placeholders.

    salt: the cache_salt of the prompt.

    Raises:
        InvalidRequest: the model reads text only, an item is refused, or the number of markers
            is not the number of items.
    """
    reader = context.media
    if reader is None:
        msg = "multi_modal_data is not possible, because this model reads text only: omit it"
        raise InvalidRequest(msg, param="prompts")
    return _result(placed_prompt(reader, ids, parts, settings, "prompts", salt))


def decision_items(
    context: ModelContext, call: GenerateCall, params: SamplingParams, priority: int = 0
) -> tuple[list[BatchItem], list[BatchItem]]:
    """Return ([the item of the beginning that all prompts share], the items of the questions).

    The first list is empty if the prompts have no such beginning. Otherwise its item must have
    ended before the items of the questions run.

    Raises:
        InvalidRequest: the call is invalid, or this model cannot serve it.
    """
    _, prompts = _result(read_prompts(context, call, num_bytes=0))
    sequences = [sequences_of(prompt, params, priority) for prompt in prompts]
    beginning = shared_beginning(sequences[0])
    first_items = [] if beginning is None else [BatchItem([beginning])]
    return first_items, [BatchItem(option_sequences) for option_sequences in sequences]


def _result(work: Awaitable[T]) -> T:
    """Return the result of asynchronous work, from code that has no event loop of its own."""
    # In a notebook the thread of the caller already runs an event loop.
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, _awaited(work)).result()


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _chat_item(
    context: ModelContext, call: GenerateCall, params: SamplingParams
) -> BatchItem:
    tools, (prompt,) = await read_prompts(context, call, num_bytes=0)
    form = response_structure(call, tools)
    # A thought and the text after it are separate engine requests that share one max_tokens.
    max_tokens = max(1, output_limit(len(prompt.ids), params, context.bounds))
    if params.max_tokens != 0:
        params = msgspec.structs.replace(params, max_tokens=max_tokens)
    form_params = msgspec.structs.replace(params, structured_outputs=form)
    return BatchItem(sequences_of(prompt, form_params, call.priority or 0), tools)


def run_batch(
    client: InlineClient, context: ModelContext, items: Sequence[BatchItem], ended: Ended
) -> None:
    """Run all items and wait for them; an exception aborts the sequences that still run.

    ended(position of the item, choice) is called at the end of each sequence, while others run.

    Raises:
        InvalidRequest: the engine could never run an item.
        RequestError: the engine failed to compute an item.
        EngineDead: the engine has ended.
    """
    batch = _Batch(client, context.metrics, ended)
    try:
        with client.together():
            for position, item in enumerate(items):
                item.choices = [
                    Choice(sequence.index, sequence.prompt, 0) for sequence in item.sequences
                ]
                item.records = records = [_record(context.metrics, e) for e in item.sequences]
                batch.open.update(dict.fromkeys(records))
                for request, choice, own in zip(item.sequences, item.choices, records, strict=True):
                    run = SequenceRun(context, request, item.tools)
                    batch.go_on(_Sequence(position, item, choice, run, own))
        while batch.running:
            batch.take(batch.sink.get())
    finally:
        if batch.running:
            client.abort(batch.running)
        for record in batch.open:
            context.metrics.finish(record, "abort")


def _record(metrics: ServerMetrics, request: SequencePlan) -> Record:
    max_tokens = request.params.max_tokens or 0
    return metrics.start(
        len(request.prompt.ids), max_tokens, request.n, adapter=request.params.adapter or ""
    )


@dataclass(frozen=True, slots=True)
class _Sequence:
    position: int
    item: BatchItem
    choice: Choice
    run: SequenceRun
    record: Record

    def add(self, events: list[Event]) -> None:
        for event in events:
            self.choice.add(event)


class _Batch:
    """The sequences that run now, by the id of their current engine request.

    open: the records of the sequences that have not ended.
    """

    def __init__(self, client: InlineClient, metrics: ServerMetrics, ended: Ended) -> None:
        self.running: dict[int, _Sequence] = {}
        self.open: dict[Record, None] = {}
        self._metrics = metrics
        self.sink: Sink = queue.SimpleQueue()
        self._client = client
        self._ended = ended

    def go_on(self, sequence: _Sequence) -> None:
        """Send the next engine request of a sequence, unless it has ended."""
        run = sequence.run
        while run.turns:
            sequence.add(run.turn()[0])
        if run.finish is not None:
            self.open.pop(sequence.record, None)
            self._metrics.finish(sequence.record, sequence.choice.reason or "stop")
            self._ended(sequence.position, sequence.choice)
            return
        self.running[self._client.submit(run.request, self.sink)] = sequence

    def take(self, output: Output | EngineDead) -> None:
        """Add an output to its choice; a sequence that has ended is removed from `running`."""
        if isinstance(output, EngineDead):
            self.running.clear()
            raise output
        sequence = self.running.get(output.id)
        if sequence is None:
            return  # the engine sent this output before a stop string ended the sequence here
        if output.wants:
            self._send_payload(output.id, sequence.item.prompt, output.wants)
            return
        item, run = sequence.item, sequence.run
        count, waits = len(output.tokens), (output.queued, output.held)
        self._metrics.on_tokens(
            sequence.record, count, output.cached_tokens, output.scheduled, waits
        )
        if run.is_first:
            item.cached_tokens = max(item.cached_tokens, output.cached_tokens)
        sequence.add(run.push(output)[0])
        if run.finish is None and not run.turns:
            return
        del self.running[output.id]
        if output.finish is None:
            self._client.abort([output.id])
        self.go_on(sequence)

    def _send_payload(self, number: int, prompt: Prompt, wants: Sequence[int]) -> None:
        """Send the payloads of media items that the engine asks for.

        Raises:
            InvalidRequest: an item cannot be decoded.
        """
        assert prompt.payload_of is not None, "nobody has the payloads"
        for index in wants:
            self._client.send_payload(number, index, _result(prompt.payload_of(index)))


def search_batch(
    client: InlineClient,
    context: ModelContext,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    rules: BeamRules,
) -> list[list[Beam]]:
    """Return the best responses to each prompt; a step computes the beams of all prompts.

    params: only max_tokens, ignore_eos and stop_token_ids have an effect; nothing is sampled.

    Raises:
        InvalidRequest: a prompt is empty, or too long for the context.
        RequestError, EngineDead: see `run_batch`.
    """
    beam_params, stop_tokens = step_params(params, rules), stop_ids(params, context.bounds.eos_ids)
    searches = []
    for ids in prompts:
        max_tokens = max(1, output_limit(len(ids), params, context.bounds))
        searches.append((ids, BeamSearch(len(ids), rules, stop_tokens, max_tokens)))
    while going := [(ids, search) for ids, search in searches if not search.done]:
        steps = [
            [BatchItem.of([*ids, *beam.tokens], beam_params) for beam in search.running]
            for ids, search in going
        ]
        run_batch(client, context, [item for of_prompt in steps for item in of_prompt], _ended)
        for (_, search), of_prompt in zip(going, steps, strict=True):
            search.take([item.choices[0].logprobs[0] for item in of_prompt])
    return [search.best(rules.width) for _, search in searches]


def _ended(position: int, choice: object) -> None:
    """Do nothing, because `run_batch` stores the choices in the items."""
