"""EventPace: join the events of several outputs, so that a stream has fewer, longer events."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.serving.calls.events import Text

if TYPE_CHECKING:
    from cpuserve.serving.calls.events import Event


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
        held = self._held = _joined(self._held, events)
        count = sum(len(event.token_ids) for event in held if isinstance(event, Text))
        if not ends and count < (self._interval if self._begun else 1):
            return []
        self._begun, self._held = True, []
        return held


def _joined(first: list[Event], second: list[Event]) -> list[Event]:
    """Return the events of both lists, with all tokens and their logprobs in the first Text."""
    if not (first and second):
        return first or second
    texts = [next((e for e in events if isinstance(e, Text)), None) for events in (first, second)]
    one, other = texts
    if one is None or other is None:
        return [*first, *second]
    one.token_ids = one.token_ids + other.token_ids
    if other.logprobs is not None:
        one.logprobs = [*(one.logprobs or ()), *other.logprobs]
    rest = [event for event in second if event is not other]
    if first[-1] is one:
        one.text += other.text
    elif other.text:
        rest.insert(0, Text(other.index, other.text, []))
    return [*first, *rest]
