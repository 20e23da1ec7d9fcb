"""Scheduler: which tokens run in the next step.

There is no prefill phase and no decode phase. Each request has `num_computed` tokens chasing
`len(token_ids)`, and one token budget per step covers decode rows and prompt chunks alike. Decode
rows come first, and while there are any, prompt chunks are sized by what the cost model says they
take, so that running streams keep their inter-token latency.

`running` and `waiting` are sorted by rank (queue.rank_of): arrival, or priority with aging. Blocks
are taken in that order and preemption takes the last, so the first always advances: no livelock.

Blocks of a prompt are published when its chunk is scheduled, not when it has run: an executor
stores the keys of all tokens of a step before any of them attends (or runs sequences in batch
order), so requests that come together share a prefix too.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cpuserve.core.cost import LEAST_CHUNK, CostModel, StepWork, rounded_chunk
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.prefix import FORGOTTEN, PrefixMatch
from cpuserve.core.queue import Policy, WaitingQueue, rank_of
from cpuserve.core.request import NO_SLOT, Delta, FinishReason, Request
from cpuserve.core.step import RowResult, SeqChunk, StepBatch, StepResult
from cpuserve.ids import BlockId, RequestId, SlotId
from cpuserve.sampling.params import SamplingParams

NO_CHOICE = (
    "no token could be chosen: the model's logits are NaN or infinite, or the request's penalties, "
    "biases and bans leave none"
)
# Blocks that move between tiers keep the engine from its messages, which no step's interrupt cuts
# short: a client that leaves is to be noticed within 50 ms.
MOVING_S = 0.03


class SlotHost(Protocol):
    """The part of an Executor the scheduler talks to: sampler state per slot."""

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt: list[int],
        output: list[int],
        stop_ids: list[int],
    ) -> None:
        """(Re)set the sampler state of `slot`."""

    def release(self, slot: int) -> None:
        """Forget `slot`."""


@dataclass(slots=True)
class _PromptBudget:
    """What is left of a step for prompt tokens; `seconds` is inf without streams to protect.

    restored: a block has come back from another tier, so that the step is not for nothing.
    """

    tokens: int
    seconds: float
    least: int
    restored: bool = False

    @property
    def is_spent(self) -> bool:
        return self.tokens <= 0 or (self.seconds <= 0.0 and not self.least)


class Scheduler:
    """Continuous batching over paged KV: chunked prompts, shared prefixes, preemption by recompute.

    itl_target_s: how long a step with decode rows should take at most, 0 = as long as it takes.
    long_prefill_token_threshold: most tokens of one prompt in a step, 0 = what the budget allows.
    moving_s: how long `schedule` may move blocks between tiers where no stream waits for the step;
    it returns a block later at most.
    """

    def __init__(
        self,
        kv: KvManager,
        slots: SlotHost,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        itl_target_s: float = 0.0,
        long_prefill_token_threshold: int = 0,
        policy: Policy = "fcfs",
        moving_s: float = MOVING_S,
    ) -> None:
        self.kv = kv
        self.cost = CostModel()
        self.work = StepWork()
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.requests: dict[RequestId, Request] = {}
        self.num_preemptions = 0
        # A decode row each must fit in one step.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self._itl_target_s = itl_target_s
        self._chunk_limit = long_prefill_token_threshold or max_num_batched_tokens
        self._policy: Policy = policy
        self._moving_s = moving_s
        self._slots = slots
        self._free_slots = [SlotId(i) for i in range(self.max_num_seqs - 1, -1, -1)]
        self._num_added = 0
        self._batch: list[SeqChunk] = []
        self._batch_requests: list[Request] = []
        self._refused: list[Delta] = []

    # --- requests in and out ------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that admission.check_request has passed."""
        assert request.id not in self.requests, f"request {request.id} exists"
        request.order = self._num_added
        request.rank = rank_of(request, self._policy)
        self._num_added += 1
        self.requests[request.id] = request
        self.waiting.push(request)

    def abort(self, request_id: RequestId) -> bool:
        """Drop a request, wherever it is, between steps; False if it is not here (any more)."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        self._drop(request)
        return True

    @property
    def has_work(self) -> bool:
        """Something runs or waits."""
        return bool(self.requests)

    @property
    def batch_requests(self) -> Sequence[Request]:
        """The requests of the step that `schedule` made, in its order."""
        return self._batch_requests

    # --- one step -----------------------------------------------------------------------------

    def schedule(self) -> StepBatch:
        """Choose the tokens of the next step; `update`, `fail` or `abandon` must follow.

        There may be none where blocks are moved between tiers: the next step goes on with that.
        """
        assert not self._batch, "the last step was not finished"
        self.work = StepWork()
        if self.kv.tiers is not None:
            self.kv.tiers.left_s = self._moving_s
        if self._policy == "priority":
            self._make_way()
        prompts = self._schedule_decodes()
        budget = self._prompt_budget()
        if self.kv.tiers is not None and budget.seconds < math.inf:
            # Streams wait for this step anyway: the more of its time is used, the fewer of these.
            self.kv.tiers.left_s += budget.seconds - self._moving_s
        for request in prompts:
            self._admit_waiting(budget, before=request)
            if budget.is_spent:
                break
            self._proceed(request, budget)
        self._admit_waiting(budget)
        return StepBatch(self._batch)

    def update(self, results: StepResult) -> list[Delta]:
        """Take the results of the step `schedule` made, row by row; what each request got."""
        batch, requests = self._take_batch()
        assert sum(len(c.rows) for c in batch) == len(results), "a result per row, please"
        deltas = self._take_refused()
        next_row = 0
        block_size = self.kv.block_size
        for request, chunk in zip(requests, batch, strict=True):
            computed = request.num_computed = chunk.start + len(chunk.token_ids)
            if computed % block_size == 0 or computed - chunk.start >= block_size:
                self._publish(request, computed, computed=True)
                self.kv.slide(request.block_table, computed)
            first_row = next_row
            next_row += len(chunk.rows)
            if next_row > first_row or computed == request.num_prompt:
                delta = self._advance(request, chunk, results[first_row:next_row])
                if delta is not None:
                    deltas.append(delta)
            if request.progress and computed < request.num_prompt and not request.num_output:
                deltas.append(Delta(request, [], processed=computed))
        return deltas

    def fail(self, message: str) -> list[Delta]:
        """The step could not run: every request in it ends with an error."""
        deltas = self._take_refused()
        deltas += [Delta(r, [], "error", error=message) for r in self._drop_batch()]
        return deltas

    def abandon(self) -> list[Delta]:
        """The step was ended early, since every request in it has been aborted: drop them."""
        self._drop_batch()
        return self._take_refused()

    def _drop_batch(self) -> list[Request]:
        """Drop the requests of a step that has not run, or not to its end."""
        batch, requests = self._take_batch()
        never_written: set[BlockId] = set()
        for request, chunk in zip(requests, batch, strict=True):
            blocks = request.block_table[chunk.start // self.kv.block_size :]
            self.kv.unpublish(blocks)
            never_written.update(blocks)
        for request in requests:
            self._drop(request)
        # One that has not become ready for this step may have found what the step was to compute.
        for request in [r for r in self.running if not never_written.isdisjoint(r.block_table)]:
            self._preempt(request)
        return requests

    # --- schedule -----------------------------------------------------------------------------

    def _schedule_decodes(self) -> list[Request]:
        """Put one token of each generating request into the batch; returns the other ones."""
        prompts: list[Request] = []
        block_size = self.kv.block_size
        batch, batch_requests, running = self._batch, self._batch_requests, self.running
        index = keys = 0
        # Not a for loop: making room removes requests from the end of `running`.
        while index < len(running):
            request = running[index]
            index += 1
            ids, start, table = request.token_ids, request.num_computed, request.block_table
            if start + 1 < len(ids) or start < request.num_prompt:
                prompts.append(request)
                continue
            if start == len(table) * block_size and not self._make_room(request):
                break
            batch.append(SeqChunk(request.slot, ids[start:], start, table, request.decode_rows))
            batch_requests.append(request)
            keys += start
        self.work.rows, self.work.keys = len(batch), keys
        return prompts

    def _prompt_budget(self) -> _PromptBudget:
        """Tokens left of the step, and seconds where streams wait for it to end."""
        work, target = self.work, self._itl_target_s
        tokens = self.max_num_batched_tokens - work.rows
        if not (work.rows and target):
            return _PromptBudget(tokens, math.inf, 0)
        seconds = self.cost.allowance(work.rows, work.keys, target)
        other = self.cost.other_chunk
        if other:
            return _PromptBudget(min(tokens, other), seconds, other)
        return _PromptBudget(tokens, seconds, LEAST_CHUNK)

    def _make_room(self, request: Request) -> bool:
        """One more block for `request`, preempting the last; False if that is itself."""
        while not self.kv.grow(request.block_table, request.num_computed + 1):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _make_way(self) -> None:
        """Preempt requests of lower priority if the head of the queue can start then."""
        head, kv = self.waiting.head(), self.kv
        if head is None:
            return
        below = [r for r in self.running if head.rank < r.rank and head.priority < r.priority]
        room = kv.num_free + sum(len(kv.held(r.block_table)) for r in below)
        if room < kv.blocks_for(len(head.token_ids)) + len(self.running) - len(below):
            return
        while below and self.running[-1] is below[-1] and not self._has_room(head):
            self._preempt(below.pop())

    def _has_room(self, request: Request) -> bool:
        return bool(self._free_slots) and self._match_if_room(request) is not None

    def _proceed(self, request: Request, budget: _PromptBudget) -> None:
        """Skip what `request` need not compute, and compute a part of the rest."""
        self._catch_up(request)
        is_ready = self._restore(request, budget)
        self.kv.slide(
            request.block_table, request.num_computed
        )  # what was found may have been left
        if is_ready:
            self._schedule_chunk(request, budget)

    def _restore(self, request: Request, budget: _PromptBudget) -> bool:
        """Bring blocks back from other tiers where that is quicker than computing them.

        False if there are more of them than this step has time for: those come first, since only
        whole blocks are restored. Whoever comes later waits for them as for a prompt's chunks.
        """
        kv, size, tiers = self.kv, self.kv.block_size, self.kv.tiers
        table, chain, ids = request.block_table, request.chain, request.token_ids
        while tiers is not None and request.reads_prefixes:
            where = kv.restorable(table, chain, ids, request.num_computed)
            if where is None or not self.cost.restores(where, request.num_computed, size):
                return True
            if budget.seconds < self.cost.restore_s.get(where, 0.0) and not budget.least:
                return False
            if budget.restored and not tiers.has_time:
                budget.tokens = 0
                return False
            began = time.perf_counter()
            found = kv.restore(table, chain, where)
            took = time.perf_counter() - began
            self.cost.observe_restore(where, took)
            budget.seconds -= took
            budget.least = 0
            budget.restored = True
            if not found:
                return True
            request.num_computed += size
            self._count_hits(request, size)
            self._catch_up(request)
        return True

    def _catch_up(self, request: Request) -> None:
        """Skip what another request has published since this one started."""
        if request.reads_prefixes:
            ids, computed = request.token_ids, request.num_computed
            skipped = self.kv.catch_up(request.block_table, request.chain, ids, computed)
            if skipped:
                request.num_computed += skipped
                self._count_hits(request, skipped)

    def _schedule_chunk(self, request: Request, budget: _PromptBudget) -> None:
        """Put as much of what `request` has left as `budget` allows into the batch."""
        start, left = request.num_computed, len(request.token_ids) - request.num_computed
        most = min(left, budget.tokens, self._chunk_limit)
        count = most
        if budget.seconds < math.inf:
            fitting = self.cost.chunk(start, budget.seconds)
            count = min(most, max(fitting, budget.least, 1))
        if count < left:
            count = rounded_chunk(start, count)
        end = start + count
        tokens = request.token_ids[start:end]
        rows = request.rows(end)
        self._batch.append(SeqChunk(request.slot, tokens, start, request.block_table, rows))
        self._batch_requests.append(request)
        self._publish(request, end, computed=False)
        self._spend(budget, start, count)

    def _spend(self, budget: _PromptBudget, start: int, count: int) -> None:
        before = self.work.pairs
        self.work.add_prompt(start, count)
        budget.tokens -= count
        budget.seconds -= self.cost.prompt_seconds(count, self.work.pairs - before)
        budget.least = 0

    def _admit_waiting(self, budget: _PromptBudget, before: Request | None = None) -> None:
        """Start waiting requests (those that rank before `before`) while there is room."""
        while self._free_slots and not budget.is_spent:
            request = self.waiting.head()
            if request is None or (before is not None and before.rank < request.rank):
                return
            if not self._take_blocks(request, budget):
                return
            self.waiting.remove(request)
            if self._take_slot(request):
                self._proceed(request, budget)

    def _match_if_room(self, request: Request) -> PrefixMatch | None:
        """The cached prefix of `request`, if there are blocks for all tokens it has now.

        So only decode rows ever need more. One spare block per running request: it can decode
        block_size tokens before anybody has to be preempted again, which bounds what a tight pool
        recomputes.
        """
        kv, ids = self.kv, request.token_ids
        reads = request.reads_prefixes
        match = kv.match_prefix(request.chain, ids) if reads else PrefixMatch()
        return match if kv.can_admit(match, len(ids), spare=len(self.running)) else None

    def _take_blocks(self, request: Request, budget: _PromptBudget) -> bool:
        """Blocks for all tokens `request` has now, shared where they exist; False if it waits."""
        match = self._match_if_room(request)
        if match is None or not self._vacate(match, len(request.token_ids), budget):
            return False
        self.kv.adopt(request.block_table, request.chain, match)
        grown = self.kv.grow(request.block_table, len(request.token_ids))
        assert grown, "can_admit promised blocks"
        request.num_computed = match.num_tokens
        if request.reads_prefixes and not request.num_preemptions and self.kv.prefix_caching:
            self.prefix_queries += request.num_prompt
        self._count_hits(request, match.num_tokens)
        return True

    def _vacate(self, match: PrefixMatch, num_tokens: int, budget: _PromptBudget) -> bool:
        """Evict what has to leave for such a request; False if the next steps go on with that.

        Tails of prefixes leave first: what of them were lost for want of time would make the rest
        useless, and streams must not wait for all of them at once.
        """
        tiers = self.kv.tiers
        if tiers is None:
            return True
        before = tiers.seconds
        done = self.kv.vacate(match, num_tokens)
        budget.seconds -= tiers.seconds - before
        return done

    def _count_hits(self, request: Request, tokens: int) -> None:
        """A recomputation after a preemption is not the user's cache hit."""
        if not request.num_preemptions:
            request.cached_tokens += tokens
            self.prefix_hits += tokens

    def _publish(self, request: Request, num_tokens: int, *, computed: bool) -> None:
        self.kv.publish(
            request.block_table, request.chain, request.token_ids, num_tokens, computed=computed
        )

    def _take_slot(self, request: Request) -> bool:
        """Give `request` a slot and its sampler state; False (and an error for it) if refused."""
        slot = self._free_slots[-1]
        ids, num_prompt = request.token_ids, request.num_prompt
        prompt, output = ids[:num_prompt], ids[num_prompt:]
        try:
            self._slots.admit(
                slot, request.params, request.seed, prompt, output, sorted(request.stop_ids)
            )
        except Exception as error:  # one request's parameters must not end the others
            self._drop(request)
            self._refused.append(Delta(request, [], "error", error=str(error)))
            return False
        request.slot = self._free_slots.pop()
        request.scheduled = request.scheduled or time.monotonic()
        insort(self.running, request, key=_rank)
        return True

    def _preempt(self, request: Request) -> None:
        """Take the slot and all blocks of a running request; it will be recomputed."""
        self.running.remove(request)
        self._free(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push(request)

    # --- update -------------------------------------------------------------------------------

    def _advance(self, request: Request, chunk: SeqChunk, results: list[RowResult]) -> Delta | None:
        """Append what `results` say to `request`; None while a prompt is still being scored."""
        for row in results:
            if row.token < 0 or math.isnan(row.logprob):
                # A request that can bar all tokens from itself would make others compute their
                # prefixes again each time; else what it has found may be what is broken.
                if request.params.bars_tokens:
                    self.kv.unpublish_own(request.chain)
                else:
                    self.kv.unpublish(request.block_table)
                self._drop(request)
                return Delta(request, [], "error", error=NO_CHOICE)
        delta = Delta(request, [])
        if request.prompt_rows is not None and request.num_output == 0:
            sampled = bool(chunk.rows) and chunk.rows[-1].target < 0
            request.prompt_rows.extend(results[:-1] if sampled else results)
            results = results[-1:] if sampled else []
            if request.num_computed < request.num_prompt:
                return None
            delta.prompt_rows = request.prompt_rows
        if not results:
            return self._finish(delta, "length") if not request.max_tokens else None
        token = results[0].token
        delta.tokens.append(token)
        if request.num_top >= 0:
            delta.rows = results
        finish = request.append(token)
        return delta if finish is None else self._finish(delta, finish)

    def _finish(self, delta: Delta, finish: FinishReason) -> Delta:
        request = delta.request
        delta.finish = finish
        if finish == "stop" and delta.tokens[-1] in request.params.stop_token_ids:
            delta.stop_id = delta.tokens[-1]
        self._drop(request)
        return delta

    # --- common -------------------------------------------------------------------------------

    def _drop(self, request: Request) -> None:
        """Forget `request` and free all it holds."""
        del self.requests[request.id]
        if request in self.waiting:
            self.waiting.remove(request)
        if request.is_running:
            self.running.remove(request)
        self._free(request)

    def _free(self, request: Request) -> None:
        self.kv.free(request.block_table)
        request.chain.reset()
        if request.is_running:
            self._slots.release(request.slot)
            self._free_slots.append(request.slot)
            request.slot = NO_SLOT

    def _take_batch(self) -> tuple[list[SeqChunk], list[Request]]:
        taken = self._batch, self._batch_requests
        self._batch, self._batch_requests = [], []
        return taken

    def _take_refused(self) -> list[Delta]:
        taken, self._refused = self._refused, []
        return taken

    def check_invariants(self) -> None:
        """AssertionError unless queue, running set, slots and KV blocks agree (between steps)."""
        running, waiting = self.running, list(self.waiting)
        ranks = [[r.rank for r in running], [r.rank for r in waiting]]
        if self._policy == "fcfs":
            ranks = [ranks[0] + ranks[1]]
        assert all(part == sorted(part) for part in ranks), "the order is broken"
        ids = {r.id for r in [*running, *waiting]}
        assert ids == set(self.requests), "a request is lost"
        assert len(ids) == len(running) + len(waiting), "a request is in two places"
        slots = [*(r.slot for r in running), *self._free_slots]
        assert sorted(slots) == list(range(self.max_num_seqs)), "slots leak"
        assert all(not r.is_running and not r.block_table for r in waiting), "waiting holds blocks"
        assert all(r.num_computed < len(r.token_ids) for r in running), "a request stands still"
        self._check_tables(running)

    def _check_tables(self, running: Iterable[Request]) -> None:
        tables: list[list[BlockId]] = []
        for request in running:
            held = len(request.block_table) * self.kv.block_size
            assert request.num_computed <= held, "computed tokens without blocks"
            chain = request.chain
            assert chain.num_entries <= len(request.block_table), "an entry without block"
            if chain.last is not None and chain.last.block != FORGOTTEN:
                block = request.block_table[chain.num_entries - 1]
                assert block in (chain.last.block, self.kv.gone), "the chain has left the table"
            tables.append(request.block_table)
        self.kv.check_invariants(tables)


def _rank(request: Request) -> tuple[float, int]:
    return request.rank
