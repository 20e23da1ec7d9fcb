"""One sequence of a response in the turns that it takes: until its thought ends, and after that.

A structured output and a forced call come after the thought of a model that thinks, and a thought
with as many tokens as it may have is ended. The sequence then goes on as a new request of the
engine, with its tokens so far and those that are given as the prompt. All but the last block of
them are in the prefix cache, and a row of logits does not depend on how its prompt was computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from cpuserve.serving.text import NextTurn, TextProcessor

if TYPE_CHECKING:
    from cpuserve.engine.ipc import Output
    from cpuserve.serving.context import ModelContext
    from cpuserve.serving.events import Event
    from cpuserve.serving.fan_out import SequenceRequest
    from cpuserve.serving.tools.use import ToolUse


class SequenceRun:
    """The engine's next request for a sequence, and the text of its outputs.

    ids, params: of the request. is_first: there was none before it.
    """

    def __init__(
        self, context: ModelContext, sequence: SequenceRequest, tools: ToolUse | None
    ) -> None:
        self.ids = sequence.prompt.ids
        self.params = sequence.params
        self.is_first = True
        self._context = context
        self._job = sequence
        self._tools = tools
        self._tokens: list[int] = []  # of the response so far
        self._held: list[Event] = []  # until it is known whether the model thinks
        self._num_held = 0  # tokens of these
        waits = sequence.after_thought is not None
        self._processor = self._begin("" if waits or tools is None else tools.opening)
        if tools is not None:
            self._processor.watch_thought(tools.thoughts.budget, waits=waits)

    def _begin(self, opening: str) -> TextProcessor:
        """Return the text side of the sequence from its first token."""
        sequence, tools, context = self._job, self._tools, self._context
        found = TextProcessor(
            context.get_tokenizer(), sequence.prompt.ids, sequence.params, sequence.index
        )
        if tools is not None:
            parser = tools.parser(sequence.index, sequence.prompt, opening)
            found.find_calls(parser, context.shown_ids, tells_thoughts=tools.thoughts.told)
        return found

    @property
    def finish(self) -> str | None:
        """Why the sequence has ended; None: it goes on."""
        return self._processor.finish

    @property
    def turns(self) -> bool:
        """Whether it goes on as another request, after `turn`."""
        return self._processor.turn is not None

    @property
    def num_reasoning(self) -> int:
        """How many tokens of thoughts it has."""
        return self._processor.num_reasoning

    @property
    def timeout_s(self) -> float | None:
        """The time that is left of its timeout."""
        limit = self._job.timeout_s
        if limit is None or self.is_first:
            return limit
        return max(1e-3, limit - (time.monotonic() - self._job.started))

    def push(self, output: Output) -> tuple[list[Event], int]:
        """Return the events of the engine's next output, and how many tokens of it count.

        Raises like TextProcessor.push.
        """
        events, count = self._processor.push(output)
        self._tokens += output.tokens[:count]
        if self._processor.is_undecided:
            self._held += events
            self._num_held += count
            return [], 0
        if self._processor.turn is NextTurn.NONE:  # the response begins again, in its form
            self._held.clear()
            return [], 0
        if self._held:
            events, count = [*self._held, *events], count + self._num_held
            self._held = []
        return events, count

    def turn(self) -> tuple[list[Event], int]:
        """Begin the next request; return the events of given tokens, and their number."""
        tools, sequence, why = self._tools, self._job, self._processor.turn
        assert tools is not None
        self.is_first = False
        opening = "" if sequence.after_thought is None else tools.opening
        if why is NextTurn.NONE:
            self._tokens.clear()
            self._processor = self._begin(opening)
            self._next(self._encoded(opening))
            return [], 0
        end = tools.learned_format.thought_end
        text = tools.thoughts.last_words + end.closed if why is NextTurn.OPEN else end.gap
        if not opening:
            text += end.begin
        given = self._encoded(text + opening)
        self._tokens += given
        self._next()
        return self._processor.go_on(given, opening, is_last=not self.params.max_tokens), len(given)

    def _encoded(self, text: str) -> list[int]:
        return self._context.get_tokenizer().encode(text, add_special_tokens=False)

    def _next(self, given: Sequence[int] = ()) -> None:
        """Set the ids and the parameters of the next request."""
        sequence, used = self._job, len(self._tokens)
        params = sequence.after_thought or sequence.params
        self.ids = [*sequence.prompt.ids, *self._tokens, *given]
        self.params = msgspec.structs.replace(
            params,
            max_tokens=max(0, (params.max_tokens or 0) - used),
            min_tokens=0,
            prompt_logprobs=None,
        )
