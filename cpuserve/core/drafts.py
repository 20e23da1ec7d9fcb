"""Draft tokens: proposed tokens in the rows after a decode row, which the same step verifies.

A draft token adds a row to the step. It is worth the time of this row if its probability
to be accepted, divided by that time, exceeds the tokens per second of the step without the draft.
Reading the weights limits a step of one sequence: a row costs little, so uncertain drafts pay.
Arithmetic limits a step of many sequences, so only drafts that are almost certainly right pay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cpuserve.core.cost import CostModel, StepWork
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.ngram import NgramIndex, first_chances
from cpuserve.core.request import Request
from cpuserve.core.step import LogitRow, SeqChunk

# A draft that is right this often is likely: it would pay if it took a quarter of the step.
_LIKELY = 0.25


@dataclass(slots=True)
class DraftBudget:
    """The tokens and the time that a step has left for drafts.

    given: number of tokens that the step is expected to generate, with the drafts so far.
    took_s: seconds that the step is expected to take, with the drafts so far.
    draft_s: seconds that one more draft token adds to the step.
    spent: number of draft tokens in the step so far.
    refused: whether a likely draft was left out because of its time.
    """

    tokens: int
    seconds: float
    given: float
    took_s: float
    draft_s: float
    spent: int = 0
    refused: bool = False

    @classmethod
    def after(cls, work: StepWork, cost: CostModel, tokens: int, target_s: float) -> DraftBudget:
        """Return the budget that the decode rows of `work` leave; target_s = 0: no time limit."""
        return cls(
            min(tokens, cost.most_drafts),
            seconds=cost.allowance(work.rows, work.keys, target_s) if target_s else math.inf,
            given=work.rows,
            took_s=cost.decode_seconds(work.rows, work.keys),
            draft_s=cost.draft_seconds(1),
        )

    def pays(self, chance: float) -> bool:
        """Whether a draft token that is right with this probability is worth its time."""
        return chance * self.took_s > self.given * self.draft_s

    def begins(self, chance: float) -> bool:
        """Whether the first draft token of a row is worth its time."""
        pays = self.pays(chance)
        self.refused |= chance >= _LIKELY and not pays
        return pays

    def close(self, cost: CostModel) -> int:
        """Return the number of draft tokens in the step, after all rows have had their turn."""
        if self.refused and not self.spent:
            cost.forgive_drafts()
        return self.spent

    def take(self, index: NgramIndex, most: int) -> int:
        """Take draft tokens of `index` that are worth their time; return how many of `most`."""
        count, chance = 0, 1.0
        while count < min(most, self.tokens) and self.draft_s <= self.seconds:
            chance *= index.chance(count)
            if not self.pays(chance):
                break
            count += 1
            self.given += chance
            self.took_s += self.draft_s
            self.seconds -= self.draft_s
        self.tokens -= count
        self.spent += count
        return count


class Drafter:
    """Proposes up to `num_tokens` draft tokens, found by n-grams of `least` to `most` tokens.

    num_drafts: how often a sequence got draft tokens.
    num_draft_tokens: the number of draft tokens that were verified.
    num_accepted_tokens: the number of draft tokens that were sampled.
    """

    def __init__(self, kv: KvManager, num_tokens: int, least: int, most: int) -> None:
        self.num_drafts = self.num_draft_tokens = self.num_accepted_tokens = 0
        self._kv = kv
        self._num_tokens = num_tokens
        self._sizes = least, most
        self._chances = first_chances()

    def extend_all(
        self, requests: Iterable[Request], chunks: Iterable[SeqChunk], budget: DraftBudget
    ) -> None:
        """Add draft tokens to the decode rows of a step, as far as `budget` and blocks suffice."""
        for request, chunk in zip(requests, chunks, strict=True):
            self.extend(request, chunk, budget)

    def extend(self, request: Request, chunk: SeqChunk, budget: DraftBudget) -> None:
        """Append draft tokens that are worth their time to the decode row `chunk`."""
        if request.masked:
            return  # the bitmask of a grammar is known for the next token, not for drafts
        ids, tables = request.token_ids, request.tables
        if request.ngrams is None:
            request.ngrams = NgramIndex(*self._sizes, self._chances)
        request.ngrams.advance(request.text_ids)
        if not budget.begins(request.ngrams.chance(0)):
            return
        drafts = self._guess(request, request.ngrams)
        if not drafts:
            return
        del drafts[budget.take(request.ngrams, len(drafts)) :]
        self._kv.grow(tables, len(ids) + len(drafts), request.num_computed)
        del drafts[min(map(len, tables)) * self._kv.block_size - len(ids) :]
        if not drafts:
            return
        chunk.num_drafts = len(drafts)
        chunk.token_ids += drafts
        top = request.num_top
        chunk.rows = [LogitRow(i, -1, top, draft) for i, draft in enumerate([*drafts, -1])]
        self.num_drafts += 1
        self.num_draft_tokens += len(drafts)

    def _guess(self, request: Request, index: NgramIndex) -> list[int]:
        """Return draft tokens; none of them can be the last token of the response.

        The row after the last draft token samples one more token, which may end the response.
        """
        left = request.max_tokens - request.num_output
        most = min(self._num_tokens, left - 1)
        if self._kv.has_states:  # a state cannot be undone, so drafts must not fill a state chunk
            chunk = self._kv.state_chunk
            most = min(most, chunk - 2 - request.num_computed % chunk)
        drafts = index.guess(request.text_ids, most) if most > 0 else []
        if drafts and min(drafts) < 0:  # a picture follows there
            del drafts[next(i for i, draft in enumerate(drafts) if draft < 0) :]
        if not request.stop_ids.isdisjoint(drafts):
            del drafts[next(i for i, d in enumerate(drafts) if d in request.stop_ids) :]
        return drafts
