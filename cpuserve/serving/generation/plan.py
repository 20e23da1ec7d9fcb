"""SequencePlan: what one sequence of a response needs. Tally: what is counted while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from cpuserve.serving.calls.events import PromptProgress

if TYPE_CHECKING:
    from cpuserve.engine.ipc import Output
    from cpuserve.metrics.server import Sequence as Meter
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.callers.allowance import Allowance
    from cpuserve.serving.calls.call import Prompt
    from cpuserve.serving.calls.line_limits import LineRules
    from cpuserve.serving.models.recent_prompts import RecentPrompt


@dataclass(slots=True)
class Tally:
    """The counts and times of a sequence from its plan to its end.

    started, first_output: the times (time.monotonic()) when the object was made,
      and when the first output came; 0.0 = no output yet.
    ended: time.monotonic() at the end of the sequence (0.0 before).
    counted_active: whether the ModelContext counts the sequence as active.
    in_backlog: whether the backlog counts it, with num_queued prompt tokens.
    draft_tokens, accepted_tokens: how many tokens were drafts, and how many of them were right.
    meter: its times, while it runs and afterwards; None before.
    recent: the record of the prompt, which gets the response at its end; None = no record.
    response_ids: all tokens of the response, when it has ended.
    allowance: where its tokens are counted for its caller; None = they are not limited.
    """

    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    counted_active: bool = False
    in_backlog: bool = False
    num_queued: int = 0
    started: float = field(default_factory=time.monotonic)
    first_output: float = 0.0
    ended: float = 0.0
    recent: RecentPrompt | None = None
    meter: Meter | None = None
    response_ids: Sequence[int] = ()
    allowance: Allowance | None = None

    def count(self, tokens: int, reasoning: int, sampled: int = 0, drafts: int = 0) -> None:
        """Add `tokens` new tokens.

        reasoning: how many tokens are thoughts so far.
        sampled: how many tokens one step of the engine sampled; all but one were draft tokens.
        drafts: how many draft tokens the step had.
        """
        self.completion_tokens += tokens
        if self.allowance is not None:
            self.allowance.spend(tokens)
        self.reasoning_tokens = reasoning
        if sampled > 1:
            self.accepted_tokens += sampled - 1
        self.draft_tokens += max(drafts, sampled - 1)


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """One sequence: choice `index` of the response.

    n: how many sequences its prompt has.
    interval: the least number of tokens in a list of events, except the first and the last one.
    scored_by: the index of the sequence that computes the prompt logprobs for this one,
      None if it computes them itself.
    after_thought: the parameters after the thought, if a structured output begins only then;
      None = always `params`.
    lines: the rules for ending the response at a line; None = no rules.
    """

    index: int
    prompt: Prompt
    params: SamplingParams
    n: int
    priority: int = 0
    timeout_s: float | None = None
    progress: bool = False
    interval: int = 1
    scored_by: int | None = None
    after_thought: SamplingParams | None = None
    lines: LineRules | None = None
    tally: Tally = field(default_factory=Tally)

    def after(self, spent_s: float) -> SequencePlan:
        """Return the plan with a timeout that is shorter by the time that other work took."""
        if self.timeout_s is None:
            return self
        return replace(self, timeout_s=max(1e-3, self.timeout_s - spent_s))

    def progress_of(self, output: Output) -> PromptProgress:
        """Return the event of an output that only reports the prompt's progress."""
        elapsed_ms = round(1000 * (time.monotonic() - self.tally.started))
        cached, num_done = output.cached_tokens, output.processed
        media = self.prompt.media
        num_parts = [item.parts for item in media if sum(item.spans[-1]) <= num_done]
        tiles = sum(item.parts for item in media)
        total = len(self.prompt.ids)
        return PromptProgress(
            self.index, total, cached, num_done, elapsed_ms, tiles, sum(num_parts)
        )
