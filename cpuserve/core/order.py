"""PromptOrder: the order of the prompts that share a step, and how many of them may share it."""

from __future__ import annotations

from collections.abc import Sequence

from cpuserve.core.budget import SHARE_BESIDE_FRESH, PromptBudget, only_decisions
from cpuserve.core.callers import CallerShares, Place
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.queue import Policy, QueueRank, by_rank
from cpuserve.core.request import Request


class PromptOrder:
    """Sorts prompts by priority, by the shares of their callers, and by their remaining tokens."""

    def __init__(self, kv: KvManager, callers: CallerShares, policy: Policy) -> None:
        self._kv = kv
        self._callers = callers
        self._policy = policy

    def tokens_left(self, request: Request) -> int:
        """Return how many tokens of `request` have to run, besides those in the prefix cache."""
        num_tokens = len(request.token_ids)
        if request.is_running:
            return num_tokens - request.num_computed
        if not request.reads_prefixes:
            return num_tokens
        return num_tokens - self._kv.num_cached_tokens(request.chain, request.token_ids)

    def in_order(self, prompts: Sequence[Request]) -> list[Request]:
        """Return the prompts as a step serves them, the first one first.

        Decisions are not sorted by length: a client waits for all of its questions.
        """
        if not only_decisions(prompts):
            return sorted(prompts, key=self._shortest_first)
        return self.whole(prompts)

    def whole(self, prompts: Sequence[Request]) -> list[Request]:
        """Return prompts in order if their lengths do not matter."""
        return sorted(prompts, key=self._first if self._policy == "fcfs" else by_rank)

    def _shortest_first(self, request: Request) -> tuple[int, Place, int, QueueRank]:
        priority = request.priority if self._policy == "priority" else 0
        return priority, self._callers.place(request), self.tokens_left(request), request.rank

    def _first(self, request: Request) -> tuple[Place, QueueRank]:
        return self._callers.place(request), request.rank

    def share(self, prompts: list[Request], oldest: Request, budget: PromptBudget) -> list[Request]:
        """Limit a step if there are several callers; return the prompts that get a part of it.

        prompts: as `in_order` has sorted them.

        A step without running streams would otherwise complete many prompts of a caller at a time,
        and the prompts of other callers, in this step or new ones, would wait for all of them.
        """
        fresh = [request for request in prompts if self._callers.is_fresh(request)]
        if fresh and oldest not in fresh:
            budget.oldest_share = SHARE_BESIDE_FRESH
        if not budget.ends_early or len(self._callers) < 2:
            return prompts
        if not fresh:
            budget.tokens = min(budget.tokens, budget.long)
            return prompts
        return [request for request in prompts if request in fresh or request is oldest]
