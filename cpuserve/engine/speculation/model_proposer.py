"""ModelProposer: draft tokens of an executor that runs between the steps of the engine's model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence

from cpuserve.base.ids import SlotId
from cpuserve.base.log import get_logger
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.offload import BlockBytes, Offload
from cpuserve.core.request import Request
from cpuserve.core.speculation.budget import DraftBudget
from cpuserve.core.speculation.proposer import Proposer, Round
from cpuserve.core.step import RowResult, SeqChunk
from cpuserve.engine.offload import ExecutorBlocks
from cpuserve.engine.speculation.prices import GuessPrices
from cpuserve.engine.speculation.texts import CLASSES, DraftedText, DraftTexts, DraftTurn

log = get_logger("engine")


class Guesser:
    """What one kind of drafter does in a round: which keys its texts have, and what a step reads.

    texts: the texts of running requests, with its executor.
    prices: chooses the texts that get a guess.
    keeps_keys: whether the model's offload tiers also store its keys, since it cannot compute the
      keys of a prefix that the model has found in its cache.
    """

    texts: DraftTexts
    prices: GuessPrices
    keeps_keys = False

    def begin_round(self, ended: Mapping[SlotId, Request]) -> None:
        """Take what a step of the model has left; ended: requests that it ended, by their slot."""

    def can_guess(self, request: Request) -> bool:
        """Whether it can continue the text of a request that may have drafts."""
        raise NotImplementedError

    def add(self, request: Request, slot: SlotId) -> DraftedText:
        """Return the text of a request that has none yet."""
        raise NotImplementedError

    def learn(self, text: DraftedText, ids: Sequence[int]) -> None:
        """Learn which guesses of a text were right, and drop the keys of others.

        ids: the tokens of the text.
        """
        raise NotImplementedError

    def first_chunks(
        self, requests: Sequence[Request], turns: list[DraftTurn], budget: DraftBudget
    ) -> tuple[list[SeqChunk], list[DraftTurn]]:
        """Return chunks that end with a row for the first guess, and the turns that get it.

        requests: all running requests. turns: those of them that pay.
        """
        raise NotImplementedError

    def next_chunk(self, text: DraftedText) -> SeqChunk | None:
        """Return a chunk with the last guess of a text, for one more; None without memory."""
        raise NotImplementedError

    def run(self, chunks: list[SeqChunk]) -> list[RowResult]:
        """Run a step; return the results of its rows."""
        raise NotImplementedError

    def end_round(self, requests: Sequence[Request]) -> None:
        """Note that no more guesses follow for the running requests."""


class ModelProposer(Proposer):
    """Guesses the tokens after running texts with an executor of its own.

    The drafts change no token: the next step of the engine's model verifies them. All requests
    share the steps of the executor. It draws with the random numbers of the request, so that at any
    temperature it agrees with the engine's model as often as possible.

    vocab: the number of ids of the engine's model.
    longest: the number of tokens of the longest text that the guesser can continue.
    seconds: how long all rounds have taken.
    """

    def __init__(self, guesser: Guesser, vocab: int, longest: int) -> None:
        self.guesser = guesser
        self.texts = guesser.texts
        self.seconds = 0.0
        self._vocab = vocab
        self._longest = longest
        self._ended: dict[SlotId, Request] = {}  # the requests that have ended since the last round
        self._failed = False

    def propose(self, requests: Sequence[Request], this_round: Round) -> int:
        """Set the drafts of running requests that may have some (`most_drafts`), where it pays.

        An error ends no request: it ends the drafter. Each round needs another one.
        """
        ended, self._ended = self._ended, {}
        if self._failed:
            return 0
        start_s = time.perf_counter()
        try:
            slots = {request.id: request.slot for request in requests}
            if ended:
                self.texts.forget_all_but(slots | {r.id: slot for slot, r in ended.items()})
            self.guesser.begin_round(ended)
            self.texts.forget_all_but(slots)
            self._guess_round(requests, this_round.budget())
        except Exception:
            log.exception("the draft model failed; there are no drafts of it any more")
            self._failed = True
        self.seconds += time.perf_counter() - start_s
        return 0

    def finish(self, request: Request) -> None:
        """Note that the last step of a request has run; it still has its slot."""
        self._ended[request.slot] = request

    def report(self) -> dict[str, object]:
        """Return the steps of the executor, the seconds of its rounds, and blocks of tiers."""
        counters: dict[str, object] = {
            "draft_steps": self.texts.num_steps,
            "draft_s": self.seconds,
        }
        if (offload := self.texts.kv.offload) is not None:
            counters["draft_blocks_saved"] = offload.num_saved
            counters["draft_blocks_restored"] = offload.num_restored
        return counters

    @property
    def kept_keys(self) -> BlockBytes | None:
        """The keys that the model's offload tiers also store; None = there are none."""
        return ExecutorBlocks(self.texts.executor, 1) if self.guesser.keeps_keys else None

    def keep(self, offload: Offload) -> None:
        """Let `offload` keep evicted keys; call it before the first round."""
        kv = self.texts.kv
        self.texts.kv = KvManager(
            kv.num_blocks, kv.block_size, prefix_caching=kv.prefix_caching, offload=offload
        )

    def tidy(self) -> bool:
        """Write a block of keys to disk while the engine is idle; False = all is done."""
        offload = self.texts.kv.offload
        return offload is not None and offload.tidy()

    def forget_prefixes(self) -> None:
        """Remove all cached prefixes."""
        self.texts.kv.published.clear()

    def close(self, wait_s: float = 1.0) -> None:
        """Write blocks of keys to disk within `wait_s` seconds; free the weights and the cache."""
        if (offload := self.texts.kv.offload) is not None:
            offload.close(wait_s)
        self.texts.executor.close()

    # --- a round -----------------------------------------------------------------------------

    def _guess_round(self, requests: Sequence[Request], budget: DraftBudget) -> None:
        """Guess tokens after the texts that pay, one a step, while further guesses pay."""
        guesser, prices = self.guesser, self.guesser.prices
        turns = prices.choose(self._turns(requests), budget)
        chunks, turns = guesser.first_chunks(requests, turns, budget)
        while chunks:
            rows = guesser.run(chunks)
            turns = [turn for turn, row in zip(turns, rows, strict=True) if self._guess(turn, row)]
            turns = prices.paying(turns, budget) if prices.is_trained else turns
            next_chunks = [(turn, guesser.next_chunk(turn.text)) for turn in turns]
            turns = [turn for turn, chunk in next_chunks if chunk is not None]
            chunks = [chunk for _, chunk in next_chunks if chunk is not None]
        guesser.end_round(requests)

    def _turns(self, requests: Iterable[Request]) -> list[DraftTurn]:
        """Return the turns of the requests that may have drafts of the guesser."""
        turns = (self._turn(request) for request in requests if self._may_have_drafts(request))
        return [turn for turn in turns if turn is not None]

    def _may_have_drafts(self, request: Request) -> bool:
        """Whether the next step may verify guesses for a request."""
        if request.most_drafts <= 0 or request.computes_prompt:
            return False
        fits = len(request.token_ids) + request.most_drafts <= self._longest
        return fits and self.guesser.can_guess(request)

    def _turn(self, request: Request) -> DraftTurn | None:
        """Return the turn of a request; None if it has its drafts, or likely ones of n-grams."""
        text = self.texts.by_request.get(request.id)
        if text is None:
            text = self.guesser.add(request, request.slot)
        elif len(request.token_ids) == text.base:
            return None  # the bitmasks of a grammar may belong to the drafts of the last round
        self.guesser.learn(text, request.token_ids)
        if request.drafts and request.chances[0] >= text.chances.mean:
            return None  # drafts of n-grams take no time
        return DraftTurn(request, text)

    def _guess(self, turn: DraftTurn, row: RowResult) -> bool:
        """Add the sampled token to the drafts of a request; return whether another may follow."""
        request, text, token = turn.request, turn.text, row.token
        if not 0 <= token < self._vocab or math.isnan(row.logprob) or token in request.stop_ids:
            return False
        kind = min(int(math.exp(row.logprob) * CLASSES), CLASSES - 1)
        if not text.guesses:
            request.drafts, request.chances = [], []
        text.guesses.append(token)
        text.kinds.append(kind)
        turn.chance *= (chance := text.chances.classes[kind])
        request.drafts.append(token)
        request.chances.append(chance)
        return len(text.guesses) < request.most_drafts
