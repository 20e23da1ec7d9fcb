"""Draft tokens: proposed tokens in the rows after a decode row, which the same step verifies.

A draft token adds a row to the step. It is worth the time of this row if its probability
to be accepted, divided by that time, exceeds the tokens per second of the step without the draft.
Reading the weights limits a step of one sequence: a row costs little, so uncertain drafts pay.
Arithmetic limits a step of many sequences, so only drafts that are almost certainly right pay.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.core.cost import CostModel, StepWork
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.ngram_drafts import NgramDrafts
from cpuserve.core.request import Request
from cpuserve.core.step import LogitRow, SeqChunk

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.core.ngram import MakeIndex

# A draft that is right this often is likely: it would pay if it took a quarter of the step.
_LIKELY = 0.25
# Beside prompts, drafts take at most a fourth of the tokens and of the time that prompts may take.
BESIDE_PROMPTS = 4


@dataclass(slots=True)
class DraftBudget:
    """The tokens and the time that a step has left for drafts.

    given: number of tokens that the step is expected to generate, with the drafts so far.
    took_s: seconds that the step is expected to take, with the drafts so far.
    draft_s: seconds that one more draft token adds to the step.
    spent: number of draft tokens in the step so far.
    refused: whether a likely draft was left out because of its time.
    grows: whether a sequence may take new blocks for draft tokens.
    """

    tokens: int
    seconds: float
    given: float
    took_s: float
    draft_s: float
    spent: int = 0
    refused: bool = False
    grows: bool = True

    @classmethod
    def after(
        cls, work: StepWork, cost: CostModel, tokens: int = sys.maxsize, target_s: float = 0.0
    ) -> DraftBudget:
        """Return the budget that the decode rows and the sure tokens of `work` leave.

        tokens: the most tokens of the step.
        target_s: the longest time of the step in seconds, 0 = no limit.
        """
        return cls(
            min(tokens - work.rows - work.drafts, cost.most_drafts),
            seconds=cost.allowance(work.rows, work.keys, target_s) if target_s else math.inf,
            given=work.rows + work.drafts,
            took_s=cost.decode_seconds(work.rows, work.keys, work.drafts),
            draft_s=cost.draft_seconds(1),
        )

    @property
    def most_jumps(self) -> int:
        """How many tokens that need no sampling are worth their time in the step."""
        return int(min(self.tokens, self.seconds / self.draft_s)) if self.pays(1.0) else 0

    def share_with_prompts(self) -> None:
        """Leave most of the step to its prompts, which may also need the free blocks."""
        self.tokens //= BESIDE_PROMPTS
        self.seconds /= BESIDE_PROMPTS
        self.grows = False

    def pays(self, chance: float) -> bool:
        """Whether a draft token that is right with this probability is worth its time."""
        return chance * self.took_s > self.given * self.draft_s

    def begins(self, chance: float) -> bool:
        """Whether the first draft token of a row is worth its time."""
        pays = self.pays(chance)
        self.refused |= chance >= _LIKELY and not pays
        return pays

    def paying(self, chances: Sequence[float]) -> int:
        """Return how many draft tokens of a row are worth their time, if no other row has any."""
        count, chance = 0, 1.0
        for right in chances:
            chance *= right
            if not self.pays(chance):
                break
            count += 1
        return count

    def close(self, cost: CostModel) -> int:
        """Return the number of draft tokens in the step, after all rows have had their turn."""
        if self.refused and not self.spent:
            cost.forgive_drafts()
        return self.spent

    def take(self, chances: Sequence[float]) -> int:
        """Take draft tokens with these chances that are worth their time; return how many."""
        count, chance = 0, 1.0
        for right in chances[: max(self.tokens, 0)]:
            chance *= right
            if self.draft_s > self.seconds or not self.pays(chance):
                break
            count += 1
            self.given += chance
            self.took_s += self.draft_s
            self.seconds -= self.draft_s
        self.tokens -= count
        self.spent += count
        return count


class Drafter:
    """Proposes up to `num_tokens` draft tokens after a step, and adds them to the next one.

    num_drafts: how often a sequence got draft tokens that were verified.
    num_draft_tokens: the number of draft tokens that were verified or certain.
    num_accepted_tokens: the number of draft tokens that were sampled or certain.
    most_jumps: how many tokens all requests together may jump over before the next step.
    """

    def __init__(self, kv: KvManager, num_tokens: int, source: NgramDrafts) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = self.most_jumps = 0
        self.source = source
        self.budget: DraftBudget | None = None  # of the next step, for drafts of a model
        self._kv = kv
        self._num_tokens = num_tokens

    def propose(self, requests: Iterable[Request], budget: DraftBudget, cost: CostModel) -> None:
        """Set the draft tokens of requests that have got a token in the last step.

        budget: the time of the next step by `cost`, if it has the same requests.
        """
        self.source.begin()
        self.budget = budget
        self.most_jumps = budget.most_jumps
        worth = budget.pays(1.0)
        for request in requests:
            request.drafts, request.chances, request.most_drafts = [], [], 0
            if not request.is_running or request.computes_prompt:
                continue
            if not worth:  # no draft pays, however likely it is
                self.source.rest(request)
                budget.refused = True
            elif (most := self._most(request)) > 0:
                drafts, chances = self.source.propose(request, most)
                count = _before_stop(drafts, request.stop_ids)
                if request.masked:  # each draft of a grammar costs a bitmask
                    count = min(count, budget.paying(chances))
                request.most_drafts = most
                request.drafts, request.chances = drafts[:count], chances[:count]
        budget.close(cost)

    def extend(
        self,
        requests: Iterable[Request],
        chunks: Iterable[SeqChunk],
        budget: DraftBudget,
        *,
        prompts: bool,
    ) -> None:
        """Add draft tokens to the decode rows of a step, as far as `budget` and blocks suffice.

        prompts: whether prompts follow in the step.
        """
        if prompts:
            budget.share_with_prompts()
        for request, chunk in zip(requests, chunks, strict=True):
            if request.drafts and budget.begins(request.chances[0]):
                self._extend(request, chunk, budget)

    def _extend(self, request: Request, chunk: SeqChunk, budget: DraftBudget) -> None:
        """Append draft tokens that are worth their time to the decode row `chunk`."""
        ids, tables = request.token_ids, request.tables
        drafts = request.drafts[: budget.take(request.chances[: max(self._most(request), 0)])]
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
    return Drafter(kv, asked.num_speculative_tokens, NgramDrafts(make_index, tokens))
