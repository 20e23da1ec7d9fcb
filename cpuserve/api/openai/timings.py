"""The `timings` of llama.cpp: cached tokens, and the times for the prompt and the response."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from cpuserve.serving.generation.generate import cache_miss
from cpuserve.serving.generation.report import engine_waits

if TYPE_CHECKING:
    from cpuserve.serving.generation.generate import Generation
    from cpuserve.serving.generation.plan import SequencePlan


def timings_of(generation: Generation) -> dict[str, object]:
    """Return the member `timings` of a response that ends now, with the times of choice 0.

    Time in the queue counts as prompt time; waits_ms says for what the choice waited in the engine.
    The member cache_miss explains why tokens
    of an earlier prompt are computed again (RecentPrompt.miss).
    """
    usage, sequence = generation.usage(), generation.sequences[0]
    found = _timings(sequence, time.monotonic(), usage.prompt, usage.cached, usage.completion)
    return found | _drafts(usage.drafts, usage.accepted)


def sequence_timings(sequence: SequencePlan) -> dict[str, object]:
    """Return the timings of one sequence, until it ended or until now."""
    tally = sequence.tally
    now = tally.ended or time.monotonic()
    cached, completion = tally.cached_tokens, tally.completion_tokens
    found = _timings(sequence, now, len(sequence.prompt.ids), cached, completion)
    return found | _drafts(tally.draft_tokens, tally.accepted_tokens)


def _timings(
    sequence: SequencePlan, now: float, prompt: int, cached: int, completion: int
) -> dict[str, object]:
    prompt_end = sequence.tally.first_output or now
    miss = cache_miss(sequence)
    return {
        "cache_n": cached,
        **_rates("prompt", prompt - cached, 1e3 * (prompt_end - sequence.tally.started)),
        **_rates("predicted", completion, 1e3 * (now - prompt_end)),
        **({} if miss is None else {"cache_miss": miss}),
        **_waits(sequence),
    }


def _waits(sequence: SequencePlan) -> dict[str, object]:
    """Return the milliseconds of each cause of its wait, if it has run."""
    meter = sequence.tally.meter
    if meter is None or not meter.first:
        return {}
    waits = engine_waits(meter)
    return {"waits_ms": {cause: round(1e3 * seconds, 3) for cause, seconds in waits.items()}}


def _drafts(drafts: int, accepted: int) -> dict[str, object]:
    """Return the numbers of draft tokens, if there were any."""
    return {"draft_n": drafts, "draft_n_accepted": accepted} if drafts else {}


def timings_member(generation: Generation | None) -> bytes:
    """Return `,"timings":...` as JSON for a chunk; b"" if `generation` is None."""
    if generation is None:
        return b""
    return b',"timings":' + msgspec.json.encode(timings_of(generation))


def _rates(kind: str, tokens: int, took_ms: float) -> dict[str, float]:
    return {
        f"{kind}_n": tokens,
        f"{kind}_ms": round(took_ms, 3),
        f"{kind}_per_token_ms": round(took_ms / max(tokens, 1), 3),
        f"{kind}_per_second": round(1e3 * tokens / max(took_ms, 1e-3), 3),
    }
