"""One sequence of a response as one or two engine requests: up to the end of a thought, and after.

If a model thinks, structured outputs and forced tool calls begin after the thought, and a thought
that has used its token budget is ended. The sequence then goes on as a new engine request.
The prompt of this request has the tokens so far, and the tokens that the server adds
(the end of the thought, the forced beginning). All but the last block are in the prefix cache,
and logits do not depend on how the prompt was computed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from cpuserve.engine.ipc import AddRequest
from cpuserve.serving.calls.events import Text
from cpuserve.serving.generation.text import NextTurn, TextProcessor

if TYPE_CHECKING:
    from cpuserve.engine.ipc import Output
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.calls.events import Event
    from cpuserve.serving.generation.plan import SequencePlan
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.tools.base import ToolParser
    from cpuserve.serving.tools.use import ToolUse


def _begins_itself(params: SamplingParams | None) -> bool:
    """Whether the grammar covers the header of the message: it may be a call's or a text's."""
    form = None if params is None else params.structured_outputs
    return form is not None and form.calls is not None


class SequenceRun:
    """The next engine request for a sequence, and the events of its outputs.

    ids, params: the prompt and the parameters of the request.
    is_first: whether this is the first engine request of the sequence.
    """

    def __init__(
        self, context: ModelContext, sequence: SequencePlan, tools: ToolUse | None
    ) -> None:
        self.ids = sequence.prompt.ids
        self.params = sequence.params
        self.is_first = True
        self._context = context
        self._sequence = sequence
        self._tools = tools
        self._tokens: list[int] = []  # all tokens of the response so far
        self._opening: list[int] = []  # the forced beginning, which the model did not generate
        self._held: list[Event] = []  # events held back until it is known whether the model thinks
        self._num_held = 0  # the number of tokens in the events of `_held`
        opens_after_thought = sequence.after_thought is not None
        self._processor = self._begin(
            sequence.prompt.opening, opens_after_thought=opens_after_thought
        )
        if tools is not None:
            self._processor.watch_thought(
                tools.thoughts.budget, opens_after_thought=opens_after_thought
            )

    def _begin(self, opening: str, *, opens_after_thought: bool = False) -> TextProcessor:
        """Return a new TextProcessor, which reads the response from its first token.

        opens_after_thought: a structured output begins only after the thought.
        """
        sequence, tools, context = self._sequence, self._tools, self._context
        processor = TextProcessor(
            context.get_tokenizer(), sequence.prompt.ids, sequence.params, sequence.index
        )
        if tools is not None:
            parser = tools.parser(sequence.index, sequence.prompt, opening)
            if not opens_after_thought:
                parser = self._after(tools, parser)
            processor.find_calls(parser, context.shown_ids, tells_thoughts=tools.thoughts.told)
        if sequence.lines is not None:
            processor.limit_lines(sequence.lines)
        return processor

    @property
    def request(self) -> AddRequest:
        """The engine request that the sequence needs now."""
        sequence = self._sequence
        return AddRequest.of(
            self.ids,
            self.params,
            sequence.priority,
            progress=sequence.progress and self.is_first,
            continues=not self.is_first,
            media=sequence.prompt.media,
        )

    @property
    def finish(self) -> str | None:
        """The finish reason of the sequence; None while it goes on."""
        return self._processor.finish

    @property
    def turns(self) -> bool:
        """Whether the sequence must go on as another engine request: call `turn` first."""
        return self._processor.turn is not None

    @property
    def response_ids(self) -> Sequence[int]:
        """All tokens after the first prompt so far, added by the server or generated."""
        return [*self._opening, *self._tokens]

    @property
    def num_reasoning(self) -> int:
        """How many tokens of the sequence are thoughts."""
        return self._processor.num_reasoning

    @property
    def timeout_s(self) -> float | None:
        """The seconds that are left of the sequence's timeout; None = no timeout."""
        limit = self._sequence.timeout_s
        if limit is None or self.is_first:
            return limit
        return max(1e-3, limit - (time.monotonic() - self._sequence.tally.started))

    def push(self, output: Output) -> tuple[list[Event], int]:
        """Return the events of the engine's next output, and how many of its tokens are kept.

        The errors are the same as in TextProcessor.push.
        """
        events, count = self._processor.push(output)
        self._tokens += output.tokens[:count]
        if self._processor.is_undecided:
            self._held += events
            self._num_held += count
            return [], 0
        if self._processor.turn is NextTurn.NONE:  # the response is generated again, with a grammar
            self._held.clear()
            return [], 0
        if self._held:
            events, count = [*self._held, *events], count + self._num_held
            self._held = []
        return events, count

    def turn(self) -> tuple[list[Event], int]:
        """Begin the next engine request; return its events and the number of tokens it adds."""
        tools, sequence, turn_reason = self._tools, self._sequence, self._processor.turn
        assert tools is not None
        self.is_first = False
        opening = sequence.prompt.later or ""
        if turn_reason is NextTurn.NONE:
            self._tokens.clear()
            self._processor = self._begin(opening)
            self._opening = self._encoded(opening)
            self._next(self._opening, scores=sequence.params.prompt_logprobs)
            return [], 0
        end = tools.learned_format.thought_end
        text = tools.thoughts.last_words + end.closed if turn_reason is NextTurn.OPEN else end.gap
        if not (opening or _begins_itself(sequence.after_thought)):
            text += end.begin
        opening_ids = self._encoded(text + opening)
        self._tokens += opening_ids
        self._next()
        next_parser, is_last = partial(self._after, tools), not self.params.max_tokens
        return self._processor.go_on(opening_ids, opening, next_parser, is_last=is_last), len(
            opening_ids
        )

    def _after(self, tools: ToolUse, parser: ToolParser) -> ToolParser:
        """Return the parser of the text that the grammar of the response constrains."""
        sequence = self._sequence
        params = sequence.after_thought or sequence.params
        form = params.structured_outputs
        if form is None or not form.is_form:
            return parser
        return tools.form_parser(parser, sequence.index, form)

    def _encoded(self, text: str) -> list[int]:
        return self._context.get_tokenizer().encode(text, add_special_tokens=False)

    def _next(self, forced_ids: Sequence[int] = (), scores: int | None = None) -> None:
        """Set the ids and the parameters of the next engine request.

        forced_ids: ids that count as a part of the prompt.
        scores: how many alternatives the prompt's logprobs have;
          None if the client has these logprobs already, or wants none.
        """
        sequence, num_generated = self._sequence, len(self._tokens)
        params = sequence.after_thought or sequence.params
        self.ids = [*sequence.prompt.ids, *self._tokens, *forced_ids]
        bounds = self._context.bounds
        room = min(bounds.max_model_len, bounds.kv_tokens + 1) - len(self.ids)
        max_tokens = max(0, min((params.max_tokens or 0) - num_generated, room))
        self.params = msgspec.structs.replace(
            params,
            max_tokens=max_tokens,
            min_tokens=min(max_tokens, max(0, params.min_tokens - num_generated)),
            prompt_logprobs=scores,
        )


