"""Proposer: what each kind of drafter does, between two steps, for the requests that run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cpuserve.core.kv.offload import BlockBytes, Offload
from cpuserve.core.request import Request
from cpuserve.core.speculation.budget import DraftBudget


@dataclass(slots=True)
class Round:
    """What proposers know about the next step, if it has the same requests as the last one.

    budget: returns what the next step has left for draft tokens. Most looks at a text find nothing
      to propose, so n-grams need no budget in most rounds.
    most: returns the most draft tokens of a request.
    worth: whether a draft that is certainly right would be worth its time.
    rested: how many steps before this round had no round.
    continues: whether another proposer follows in this round, after the step's tokens were sent.
    drafted: whether a request may have drafts that pay; proposers set it.
    """

    budget: Callable[[], DraftBudget]
    most: Callable[[Request], int]
    worth: bool
    rested: int
    continues: bool
    drafted: bool


class Proposer:
    """Proposes draft tokens, which the next step verifies; they change no token of a response.

    A proposer with its own model runs after the tokens of a step were sent, so no token waits for
    it. It shares the computing threads, and pays for its steps from the budget of the round.
    """

    def propose(self, requests: Sequence[Request], this_round: Round) -> int:
        """Set `drafts` and `chances` of requests, up to `most_drafts`, where it pays.

        Return for how many steps the requests need no other round.
        """
        raise NotImplementedError

    def finish(self, request: Request) -> None:
        """Note that the last step of a request has run; it still has its slot."""

    def end(self, request: Request) -> None:
        """Note that a request has ended or was aborted."""

    @property
    def kept_keys(self) -> BlockBytes | None:
        """The keys that the model's offload tiers also store; None = there are none."""
        return None

    def keep(self, offload: Offload) -> None:
        """Let `offload` keep evicted keys; called before the first round."""

    def report(self) -> dict[str, object]:
        """Return counters for the report of the engine."""
        return {}

    def tidy(self) -> bool:
        """Work for a while in an idle engine; False = all is done."""
        return False

    def forget_prefixes(self) -> None:
        """Remove all cached prefixes."""

    def close(self, wait_s: float = 1.0) -> None:
        """Write what has to be kept within `wait_s` seconds, and free all memory."""
