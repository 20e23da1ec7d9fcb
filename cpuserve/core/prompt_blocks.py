"""PromptBlocks: assign cached, restored or new KV blocks to prompts."""

from __future__ import annotations

import time
from typing import Literal

from cpuserve.core.budget import PromptBudget
from cpuserve.core.cost import CostModel
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.prefix import PrefixMatch
from cpuserve.core.request import Request

Restored = Literal["all", "some", "lost"]


class PromptBlocks:
    """Assigns KV blocks to the tokens that a request has so far, and skips cached tokens.

    prefix_queries: the number of prompt tokens that were looked up in the prefix cache.
    prefix_hits: the number of prompt tokens that the prefix cache had.
    """

    def __init__(self, kv: KvManager, cost: CostModel) -> None:
        self.kv = kv
        self.cost = cost
        self.prefix_queries = 0
        self.prefix_hits = 0

    def match(self, request: Request, num_running: int) -> PrefixMatch | None:
        """Return the cached prefix of `request` if there are blocks for all its present tokens.

        A group with a sliding window needs only the blocks of the window and of the next step.
        One block of each group stays free for each running request. With this block, a request can
        decode block_size tokens before a preemption, so an almost full cache recomputes little.
        """
        kv, ids = self.kv, request.token_ids
        reads = request.reads_prefixes
        match = (
            kv.match_prefix(request.chain, ids) if reads else PrefixMatch(tables=kv.new_tables())
        )
        spare = kv.num_groups * num_running
        return match if kv.can_admit(match, len(ids), spare=spare) else None

    def take(self, request: Request, budget: PromptBudget, num_running: int) -> bool:
        """Take blocks for all tokens that `request` has so far; False if it has to wait."""
        match = self.match(request, num_running)
        if match is None or not self._vacate(match, len(request.token_ids), budget):
            return False
        self.kv.adopt(request.tables, request.chain, match)
        request.chain.snapshots = kept = self.kv.snapshots_of(match, len(request.token_ids))
        grown = self.kv.grow(request.tables, len(request.token_ids), match.num_tokens, kept)
        assert grown, "can_admit was true, but there are no blocks"
        request.num_computed = match.num_tokens
        if request.reads_prefixes and request.counts_prompt and self.kv.prefix_caching:
            self.prefix_queries += request.num_prompt
        self._count_hits(request, match.num_tokens)
        return True

    def _vacate(self, match: PrefixMatch, num_tokens: int, budget: PromptBudget) -> bool:
        """Evict blocks for a request; False if time ran out, so that the next step has to continue.

        Evicted blocks are saved to the offload tiers, the last blocks of a prefix first. Streams
        must not wait until all blocks are saved, so the eviction stops when the budget is used up.
        No block is evicted unsaved, because all later blocks of its prefix would be useless then.
        """
        offload = self.kv.offload
        if offload is None:
            return True
        before = offload.seconds
        done = self.kv.vacate(match, num_tokens)
        budget.seconds -= offload.seconds - before
        return done

    def catch_up(self, request: Request) -> None:
        """Skip tokens in blocks that other requests have published since `request` started."""
        if request.reads_prefixes:
            ids, computed = request.token_ids, request.num_computed
            skipped = self.kv.catch_up(request.tables, request.chain, ids, computed)
            if skipped:
                request.num_computed += skipped
                self._count_hits(request, skipped)

    def restore(self, request: Request, budget: PromptBudget) -> Restored:
        """Restore blocks from offload tiers where that is faster than computing them.

        Returns "all" if no block is left to restore, so that the remaining tokens can be computed.

        Returns "some" if this step has no time for all blocks. The next steps then restore the
        other blocks before they compute tokens of this request, and later requests wait meanwhile.

        Returns "lost" if no tier has a planned block any more, and the model has windows or states.
        The request then starts again, as it lacks earlier blocks of windows, or earlier states.
        """
        kv, size, offload = self.kv, self.kv.block_size, self.kv.offload
        tables, chain, ids = request.tables, request.chain, request.token_ids
        while offload is not None and request.reads_prefixes:
            kv.reach(tables, request.num_computed, len(ids))
            plan = chain.plan or kv.restorable(tables, chain, ids, request.num_computed)
            if plan is None or not (chain.plan or self.cost.restores(plan, size)):
                return "all"
            kind = plan.kind(chain.num_entries)
            if budget.seconds < self.cost.restore_s.get(kind, 0.0) and not budget.least:
                return "some"
            if budget.restored and not offload.has_time:
                budget.closed = True
                return "some"
            began = time.perf_counter()
            found = kv.restore(tables, chain, plan)
            took = time.perf_counter() - began
            self.cost.observe_restore(kind, took)
            budget.seconds -= took
            budget.least = 0
            budget.restored = True
            if not found:
                if kv.slides:
                    return "lost"
                chain.plan = None
                return "all"
            request.num_computed += size
            if chain.plan is None:
                self._count_hits(request, (plan.end - plan.begin) * size)
                self.catch_up(request)
        return "all"

    def _count_hits(self, request: Request, tokens: int) -> None:
        """Count the cached tokens of a request, unless its prompt was counted (counts_prompt)."""
        if request.counts_prompt:
            request.cached_tokens += tokens
            self.prefix_hits += tokens