class EventPace:
    """Joins lists of events of one sequence until they have `interval` tokens.

    The first list with tokens and the last list are shown without a delay.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._begun = False
        self._held: list[Event] = []

    def push(self, events: list[Event], *, ends: bool) -> list[Event]:
        """Return the events to show now, [] for none. ends: the sequence has ended."""
        if self._interval == 1:
            return events
        held_events = self._held = _joined(self._held, events)
        count = sum(len(event.token_ids) for event in held_events if isinstance(event, Text))
        if not ends and count < (self._interval if self._begun else 1):
            return []
        self._begun, self._held = True, []
        return held_events


def _joined(earlier_events: list[Event], later_events: list[Event]) -> list[Event]:
    """Return the events of both lists, with all tokens and their logprobs in the first Text."""
    if not (earlier_events and later_events):
        return earlier_events or later_events
    texts = [
        next((e for e in events if isinstance(e, Text)), None)
        for events in (earlier_events, later_events)
    ]
    text, next_text = texts
    if text is None or next_text is None:
        return [*earlier_events, *later_events]
    text.token_ids = text.token_ids + next_text.token_ids
    if next_text.logprobs is not None:
        text.logprobs = [*(text.logprobs or ()), *next_text.logprobs]
    other_events = [event for event in later_events if event is not next_text]
    if earlier_events[-1] is text:
        text.text += next_text.text
    elif next_text.text:
        other_events.insert(0, Text(next_text.index, next_text.text, []))
    return [*earlier_events, *other_events]
