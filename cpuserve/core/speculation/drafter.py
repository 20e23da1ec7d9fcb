"""Drafter: proposed tokens in the rows after a decode row, which the same step verifies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from cpuserve.core.cost import CostModel, RowWork, StepWork, price_clock
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.request import Request
from cpuserve.core.speculation.budget import LIKELY, DraftBudget, StepLimits
from cpuserve.core.speculation.ngram_drafts import NgramDrafts
from cpuserve.core.speculation.ngram_proposer import NgramProposer
from cpuserve.core.speculation.proposer import Proposer, Round
from cpuserve.core.step import LogitRow, SeqChunk

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.core.speculation.ngram import MakeIndex


class Drafter:
    """Lets proposers propose up to `num_tokens` draft tokens after a step; adds them to the next.

    While no request needs a look, nothing is done: after a step of the model, each function that
    is called begins with cold caches.

    num_drafts: how often a sequence got draft tokens that were verified.
    num_draft_tokens: the number of draft tokens that were verified or certain.
    num_accepted_tokens: the number of draft tokens that were sampled or certain.
    limits: the limits of a step; the scheduler sets them (`limit`).
    prices: what steps with and without drafts take by `clock`; None without a clock.
    proposers: the first one looks at each text right after a step (n-grams). The others take their
      time, after the tokens of the step were sent.
    with_masks: looks before a step at the requests whose bitmasks have come; None = there are none.
    """

    def __init__(
        self,
        kv: KvManager,
        num_tokens: int,
        proposers: Sequence[Proposer],
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self.proposers = list(proposers)
        self.with_masks: Proposer | None = None
        self._round: Round | None = None
        self.limits = StepLimits(CostModel(), sys.maxsize)
        self.prices = None if clock is None else CostModel()
        self._clock = clock
        self._began = 0.0  # when the step with `_work` began
        self._work: StepWork | None = None
        self._budget: DraftBudget | None = None  # of the next step
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
        is_same = running == self._rows
        self._rows, self._keys = running, keys
        if self._rest and (is_same or self._worth):
            self._rest -= 1
            self._rested += 1
            return
        self._propose_all(requests, running)
        self._observe(keys)

    def propose_after_sending(self, requests: Sequence[Request]) -> None:
        """Let the other proposers set drafts of running requests, between two steps."""
        if self._round is not None:
            for proposer in self.proposers[1:]:
                proposer.propose(requests, self._round)

    def propose_with_masks(self, requests: Sequence[Request]) -> None:
        """Let grammars set drafts of running requests just before a step, when bitmasks have come.

        Before the first round there is nothing to propose: no request has drafts or may jump.
        """
        if self._round is not None and self.with_masks is not None:
            self.with_masks.propose(requests, self._round)

    def _propose_all(self, requests: Sequence[Request], running: int) -> None:
        if self._worth_of and not self._worth:
            self.limits.price.forgive_drafts(1 + self._rested)
        self._budget, continues = None, len(self.proposers) > 1
        if continues or not self._worth or running != self._worth_of:
            self._make_budget()
        self._round = this_round = Round(
            self._make_budget, self._most, self._worth, self._rested, continues, drafted=continues
        )
        self._rested = 0
        num_rests = self.proposers[0].propose(requests, this_round)
        self._drafted = this_round.drafted
        self._rest = 0 if this_round.drafted else num_rests
        if not this_round.drafted:
            self._leave_out(requests)

    def _make_budget(self) -> DraftBudget:
        """Return the budget of the next step, if it has the same requests.

        See Round.budget.
        """
        if self._budget is None:
            work = StepWork(self._rows, self._keys)
            self._budget = DraftBudget.after(work, self.limits)
            self._worth, self._worth_of = self._budget.is_worth, self._rows
        return self._budget

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
        if budget.may_take_blocks:
            self._kv.grow(tables, len(ids) + len(drafts), request.num_computed)
        del drafts[min(map(len, tables)) * self._kv.block_size - len(ids) :]
        if not drafts:
            return
        chunk.num_drafts = len(drafts)
        chunk.token_ids += drafts
        top = request.num_top
        row_index = chunk.rows[-1].index
        chunk.rows = [
            LogitRow(row_index + i, -1, top, draft, i if request.masked else -1)
            for i, draft in enumerate([*drafts, -1])
        ]

    def finish(self, request: Request) -> None:
        """Note that the last step of a request has run; it still has its slot."""
        for proposer in self.proposers:
            proposer.finish(request)

    def end(self, request: Request) -> None:
        """Note that a request has ended or was aborted."""
        for proposer in self.proposers:
            proposer.end(request)

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
        num_drafts = min(self._num_tokens, request.max_tokens - request.num_output - 1)
        if self._kv.has_states:  # a state cannot be undone, so drafts must not fill a state chunk
            chunk = self._kv.state_chunk
            num_drafts = min(num_drafts, chunk - 2 - (len(request.token_ids) - 1) % chunk)
        return num_drafts


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


def make_drafter(
    config: EngineConfig,
    kv: KvManager,
    text_indexes: Callable[[int, int], MakeIndex],
    proposer: Proposer | None = None,
) -> Drafter | None:
    """Return the drafter of an engine; None if there are no draft tokens.

    text_indexes: returns a maker of indexes of n-grams, from the least to the most tokens.
    proposer: proposes after n-grams; None = there are only n-grams.
    """
    options = config.speculation
    if options is None:
        return None
    make_index = text_indexes(options.prompt_lookup_min, options.prompt_lookup_max)
    tokens = options.indexed_tokens(config.max_num_seqs, config.max_model_len)
    proposers: list[Proposer] = [NgramProposer(NgramDrafts(make_index, tokens))]
    proposers += [] if proposer is None else [proposer]
    return Drafter(kv, options.num_speculative_tokens, proposers, price_clock)
