"""The report of a generation for the access log: tokens, times and why it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuserve.serving.calls.events import TokenUsage
    from cpuserve.serving.generation.generate import Generation


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """The state of a generation now.

    model: the first name of the model that serves it.
    queue_s: seconds until the engine first ran a sequence; None = none has run.
    first_s: seconds until the first output; None = there is none.
    reasons: why the sequences ended, each reason once.
    """

    usage: TokenUsage
    model: str
    adapter: str | None
    queue_s: float | None
    first_s: float | None
    reasons: tuple[str, ...]


def report_of(generation: Generation) -> GenerationReport:
    """Return the report of a generation that runs or has ended."""
    meters = [sequence.meter for sequence in generation.sequences if sequence.meter is not None]
    begun = min((meter.arrival for meter in meters), default=0.0)
    scheduled = min((meter.scheduled for meter in meters if meter.first), default=None)
    first = min((meter.first for meter in meters if meter.first), default=None)
    return GenerationReport(
        generation.usage(),
        generation.context.model_names[0],
        generation.call.adapter,
        None if scheduled is None else max(0.0, scheduled - begun),
        None if first is None else first - begun,
        tuple(dict.fromkeys(meter.reason for meter in meters if meter.reason)),
    )
