"""Scheduler: which tokens run in the next step.

There is no prefill phase and no decode phase. Each request has `num_computed` tokens chasing
`len(token_ids)`, and one token budget per step covers decode rows and prompt chunks alike. Decode
rows come first, so a long prompt never stalls running streams.

`running` is always in arrival order and older than everything that waits. Blocks are taken oldest
first and preemption takes the youngest, so the oldest request always advances: no livelock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Protocol

from cpuserve.core.kv.manager import KvManager
from cpuserve.core.queue import WaitingQueue
from cpuserve.core.request import NO_SLOT, Delta, FinishReason, Request
from cpuserve.core.step import RowResult, SeqChunk, StepBatch, StepResult
from cpuserve.ids import BlockId, RequestId, SlotId
from cpuserve.sampling.params import SamplingParams


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


class Scheduler:
    """Continuous batching over paged KV, with chunked prompts and preemption by recompute."""

    def __init__(
        self, kv: KvManager, slots: SlotHost, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.kv = kv
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.requests: dict[RequestId, Request] = {}
        self.num_preemptions = 0
        # A decode row each must fit in one step.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
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

    # --- one step -----------------------------------------------------------------------------

    def schedule(self) -> StepBatch:
        """Choose the tokens of the next step; `update` or `fail` must follow."""
        assert not self._batch, "the last step was not finished with update() or fail()"
        prompts = self._schedule_decodes()
        budget = self.max_num_batched_tokens - len(self._batch)
        for request in prompts:
            if budget <= 0:
                break
            budget -= self._schedule_chunk(request, budget)
        self._admit_waiting(budget)
        return StepBatch(self._batch)

    def update(self, results: StepResult) -> list[Delta]:
        """Take the results of the step `schedule` made, row by row; what each request got."""
        batch, requests = self._take_batch()
        assert sum(len(c.rows) for c in batch) == len(results), "a result per row, please"
        deltas = self._take_refused()
        next_row = 0
        for request, chunk in zip(requests, batch, strict=True):
            request.num_computed += len(chunk.token_ids)
            first_row = next_row
            next_row += len(chunk.rows)
            if next_row > first_row or request.num_computed == request.num_prompt:
                delta = self._advance(request, chunk, results[first_row:next_row])
                if delta is not None:
                    deltas.append(delta)
        return deltas

    def fail(self, message: str) -> list[Delta]:
        """The step could not run: every request in it ends with an error."""
        _, requests = self._take_batch()
        deltas = self._take_refused()
        for request in requests:
            self._drop(request)
            deltas.append(Delta(request, [], "error", error=message))
        return deltas

    # --- schedule -----------------------------------------------------------------------------

    def _schedule_decodes(self) -> list[Request]:
        """Put one token of each generating request into the batch; returns the other ones."""
        prompts: list[Request] = []
        block_size = self.kv.block_size
        batch, batch_requests, running = self._batch, self._batch_requests, self.running
        index = 0
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
        return prompts

    def _make_room(self, request: Request) -> bool:
        """One more block for `request`, preempting the youngest; False if that is itself."""
        while not self.kv.grow(request.block_table, request.num_computed + 1):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _schedule_chunk(self, request: Request, budget: int) -> int:
        """Put as much of what `request` has left as `budget` allows into the batch; how many."""
        start = request.num_computed
        end = min(len(request.token_ids), start + budget)
        tokens = request.token_ids[start:end]
        rows = request.rows(end)
        self._batch.append(SeqChunk(request.slot, tokens, start, request.block_table, rows))
        self._batch_requests.append(request)
        return end - start

    def _admit_waiting(self, budget: int) -> None:
        """Start waiting requests while slots, blocks and budget last."""
        while budget > 0 and self._free_slots:
            request = self.waiting.head()
            if request is None or not self._take_blocks(request):
                return
            self.waiting.remove(request)
            if self._take_slot(request):
                budget -= self._schedule_chunk(request, budget)

    def _take_blocks(self, request: Request) -> bool:
        """Blocks for all tokens `request` has now, so that only decode rows ever need more.

        One spare block per running request: it can decode block_size tokens before anybody has to
        be preempted again, which bounds what a tight pool recomputes.
        """
        kv, table = self.kv, request.block_table
        if request.prompt_rows is None:
            kv.adopt(table, kv.match_prefix(request.token_ids))
        request.num_computed = len(table) * kv.block_size
        if kv.grow(table, len(request.token_ids), spare=len(self.running)):
            if not request.num_preemptions:
                request.cached_tokens = request.num_computed
            return True
        kv.free(table)
        return False

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
        self.running.append(request)
        return True

    def _preempt(self, request: Request) -> None:
        """Take the slot and all blocks of the youngest request; it will be recomputed."""
        assert request is self.running[-1]
        self.running.pop()
        self._free(request)
        request.num_computed = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.push_front(request)

    # --- update -------------------------------------------------------------------------------

    def _advance(self, request: Request, chunk: SeqChunk, results: list[RowResult]) -> Delta | None:
        """Append what `results` say to `request`; None while a prompt is still being scored."""
        for row in results:
            if row.token < 0 or math.isnan(row.logprob):
                self._drop(request)
                return Delta(request, [], "error", error="the model produced NaN logits")
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
        orders = [r.order for r in [*running, *waiting]]
        assert orders == sorted(orders), "arrival order is broken"
        ids = {r.id for r in [*running, *waiting]}
        assert ids == set(self.requests), "a request is lost"
        assert len(ids) == len(orders), "a request is in two places"
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
            tables.append(request.block_table)
        self.kv.check_invariants(tables)
