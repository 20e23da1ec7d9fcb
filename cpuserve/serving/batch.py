"""Run many prompts to their ends on an engine in this process: the serving pipeline of `LLM`."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.errors import EngineDead
from cpuserve.serving.call import Prompt
from cpuserve.serving.events import Choice
from cpuserve.serving.text import TextProcessor

if TYPE_CHECKING:
    from cpuserve.engine.inline import InlineClient, Sink
    from cpuserve.engine.ipc import Output
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.tokenizer.tokenizer import Tokenizer


Ended = Callable[[int, Choice], None]


@dataclass(slots=True)
class BatchItem:
    """A prompt and its sampling parameters; `run_batch` fills in `choices` and `cached_tokens`."""

    ids: list[int]
    params: SamplingParams
    priority: int = 0
    choices: Sequence[Choice] = ()
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Sequence:
    position: int
    item: BatchItem
    choice: Choice
    processor: TextProcessor


def run_batch(
    client: InlineClient,
    tokenizer: Tokenizer,
    items: Sequence[BatchItem],
    ended: Ended,
) -> None:
    """Run all items and wait for them; an exception aborts the sequences that still run.

    ended(position of the item, choice) is called at the end of each sequence, while others run.

    Raises:
        InvalidRequest: the engine could never run an item.
        RequestError: the engine failed to compute an item.
        EngineDead: the engine has ended.
    """
    sink: Sink = queue.SimpleQueue()
    running: dict[int, _Sequence] = {}
    try:
        for position, item in enumerate(items):
            prompt = Prompt(item.ids)
            item.choices = [Choice(index, prompt, 0) for index in range(item.params.n)]
            for choice in item.choices:
                own = item.params.single(choice.index)
                processor = TextProcessor(tokenizer, item.ids, own)
                number = client.submit(item.ids, own, sink, item.priority)
                running[number] = _Sequence(position, item, choice, processor)
        while running:
            _take(client, running, sink.get(), ended)
    finally:
        if running:
            client.abort(running)


def _take(
    client: InlineClient,
    running: dict[int, _Sequence],
    output: Output | EngineDead,
    ended: Ended,
) -> None:
    """Add an output to its choice; a sequence that has ended is removed from `running`."""
    if isinstance(output, EngineDead):
        running.clear()
        raise output
    sequence = running.get(output.id)
    if sequence is None:
        return  # sent before the engine learned that a stop string ended the sequence
    item = sequence.item
    item.cached_tokens = max(item.cached_tokens, output.cached_tokens)
    events, _ = sequence.processor.push(output)
    for event in events:
        sequence.choice.add(event)
    if sequence.choice.reason is None:
        return
    del running[output.id]
    if output.finish is None:
        client.abort([output.id])
    ended(sequence.position, sequence.choice)
