"""The report of a generation, for the access log and for traces: tokens, times, why it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpuserve.base.waits import sum_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cpuserve.metrics.server import Sequence
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.calls.events import TokenUsage
    from cpuserve.serving.generation.generate import Generation


@dataclass(frozen=True, slots=True)
class Times:
    """Times of a generation as time.monotonic(); None = not yet.

    prepared: when the prompts had been rendered and tokenized.
    arrived: when the first sequence was sent to the engine.
    scheduled: when the engine first ran a sequence.
    first, last: the first output, and the last output with tokens.
    """

    prepared: float
    arrived: float | None = None
    scheduled: float | None = None
    first: float | None = None
    last: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """The state of a generation now.

    model: the first name of the model that serves it.
    reasons: why the sequences ended, each reason once.
    accepted: draft tokens that the model accepted; None = the model has no drafts.
    fingerprint: of the model's files and settings; "" = it was not computed.
    params: the sampling parameters of the first sequence.
    is_vector: whether it computes vectors, scores or labels instead of text.
    wait_seconds: the seconds of each cause for which the first sequence that ran has waited in the
      engine before its first token; `queue_s` of them before it ran (base/waits.py).
    """

    usage: TokenUsage
    model: str
    adapter: str | None
    times: Times
    reasons: tuple[str, ...]
    accepted: int | None
    fingerprint: str
    params: SamplingParams
    is_vector: bool
    wait_seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def queue_s(self) -> float | None:
        """Seconds until the engine first ran a sequence; None = none has run."""
        arrived, scheduled = self.times.arrived, self.times.scheduled
        return None if arrived is None or scheduled is None else max(0.0, scheduled - arrived)

    @property
    def first_s(self) -> float | None:
        """Seconds until the first output; None = there is none."""
        arrived, first_token = self.times.arrived, self.times.first
        return None if arrived is None or first_token is None else first_token - arrived


def report_of(generation: Generation) -> GenerationReport:
    """Return the report of a generation that runs or has ended."""
    tallies = [sequence.tally for sequence in generation.shown_sequences]
    meters = [s.tally.meter for s in generation.all_sequences if s.tally.meter is not None]
    shown = [tally.meter for tally in tallies if tally.meter is not None]
    ran = [meter for meter in meters if meter.first]
    arrived = min((meter.arrival for meter in meters), default=None)
    return GenerationReport(
        generation.usage(),
        generation.context.model_names[0],
        generation.call.adapter,
        Times(
            generation.sequences[0].tally.started,
            arrived,
            min((meter.scheduled for meter in ran), default=None),
            min((meter.first for meter in ran), default=None),
            max((meter.last for meter in ran if meter.last), default=None),
        ),
        tuple(dict.fromkeys(meter.reason for meter in shown if meter.reason)),
        sum(tally.accepted_tokens for tally in tallies)
        if generation.context.metrics.drafts
        else None,
        generation.context.files_fingerprint,
        generation.sequences[0].params,
        generation.call.embed,
        engine_waits(min(ran, key=lambda meter: meter.scheduled), arrived) if ran else {},
    )


def engine_waits(sequence: Sequence, arrived: float | None = None) -> dict[str, float]:
    """Return the seconds of each cause for which a sequence that runs has waited in the engine.

    The way to the engine is a part of the wait for a step.
    arrived: when its wait began (time.monotonic()); None = when it was sent to the engine.
    """
    queued = sequence.scheduled - (sequence.arrival if arrived is None else arrived)
    way = max(0.0, queued - sum(sequence.queued.values()))
    return sum_of([{"step": way}, sequence.queued, sequence.held])
