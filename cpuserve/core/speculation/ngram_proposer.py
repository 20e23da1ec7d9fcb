"""NgramProposer: draft tokens of n-grams for all requests of a step, right after it."""

from __future__ import annotations

from collections.abc import Sequence

from cpuserve.core.request import Request
from cpuserve.core.speculation.ngram_drafts import LONGEST_WAIT, NgramDrafts
from cpuserve.core.speculation.proposer import Proposer, Round

# Where no draft can pay, this is asked again after so many steps, or with another number of rows.
IDLE_STEPS = 31


class NgramProposer(Proposer):
    """Looks for drafts of all requests of a step, and rarely where they do not pay.

    A request without drafts that pay is looked at in every second step, then more rarely, so a
    text that never repeats costs almost nothing.

    source: the indexes of the texts.
    """

    def __init__(self, source: NgramDrafts) -> None:
        self.source = source

    def propose(self, requests: Sequence[Request], this_round: Round) -> int:
        """Set the drafts of requests that have got a token in the last step.

        Return for how many steps the requests need no look.
        """
        num_rests = LONGEST_WAIT if this_round.worth else IDLE_STEPS
        self.source.begin(this_round.rested)
        for request in requests:
            if request.drafts or request.most_drafts:
                request.drafts, request.chances, request.most_drafts = [], [], 0
            if not this_round.worth:  # no draft pays, however likely it is
                self.source.rest(request, 1 + this_round.rested)
            elif not request.is_running or request.computes_prompt:
                num_rests = 0
            elif (num_drafts := this_round.most(request)) > 0:
                num_rests = min(num_rests, self._propose(request, num_drafts, this_round))
            else:  # the next token ends the response, or a chunk of states
                num_rests = 0
        return num_rests

    def end(self, request: Request) -> None:
        """Keep the response of a request that ends for the indexes of later ones."""
        self.source.end(request)

    def _propose(self, request: Request, num_drafts: int, this_round: Round) -> int:
        """Set the draft tokens of one request; return for how many steps it needs no look."""
        drafts, chances = self.source.propose(request, num_drafts)
        count = _before_stop(drafts, request.stop_ids) if drafts else 0
        paying = this_round.budget().count(chances[:count]) if count else 0
        if request.masked or this_round.continues:
            request.most_drafts = num_drafts
        if request.masked:  # each draft of a grammar costs a bitmask
            count, this_round.drafted = paying, True
        if count:
            request.drafts, request.chances = drafts[:count], chances[:count]
        this_round.drafted |= paying > 0
        return self.source.look_again(request, has_draft=paying > 0)


def _before_stop(drafts: Sequence[int], stop_ids: frozenset[int]) -> int:
    """Return how many of `drafts` come before the first one that ends the response."""
    if stop_ids.isdisjoint(drafts):
        return len(drafts)
    return next(i for i, draft in enumerate(drafts) if draft in stop_ids)
