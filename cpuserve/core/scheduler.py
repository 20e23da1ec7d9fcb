"""Scheduler: choose the tokens of the next step.

All tokens of a request after the first `num_computed` tokens have to run. One token budget per
step covers decode rows and prompt chunks. Decode rows are scheduled first. If a step has decode
rows, the cost model limits its prompt chunks, so that running streams keep their latency.

The prompts of a step share its budget (budget.py). The prompt with the fewest remaining tokens is
served first, and a part of the budget is reserved for the oldest prompt. If no stream runs, a step
is short or can be ended early (`ends_for`, `rewind`), so that new short requests do not wait long.

`running` is sorted by rank (queue.rank_of): by arrival, or by priority with aging. In `waiting`,
and among the prompts of a step, the callers get equal shares (callers.py). A request never takes
blocks that an earlier request in `waiting` needs. The last requests of `running` are preempted
first, never its first one (preemption.py), which always advances. The scheduler passes over
requests with a grammar that is still being compiled; they keep their rank (`make_ready`).

Blocks of a prompt are published when its chunk is scheduled, before it has run. This is safe
because an executor stores the keys of all tokens of a step before any token attends (or runs
sequences in batch order), and parks no sequence if another one of its step reads its keys.
Requests that arrive together can therefore share prefixes.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

import msgspec

from cpuserve.base.ids import BlockId, RequestId, SlotId
from cpuserve.core import preemption
from cpuserve.core.budget import PromptBudget, loss_allowed
from cpuserve.core.callers import CallerShares
from cpuserve.core.check import check_requests, check_slots, check_tables
from cpuserve.core.cost import COARSE, CostModel, StepWork, rounded_chunk
from cpuserve.core.encoding import EncodedMedia, WantedItem
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.prefix import ChainMark
from cpuserve.core.prompt_blocks import PromptBlocks
from cpuserve.core.queue import Policy, PromptOrder, WaitingQueue, by_rank, candidates, rank_of
from cpuserve.core.request import NO_SLOT, Delta, Request, SlotHost, keep_state
from cpuserve.core.results import ParkedChunks, ResultProcessor
from cpuserve.core.speculation.drafter import Drafter
from cpuserve.core.step import SeqChunk, StepBatch, StepResult, rows_of
from cpuserve.core.waits import QueueWaits
from cpuserve.sampling.slot import SlotRequest

# The engine takes no messages while it moves blocks from or to offload tiers. It stops moving after
# MOVING_S seconds or one block more, so it learns within 50 ms that a client has left.
MOVING_S = 0.03
Taken = tuple[list[SeqChunk], list[Request]]


class Scheduler:
    """Continuous batching over paged KV: chunked prompts, shared prefixes, preemption by recompute.

    itl_target_s: longest time of a step with decode rows, 0 = no limit.
    long_prefill_token_threshold: most tokens of one prompt in a step, 0 = no limit.
    moving_s: seconds that `schedule` may spend on moving blocks from and to offload tiers if no
    stream waits for the step. A move that has begun is finished.
    drafter: proposes draft tokens after decode rows; None = there are no draft tokens.
    media: the encoded items in the media buffer; None = the model reads texts only.
    whole_prompts: a prompt is computed in one step, because its tokens attend to later tokens
    (encoders). None may then be longer than max_num_batched_tokens, and none generates tokens.
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
        drafter: Drafter | None = None,
        media: EncodedMedia | None = None,
        whole_prompts: bool = False,
    ) -> None:
        self.kv = kv
        self.cost = CostModel()
        self.work = StepWork()
        self.blocks = PromptBlocks(kv, self.cost)
        self.drafter = drafter
        self.media = media or EncodedMedia(0)
        self.callers = CallerShares()
        self._order = PromptOrder(kv, self.callers, policy)
        self.waiting = WaitingQueue(self.callers, policy, self._order.tokens_left)
        self.running: list[Request] = []
        self.requests: dict[RequestId, Request] = {}
        self.num_preemptions = 0
        # One decode row of every running request must fit into a step.
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self._itl_target_s = itl_target_s
        if drafter is not None:
            drafter.limit(self.cost, max_num_batched_tokens, itl_target_s)
        self._chunk_limit = long_prefill_token_threshold or max_num_batched_tokens
        if whole_prompts:
            self._chunk_limit = max_num_batched_tokens
        if any(kv.use.windows) and kv.use.ahead:
            self._chunk_limit = min(self._chunk_limit, kv.use.ahead)
        self._whole_prompts = whole_prompts
        self._policy: Policy = policy
        self._moving_s = moving_s
        self._slots = slots
        self._results = ResultProcessor(kv, self._drop, drafter)
        self._free_slots = [SlotId(i) for i in range(self.max_num_seqs - 1, -1, -1)]
        self._num_added = 0
        self._batch: list[SeqChunk] = []
        self.batch_requests: list[Request] = []  # in the order of the chunks of the step
        self._marks: list[ChainMark] = []  # positions of the prefix chains before the step
        self.parked = ParkedChunks(max_num_batched_tokens)
        self._refused: list[Delta] = []
        self._num_unready = 0
        self._waits = QueueWaits()
        self._restoring: set[RequestId] = set()  # the next steps have to restore more blocks first
        # Whether bitmasks for the next step are not computed: requests with one are passed over.
        self.masks_late = False
        self.encodes = False

    # --- adding and removing requests ---------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request that has passed admission.check_request."""
        assert request.id not in self.requests, f"request {request.id} exists"
        request.order = self._num_added
        request.rank = rank_of(request, self._policy)
        request.tables = self.kv.new_tables()
        self._num_added += 1
        self.requests[request.id] = request
        self.callers.came(request)
        self.waiting.push(request)
        self._num_unready += not request.ready
        now = time.monotonic()
        self._waits.came(request, request.arrival if 0.0 < request.arrival < now else now)
        if not request.ready:
            self._waits.hold(request, "grammar", now)

    def make_ready(self, request: Request) -> None:
        """Let a waiting request start; it keeps its place in the queue."""
        assert not request.ready, f"request {request.id} is ready"
        request.ready = True
        self._num_unready -= 1
        self._waits.came(request, time.monotonic())

    def end_with_the_grammar(self, request: Request) -> None:
        """Let a running request end before min_tokens, because its grammar allows no more text."""
        request.params = msgspec.structs.replace(request.params, min_tokens=0)
        keep_state(self._slots, request)
        self._admit(request, request.slot)

    def abort(self, request_id: RequestId) -> bool:
        """Drop a waiting or running request, between steps; False if the request does not exist."""
        if (request := self.requests.get(request_id)) is not None:
            self._drop(request)
        return request is not None

    @property
    def has_work(self) -> bool:
        """Whether a request runs, or waits and is ready."""
        return len(self.requests) > self._num_unready

    @property
    def _startable(self) -> Iterator[Request]:
        """The waiting requests that may start now, sorted by rank."""
        if self.masks_late:
            return (r for r in self.waiting if r.ready and not r.masked)
        return (r for r in self.waiting if r.ready) if self._num_unready else iter(self.waiting)

    # --- one step -----------------------------------------------------------------------------

    def schedule(self) -> StepBatch:
        """Choose the tokens of the next step; `update`, `fail` or `abandon` must follow.

        The batch may be empty while blocks are moved from or to offload tiers;
        the next call then continues to move them.
        """
        assert not self._batch, "the last step was not finished"
        self.work = StepWork()
        if self.kv.offload is not None:
            self.kv.offload.left_s = self._moving_s
        if self.running and self.waiting:
            self._make_way()
        prompts = self._schedule_decodes()
        if self.waiting:
            slots = len(self._free_slots)
            prompts += candidates(self._startable, slots, self.kv, len(self.running))
        begun = [request for request in prompts if not request.num_output]
        wanted = bool(self.media.wanted)
        self.encodes = wanted and self.media.takes_turn(prompts=bool(prompts))
        prompts = [] if self.encodes else prompts
        most = self.max_num_batched_tokens - self.parked.num_tokens
        if self.drafter is not None and self.work.rows:
            more, self.drafter.limits.tokens = bool(prompts), most
            self.drafter.extend(self.batch_requests, self._batch, self.work, prompts=more)
        if prompts and self._whole_prompts:
            self._schedule_whole(prompts)
        elif prompts:
            left, target = most - self.work.rows - self.work.drafts, self._itl_target_s
            budget = PromptBudget.of_step(prompts, left, self.work, self.cost, target)
            self.parked.charge(budget, self.cost)
            if self.kv.offload is not None and budget.seconds < math.inf:
                # The streams wait for this step in any case, so moves may use all of its time.
                self.kv.offload.left_s += budget.seconds - self._moving_s
            self._schedule_prompts(prompts, budget)
        due = self.parked.due(self.running, self._batch, masks_late=self.masks_late)
        for request, chunk in due:
            self._batch.append(chunk)
            self.batch_requests.append(request)
            self._marks.append(request.chain.mark)
        if self.media.turns:
            self.media.turn(self.batch_requests, self._batch)
        if begun or self.waiting or self.media.blocked or self.masks_late:
            self._note_waits(begun)
        return StepBatch(self._batch)

    def update(self, results: StepResult) -> list[Delta]:
        """Apply the results of the scheduled step, one per row; return a delta for each request."""
        batch, requests = self._take_batch()
        self.callers.computed(requests[self.work.rows :], batch[self.work.rows :])
        deltas = self._take_refused()
        next_row, block_size, append = 0, self.kv.block_size, self._results.append
        for request, chunk in zip(requests, batch, strict=True):
            self.parked.forget(request.id)
            if request.wait.cause:
                self._waits.end(request, time.monotonic())
            first_row, next_row = next_row, next_row + len(chunk.rows)
            if chunk.num_drafts:
                rows = results[first_row:next_row]
                deltas.append(self._results.append_drafts(request, chunk, rows))
                continue
            computed = request.num_computed = chunk.start + len(chunk.token_ids)
            if computed // block_size > chunk.start // block_size:
                self.kv.publish(
                    request.tables, request.chain, request.token_ids, computed, computed=True
                )
                self.kv.reach(request.tables, computed, len(request.token_ids))
            if next_row > first_row or computed == request.num_prompt:
                delta = append(request, chunk, results[first_row:next_row])
                if delta is not None:
                    deltas.append(delta)
            if request.progress and computed < request.num_prompt and not request.num_output:
                deltas.append(Delta(request, [], processed=computed))
        assert next_row == len(results), "the step needs one result per row"
        if self.drafter is not None:
            self.drafter.propose(requests, len(self.running), self.work.keys)
        return deltas

    def fail(self, message: str) -> list[Delta]:
        """End every request of the step, which failed; "" = without an error: all were aborted."""
        failed = [Delta(r, [], "error", error=message) for r in self.batch_requests if message]
        self.lose(range(len(self._batch)), [], "")
        return self._take_refused() + failed

    def lose(self, numbers: Sequence[int], results: StepResult, message: str) -> StepResult:
        """End the requests of these chunks with an error, or none; return the other results."""
        batch, requests = self._take_batch()
        lost = {b for i in numbers for b in self._blocks_from(requests[i], batch[i].start)}
        for request, chunk in zip(requests, batch, strict=True):
            if request.uses(lost):
                self.kv.published.unpublish(self._blocks_from(request, chunk.start))
        for i in numbers:
            self._drop(requests[i])
            delta = Delta(requests[i], [], "error", error=message, unavailable=True)
            self._refused += [delta] if message else []
        for request in [r for r in self.running if r.uses(lost)]:  # these have adopted its blocks
            self._preempt(request)
        kept = [i for i, request in enumerate(requests) if request.is_running]
        return self._keep(kept, (batch, requests), results)

    def _keep(self, kept: list[int], taken: Taken, results: StepResult) -> StepResult:
        """Leave only these chunks of a step that has run; return their results."""
        batch, requests = taken
        self._batch, self.batch_requests = [batch[i] for i in kept], [requests[i] for i in kept]
        self.work.rows = sum(i < self.work.rows for i in kept)
        return rows_of(batch, results, kept)

    def park(self, numbers: Sequence[int], results: StepResult) -> StepResult:
        """Keep these chunks, which wait for experts, for the next steps; return other results."""
        marks, first = self._marks, len(self._batch) - len(self._marks)
        batch, requests = self._take_batch()
        now = time.monotonic()
        for i in numbers:
            self.parked.park(requests[i].id, batch[i])
            self._waits.hold(requests[i], "experts", now)
            if i >= first:  # no other request may read its blocks before they are computed
                self.kv.published.unpublish_since(requests[i].chain, marks[i - first])
        new = {b for i in numbers for b in self._blocks_from(requests[i], batch[i].start)}
        for request in preemption.users(self.running, new, self.kv.block_size):
            self._preempt(request)
        kept = [i for i, r in enumerate(requests) if r.is_running and i not in numbers]
        return self._keep(kept, (batch, requests), results)

    def refuse(self, wanted: WantedItem, message: str) -> None:
        """End the requests that wait for an item with an error, because it was not encoded."""
        for request in [self.requests[number] for number in self.media.refused(wanted)]:
            self._drop(request)
            self._refused.append(Delta(request, [], "error", error=message))

    def _blocks_from(self, request: Request, start: int) -> list[BlockId]:
        """Return the blocks for the tokens of `request` from position `start` on."""
        return self.kv.held([table[start // self.kv.block_size :] for table in request.tables])

    # --- ending a step early ------------------------------------------------------------------

    def ends_for(self, request: Request, elapsed: float) -> bool:
        """Whether the step that has run for `elapsed` seconds should end early for `request`.

        `request` is new and has not been added. A step is ended only if it has no decode rows
        and its prompts lose few computed tokens. The wait of `request` for the end of the step
        must also exceed half the time of its own prompt. If this returns True, call `rewind`.
        """
        if self.work.rows or not self._itl_target_s or not request.ready or self.parked.in_step:
            return False
        # After `rewind` whole prompts would come first again, and states may have changed.
        if self._whole_prompts or self.kv.has_states:
            return False
        predicted = self.cost.step_seconds(self.work)
        # With several callers no step has more than COARSE tokens (PromptOrder.share).
        new = self.work.tokens > COARSE and self.callers.is_idle(request.params.caller)
        allowed = loss_allowed(self.batch_requests, self._batch)
        too_late = elapsed > predicted * allowed and not new
        if too_late or not self._can_start(request):
            return False
        left = self._order.tokens_left(request)
        pairs = left * (len(request.token_ids) - 0.5 * left)
        alone = self.cost.decode_seconds(0, 0) + self.cost.prompt_seconds(left, pairs)
        return alone < 2.0 * (predicted - elapsed)

    def rewind(self, elapsed: float) -> list[Delta]:
        """Undo a step that was ended early after `elapsed` seconds: its chunks will run again.

        Only a step that has not begun (0 seconds) may have decode rows.
        """
        done = min(elapsed / self.cost.step_seconds(self.work), 1.0)
        marks = self._marks
        batch, requests = self._take_batch()
        never_written: set[BlockId] = set()
        prompts = slice(len(batch) - len(marks), None)  # decode rows come first
        for request, chunk, mark in zip(requests[prompts], batch[prompts], marks, strict=True):
            self.kv.published.unpublish_since(request.chain, mark)
            never_written.update(self._blocks_from(request, chunk.start))
            request.num_lost += done * len(chunk.token_ids)
        # A request may have skipped tokens that another request was going to compute in this step.
        for request in preemption.users(self.running, never_written, self.kv.block_size):
            self._preempt(request)
        return self._take_refused()

    def _can_start(self, request: Request) -> bool:
        """Whether the next step could start `request` as well as all waiting requests before it."""
        waiting = [*self._before(request), request]
        blocks = sum(self.kv.needs(len(r.token_ids)) for r in waiting)
        blocks += self.kv.num_groups * (len(waiting) + len(self.running))
        slots = len(self._free_slots)
        if len(waiting) > slots or blocks > self.kv.num_free:
            idle = self.callers.is_idle(request.params.caller) and len(waiting) == 1
            return idle and bool(self._victims(request))
        least = min(r.priority for r in self.batch_requests)
        return self._policy == "fcfs" or request.priority <= least

    def _before(self, request: Request) -> Iterator[Request]:
        """Return the waiting requests that start before a new one."""
        if not self.callers.is_idle(request.params.caller):
            return self._startable
        return takewhile(lambda r: not self.callers.runs(r.params.caller), self._startable)

    # --- choosing the tokens of a step --------------------------------------------------------

    def _schedule_decodes(self) -> list[Request]:
        """Schedule one token of each generating request; return the running requests with prompts.

        The returned requests have more than one token to compute: prompt tokens,
        or all tokens of a preempted request that starts again. They are scheduled in chunks.
        """
        prompts: list[Request] = []
        block_size, slides = self.kv.block_size, self.kv.slides
        batch, batch_requests = self._batch, self.batch_requests
        blocked = self.media.blocked | self.parked.ids
        for request in tuple(self.running):
            if request.slot == NO_SLOT:  # it was preempted for an earlier one
                continue
            if (self.masks_late and request.masked) or request.id in blocked:
                continue
            ids, start, tables = request.token_ids, request.num_computed, request.tables
            if start + 1 + request.sure < len(ids) or start < request.num_prompt:
                # A block that leaves the window is usually freed, and the next chunk takes a block
                # in its place. But a shared block is not freed. So a new block is taken
                # here, where other requests can be preempted: prompt chunks preempt no request.
                if slides and not self._get_blocks(request, self.media.least(request, start)):
                    continue
                prompts.append(request)
                continue
            if len(ids) > len(tables[0]) * block_size and not self._get_blocks(request):
                continue
            batch.append(request.chunk(ids[start:], start, request.next_rows))
            batch_requests.append(request)
        self.work.rows, self.work.keys = len(batch), sum([chunk.start for chunk in batch])
        self.work.drafts = sum([request.sure for request in batch_requests])
        return [request for request in prompts if request.is_running] if prompts else prompts

    def _schedule_prompts(self, prompts: list[Request], budget: PromptBudget) -> None:
        """Schedule prompts in their order (queue.py); reserve a share for the oldest prompt."""
        prompts.sort(key=by_rank)
        while prompts and not self._start(prompts[0], budget):
            del prompts[0]
        if not prompts:
            return
        oldest = prompts[0]
        prompts = self._order.share(self._order.in_order(prompts), oldest, budget)
        at = 0 if self.media.least(oldest, oldest.num_computed) > 1 else prompts.index(oldest)
        prompts.remove(oldest)
        if at:
            kept = budget.keep_back()
            self._compute(prompts[:at], budget)
            budget.give_back(kept)
        self._proceed(oldest, budget)
        self._compute(prompts[at:], budget)

    def _schedule_whole(self, prompts: list[Request]) -> None:
        """Schedule whole prompts by rank; a prompt that does not fit waits, and later prompts pass.

        The first prompt always fits, so no prompt waits forever.
        """
        tokens = self.max_num_batched_tokens
        budget = PromptBudget(tokens, math.inf, 0, tokens, tokens, alone=False)
        for request in self._order.whole(prompts):
            if len(request.token_ids) <= budget.tokens and self._start(request, budget):
                self._schedule_chunk(request, budget)

    def _compute(self, prompts: Iterable[Request], budget: PromptBudget) -> None:
        """Schedule parts of `prompts`, in this order, until the budget is used up."""
        for request in prompts:
            if budget.is_spent:
                return
            if request.is_running:
                self.blocks.catch_up(request)
            # Count the remaining tokens again: this step may already compute a shared prefix.
            left = self._order.tokens_left(request)
            if not budget.holds_up(left) and self._start(request, budget):
                self._proceed(request, budget)

    def _get_blocks(self, request: Request, count: int = 1) -> bool:
        """Take blocks for more tokens, preempting others; False if `request` was preempted."""
        computed = request.num_computed
        self.kv.slide(request.tables, computed)
        while not self.kv.grow(request.tables, computed + max(count, 1 + request.sure), computed):
            victim = preemption.to_free_a_block(self.running, self.kv, self._policy)
            self._preempt(victim)
            if victim is request:
                return False
            if victim in self.batch_requests:
                at = self.batch_requests.index(victim)
                del self.batch_requests[at], self._batch[at]
        return True

    def _make_way(self) -> None:
        """Preempt requests for the first waiting one, if it may take their slots or blocks."""
        head = next(self._startable, None)
        if head is None or (self._policy == "fcfs" and self.callers.runs(head.params.caller)):
            return
        if self._fits(head):
            return
        for victim in self._victims(head):
            if self._fits(head):
                return
            self._preempt(victim)

    def _victims(self, head: Request) -> list[Request]:
        own, slots = self.callers.runs(head.params.caller), len(self._free_slots)
        return preemption.victims(head, self.running, self.kv, self._policy, slots, runs=own)

    def _fits(self, request: Request) -> bool:
        return bool(self._free_slots) and self.blocks.match(request, len(self.running)) is not None

    def _proceed(self, request: Request, budget: PromptBudget) -> None:
        """Skip cached and offloaded tokens of `request`, and schedule some of the others."""
        self.blocks.catch_up(request)
        restored = self.blocks.restore(request, budget)
        if restored == "some":
            self._restoring.add(request.id)
        if restored == "all" or (restored == "lost" and self._start_again(request, budget)):
            self._schedule_chunk(request, budget)

    def _start_again(self, request: Request, budget: PromptBudget) -> bool:
        """Let `request` compute all tokens after the last block that every cache group has.

        `request` lacks blocks of windows, or states, before the block that a tier has lost.
        Returns False if the request has to wait for blocks.
        """
        self._preempt(request)
        request.chain.failed = True
        return self._start(request, budget)

    def _schedule_chunk(self, request: Request, budget: PromptBudget) -> None:
        """Schedule as many remaining tokens of `request` as `budget` allows."""
        start, left = request.num_computed, len(request.token_ids) - request.num_computed
        room = self.kv.reach(request.tables, start, len(request.token_ids)) - start
        room = self.media.room(request, start, room)
        count = most = min(budget.most(left, request.num_labels), self._chunk_limit, room)
        if budget.seconds < math.inf:
            fitting = self.cost.chunk(start, budget.seconds)
            count = min(most, max(fitting, budget.least, 1))
        if count <= 0:
            return
        # A prompt that gets fewer tokens than it needs leaves too few for another prompt.
        budget.closed = count < min(left, self._chunk_limit, room)
        if count < left:
            room = min(
                room, self.max_num_batched_tokens - sum(len(c.token_ids) for c in self._batch)
            )
            count = self.media.uncut(request, start, rounded_chunk(start, count), room)
        if not count:
            return
        end = start + count
        tokens = request.token_ids[start:end]
        rows = request.rows(end)
        self._batch.append(request.chunk(tokens, start, rows))
        self._batch[-1].media = self.media.rows(request, start, end)
        self.batch_requests.append(request)
        self._marks.append(request.chain.mark)
        self.kv.publish(request.tables, request.chain, request.token_ids, end, computed=False)
        before, scores = self.work.pairs, sum(row.target >= 0 for row in rows)
        self.work.add_prompt(start, count, scores)
        seconds = self.cost.prompt_seconds(count, self.work.pairs - before, scores)
        budget.spend(max(count, len(rows)), seconds, finishes=count == left)

    def _start(self, request: Request, budget: PromptBudget) -> bool:
        """Give a waiting `request` blocks and a slot; False if it cannot start now."""
        if request.is_running:
            return True
        if not self.blocks.take(request, budget, len(self.running)):
            return False
        self.waiting.remove(request)
        return self._take_slot(request)

    def _take_slot(self, request: Request) -> bool:
        """Give `request` a slot with sampler state; if that fails, end it and return False."""
        try:
            self._admit(request, self._free_slots[-1])
        except Exception as error:  # bad parameters of one request must not end the others
            self._drop(request)
            self._refused.append(Delta(request, [], "error", error=str(error)))
            return False
        request.slot = self._free_slots.pop()
        now = time.monotonic()
        self._waits.started(request, now)
        request.scheduled = request.scheduled or now
        self.callers.started(request)
        insort(self.running, request, key=by_rank)
        return True

    def _admit(self, request: Request, slot: SlotId) -> None:
        output = request.token_ids[request.num_prompt :]
        tokens = request.prompt_text, output, sorted(request.stop_ids)
        self._slots.admit(slot, SlotRequest(request.params, request.seed, *tokens))

    def _preempt(self, request: Request) -> None:
        """Free the slot and all blocks of a running request, and queue it to be recomputed."""
        self.running.remove(request)
        self.kv.publish_end(request.tables, request.chain, request.num_computed)
        keep_state(self._slots, request)
        self._free(request)
        request.num_computed = request.sure = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.callers.preempted(request)
        self.waiting.push(request)
        self._waits.came(request, time.monotonic())

    # --- why requests wait --------------------------------------------------------------------

    def _note_waits(self, started: list[Request]) -> None:
        """Note what holds back the requests that are not in this step, or only in the next ones.

        started: the requests without a first token that could have been in it.
        """
        now, num_rows = time.monotonic(), self.work.rows
        cause = self._queue_cause()
        late = "grammar" if self.masks_late else cause
        self._waits.scheduled({False: cause, True: late}, now)
        in_order = self._policy == "fcfs" and len(self.callers) < 2
        self._waits.pass_over(self.waiting, now, in_order=in_order)
        in_step = {request.id for request in self.batch_requests[num_rows:]}
        blocked = self.media.blocked
        started = [*started, *(self.requests[number] for number in blocked - in_step)]
        if self.masks_late:
            started += [request for request in self.running if request.masked]
        for request in started:
            if not request.is_running or request.num_output or request.id in self.parked.ids:
                continue
            if request.id in in_step:
                self._waits.end(request, now)
            elif self.encodes or request.id in blocked:
                self._waits.hold(request, "media", now)
            elif self.masks_late and request.masked:
                self._waits.hold(request, "grammar", now)
            else:
                cause = "offload" if request.id in self._restoring else "prompts"
                self._waits.hold(request, cause, now)
        self._restoring.clear()

    def _queue_cause(self) -> str:
        """Return what holds back the waiting requests that are ready."""
        if self.encodes:
            return "media"
        if not self._free_slots:
            return "slots"
        head = next(self._startable, None)
        if head is None:
            return "step"
        kv = self.kv
        free = kv.num_free - kv.num_groups * (len(self.running) + 1)
        return "blocks" if kv.needs(len(head.token_ids)) > free else "prompts"

    # --- helpers of the methods above ---------------------------------------------------------

    def _drop(self, request: Request) -> None:
        """Remove `request` and free its slot and blocks."""
        del self.requests[request.id]
        self.media.forget(request.id)
        self._num_unready -= not request.ready
        if request in self.waiting:
            self.waiting.remove(request)
        if request.is_running:
            self.running.remove(request)
        self._free(request)
        if self.drafter is not None:
            self.drafter.end(request)
        self.callers.ended(request)

    def _free(self, request: Request) -> None:
        self.parked.forget(request.id)
        self.kv.free(request.tables, continues=request.chain.continues)
        request.chain.reset()
        self.media.stop(request.id)
        if request.is_running:
            self._slots.release(request.slot)
            self._free_slots.append(request.slot)
            request.slot = NO_SLOT
            self.callers.stopped(request)

    def _take_batch(self) -> Taken:
        taken = self._batch, self.batch_requests
        self._batch, self.batch_requests, self._marks = [], [], []
        return taken

    def _take_refused(self) -> list[Delta]:
        taken, self._refused = self._refused, []
        return taken

    def check_invariants(self) -> None:
        """Raise AssertionError unless requests, slots and KV blocks agree between two steps."""
        running, waiting = self.running, list(self.waiting)
        check_requests(running, waiting, self.requests)
        check_slots(running, self._free_slots, self.max_num_seqs)
        assert self._num_unready == sum(not r.ready for r in waiting), "unready ones are miscounted"
        self.callers.check(running, waiting)
        check_tables(running, self.kv)
        self.media.check_invariants([r.id for r in running], self.requests)
