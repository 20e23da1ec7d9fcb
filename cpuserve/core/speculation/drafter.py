"""Drafter: proposed tokens in the rows after a decode row, which the same step verifies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from cpuserve.base.ids import SlotId
from cpuserve.core.cost import CostModel, RowWork, StepWork, price_clock
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.request import Request
from cpuserve.core.speculation.budget import LIKELY, DraftBudget, StepLimits
from cpuserve.core.speculation.ngram_drafts import LONGEST_WAIT, NgramDrafts
from cpuserve.core.step import LogitRow, SeqChunk

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.core.speculation.ngram import MakeIndex

# Where no draft can pay, this is asked again after so many steps, or with another number of rows.
IDLE_STEPS = 31


class Drafter:
    """Proposes up to `num_tokens` draft tokens after a step, and adds them to the next one.

    A request without drafts that pay is looked at in every second step, then more rarely, so a
    text that never repeats costs almost nothing. While no request is looked at, nothing is done:
    after a step of the model, each function that is called begins with cold caches.

    num_drafts: how often a sequence got draft tokens that were verified.
    num_draft_tokens: the number of draft tokens that were verified or certain.
    num_accepted_tokens: the number of draft tokens that were sampled or certain.
    limits: the limits of a step; the scheduler sets them (`limit`).
    prices: what steps with and without drafts take by `clock`; None without a clock.
    has_model: whether a draft model adds drafts after `propose`, up to Request.most_drafts.
    ended: the requests that have ended since a draft model took them, by the slot that they had.
    """

    def __init__(
        self,
        kv: KvManager,
        num_tokens: int,
        source: NgramDrafts,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.source = source
        self.has_model = False
        self.ended: dict[SlotId, Request] = {}
        self.limits = StepLimits(CostModel(), sys.maxsize)
        self.prices = None if clock is None else CostModel()
        self._clock = clock
        self._began = 0.0  # when the step with `_work` began
        self._work: StepWork | None = None
        self.budget: DraftBudget | None = None  # of the next step; a draft model always has one
        self._worth, self._worth_of = False, 0  # DraftBudget.is_worth, and of how many rows
        self._rows = self._keys = 0  # of the next step, if it has the same requests
        self._kv = kv
        self._num_tokens = num_tokens
        self._drafted = False  # whether a request may have drafts
        self._rest = self._rested = 0  # how many more steps propose nothing, and how many did not

    def limit(self, cost: CostModel, tokens: int, target_s: float) -> None:
        """Set the limits of a step (StepLimits)."""
        self.limits = StepLimits(cost, tokens, target_s, self.prices)

    @property
    def most_jumps(self) -> int:
        """How many tokens all requests together may jump over before the next step."""
        return DraftBudget.after(StepWork(self._rows, self._keys), self.limits).most_jumps

    def propose(self, requests: Sequence[Request], running: int, keys: int) -> None:
        """Set the draft tokens of requests that have got a token in the last step.

        running, keys: the number of requests of the next step, and of the keys that they read.
        """
        same = running == self._rows
        self._rows, self._keys = running, keys
        if self._rest and (same or self._worth):
            self._rest -= 1
            self._rested += 1
            return
        self._propose_all(requests, running)
        self._observe(keys)

    def _propose_all(self, requests: Sequence[Request], running: int) -> None:
        if self._worth_of and not self._worth:
            self.limits.price.forgive_drafts(1 + self._rested)
        self.budget = None
        if self.has_model or not self._worth or running != self._worth_of:
            self._make_budget()
        worth = self._worth
        self._drafted, self._rest = self.has_model, LONGEST_WAIT if worth else IDLE_STEPS
        rested, self._rested = self._rested, 0
        self.source.begin(rested)
        for request in requests:
            if request.drafts or request.most_drafts:
                request.drafts, request.chances, request.most_drafts = [], [], 0
            if not worth:  # no draft pays, however likely it is
                self.source.rest(request, 1 + rested)
            elif not request.is_running or request.computes_prompt:
                self._rest = 0
            elif (most := self._most(request)) > 0:
                self._rest = min(self._rest, self._propose(request, most))
            else:  # the next token ends the response, or a chunk of states
                self._rest = 0
        if self._drafted:
            self._rest = 0
        else:
            self._leave_out(requests)

    def _make_budget(self) -> DraftBudget:
        """Return the budget of the next step, if it has the same requests.

        Most looks at a text find nothing to propose, so they need no budget.
        """
        if self.budget is None:
            work = StepWork(self._rows, self._keys)
            self.budget = DraftBudget.after(work, self.limits)
            self._worth, self._worth_of = self.budget.is_worth, self._rows
        return self.budget

    def _leave_out(self, requests: Iterable[Request]) -> None:
        """Drop all drafts: none pays. If some are likely, their price may be too high."""
        drafted = [request for request in requests if request.drafts]
        if not drafted:
            return
        likely = any(request.chances[0] >= LIKELY for request in drafted)
        if likely and self._make_budget().tokens > 0:
            self.limits.price.forgive_drafts()
        for request in drafted:
            request.drafts, request.chances = [], []

    def _observe(self, keys: int) -> None:
        """Learn from the step that has ended, if it had decode rows and no prompts.

        Its time includes the proposals after it, which also cost something where drafts do not pay.
        """
        work, self._work = self._work, None
        if work is None or self._clock is None or self.prices is None:
            return
        if work.tokens or work.keys != keys:  # it had prompts, or the step of `work` failed
            return
        self.prices.observe(work, self._clock() - self._began)

    def _propose(self, request: Request, most: int) -> int:
        """Set the draft tokens of one request; return for how many steps it needs no look."""
        drafts, chances = self.source.propose(request, most)
        count = _before_stop(drafts, request.stop_ids) if drafts else 0
        paying = self._make_budget().count(chances[:count]) if count else 0
        if request.masked or self.has_model:
            request.most_drafts = most
        if request.masked:  # each draft of a grammar costs a bitmask
            count, self._drafted = paying, True
        if count:
            request.drafts, request.chances = drafts[:count], chances[:count]
        self._drafted |= paying > 0
        return self.source.look_again(request, found=paying > 0)

    def extend(
        self,
        requests: Iterable[Request],
        chunks: Iterable[SeqChunk],
        work: StepWork,
        *,
        prompts: bool,
    ) -> None:
        """Add draft tokens to the decode rows of a step, as far as time, tokens and blocks suffice.

        work: the work of the step; the drafts are added to it.
        prompts: whether prompts follow in the step.
        """
        if self._rest:
            return
        if self._clock is not None:
            self._work, self._began = work, self._clock()
        if not self._drafted:
            return
        budget = DraftBudget.after(work, self.limits)
        if prompts:
            budget.share_with_prompts()
        for request, chunk in zip(requests, chunks, strict=True):
            if request.drafts:
                self._extend(request, chunk, budget)
        work.drafts += budget.close()
        work.slow = budget.slow

    def _extend(self, request: Request, chunk: SeqChunk, budget: DraftBudget) -> None:
        """Append draft tokens that are worth their time to the decode row `chunk`."""
        ids, tables = request.token_ids, request.tables
        chances = request.chances[: max(self._most(request), 0)]
        if not chances:
            return
        drafts = request.drafts[: budget.take(chances, slow=request.samples_slowly)]
        if budget.grows:
            self._kv.grow(tables, len(ids) + len(drafts), request.num_computed)
        del drafts[min(map(len, tables)) * self._kv.block_size - len(ids) :]
        if not drafts:
            return
        chunk.num_drafts = len(drafts)
        chunk.token_ids += drafts
        top = request.num_top
        first = chunk.rows[-1].index
        chunk.rows = [
            LogitRow(first + i, -1, top, draft, i if request.masked else -1)
            for i, draft in enumerate([*drafts, -1])
        ]

    def end(self, request: Request) -> None:
        """Note that the last step of a request has run; it still has its slot."""
        if self.has_model:
            self.ended[request.slot] = request

    def take_ended(self) -> dict[SlotId, Request]:
        """Return `ended`, and forget these requests."""
        taken, self.ended = self.ended, {}
        return taken

    def count(self, verified: int, accepted: int) -> None:
        """Count the draft tokens of a sequence after the step that verified them."""
        self.num_drafts += 1
        self.num_draft_tokens += verified
        self.num_accepted_tokens += accepted

    def _most(self, request: Request) -> int:
        """Return the most draft tokens of a request.

        None of them can be the last token of the response, because the row after the last draft
        token samples one more token, which may end the response.
        """
        left = request.max_tokens - request.num_output
        most = min(self._num_tokens, left - 1)
        if self._kv.has_states:  # a state cannot be undone, so drafts must not fill a state chunk
            chunk = self._kv.state_chunk
            most = min(most, chunk - 2 - (len(request.token_ids) - 1) % chunk)
        return most


def learned_rows(
    drafter: Drafter | None, measured: Iterable[list[tuple[int, float]]]
) -> Iterator[bool]:
    """Give the cost model of drafts the measured times of rows; yield True after each part.

    measured: the parts of the measurement (Executor.row_times).
    """
    if drafter is None:
        return
    for times in measured:
        if times:
            limits = drafter.limits
            limits.cost.row_work = limits.price.row_work = RowWork(times)
        yield True


def _before_stop(drafts: Sequence[int], stop_ids: frozenset[int]) -> int:
    """Return how many of `drafts` come before the first one that ends the response."""
    if stop_ids.isdisjoint(drafts):
        return len(drafts)
    return next(i for i, draft in enumerate(drafts) if draft in stop_ids)


def make_drafter(
    config: EngineConfig, kv: KvManager, text_indexes: Callable[[int, int], MakeIndex]
) -> Drafter | None:
    """Return the drafter of an engine; None if there are no draft tokens.

    text_indexes: returns a maker of indexes of n-grams, from the least to the most tokens.
    """
    asked = config.speculation
    if asked is None:
        return None
    make_index = text_indexes(asked.prompt_lookup_min, asked.prompt_lookup_max)
    tokens = asked.indexed_tokens(config.max_num_seqs, config.max_model_len)
    source = NgramDrafts(make_index, tokens)
    drafter = Drafter(kv, asked.num_speculative_tokens, source, price_clock)
    drafter.has_model = config.draft is not None
    return drafter
