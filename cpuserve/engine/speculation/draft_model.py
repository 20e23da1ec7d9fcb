"""DraftModel: draft tokens of a second model, which runs between the steps of the first one."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.base.ids import RequestId, SlotId
from cpuserve.base.log import get_logger
from cpuserve.core.cost import CostModel, StepWork, price_clock
from cpuserve.core.kv.manager import KvManager, Tables
from cpuserve.core.kv.offload import BlockBytes, Offload
from cpuserve.core.kv.prefix import PrefixChain
from cpuserve.core.request import Request
from cpuserve.core.speculation.budget import DraftBudget
from cpuserve.core.speculation.proposer import Proposer, Round
from cpuserve.core.step import LogitRow, RowResult, SeqChunk, StepBatch
from cpuserve.engine.offload import ExecutorBlocks
from cpuserve.runtime.pack import pack, unpack
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.config.speculation import DraftModelConfig
    from cpuserve.engine.speculation.parts import EngineParts
    from cpuserve.runtime.executor import Executor

# A guess belongs to one of CLASSES classes by its probability in the draft model.
CLASSES = 8
# The chance of a class is an average over about the last ten guesses of a request. A new request
# begins with averages over the last hundred guesses of all requests. The first guesses of a class
# count more, because models differ in how sure they are, and the average begins with FIRST.
GAIN, SHARED_GAIN, FIRST = 0.1, 0.01, 0.7
# A text lacks at most FEW tokens between two rounds, if the draft model runs in each of them.
# A text that lacks more is computed in chunks, like a prompt.
FEW = 16
# A chunk takes at most half the time of a step, so running streams do not seem to pause. It has at
# least LEAST_CHUNK tokens.
CHUNK_SHARE, LEAST_CHUNK = 0.5, 32
# The draft model computes a text only if the rest of the response is expected to save this time.
# A response is expected to have as many more tokens as it has, and at least LEAST_LEFT.
LEAST_LEFT = 32
# The draft model runs whatever it costs until its first TRIALS steps have been measured.
# Where no draft pays, one is tried after TRY_AFTER rounds, because texts and prices change.
TRIALS, TRY_AFTER = 8, 64
# A guess may pay only with those after it: up to FARTHEST are considered, while their chance is at
# least UNLIKELY.
FARTHEST, UNLIKELY = 4, 0.1

log = get_logger("engine")


@dataclass(slots=True)
class Chances:
    """How often guesses are right: in each class, and `mean` in all of them."""

    mean: float = FIRST
    classes: list[float] = field(
        default_factory=lambda: [(i + 0.5) / CLASSES for i in range(CLASSES)]
    )
    seen: list[int] = field(default_factory=lambda: [0] * CLASSES)

    def copy(self) -> Chances:
        """Return chances that change apart from these."""
        return Chances(self.mean, list(self.classes), list(self.seen))

    def learn(self, kind: int, gain: float, *, right: bool) -> None:
        """Note whether a guess of class `kind` was right."""
        self.mean += gain * (right - self.mean)
        self.seen[kind] += 1
        early = max(gain, 1.0 / (2 + self.seen[kind]))
        self.classes[kind] += early * (right - self.classes[kind])


@dataclass(slots=True)
class DraftedText:
    """The text of a request in the draft model.

    computed: how many of the first tokens of the text have keys in the cache.
    first: the first of these tokens (of a DraftHead; a DraftModel has keys of all of them).
    base: the number of tokens of the text before `guessed`, the guesses for the tokens after it.
    kinds: the class of each guess.
    """

    slot: SlotId
    tables: Tables
    chain: PrefixChain
    chances: Chances
    computed: int = 0
    first: int = 0
    base: int = 0
    guessed: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    @property
    def lacks(self) -> int:
        """How many tokens of the text have no keys in the cache."""
        return self.base - self.computed


@dataclass(slots=True)
class Draft:
    """A request that gets drafts in this round.

    chance: the probability that all its guesses so far are right.
    """

    request: Request
    sequence: DraftedText
    chance: float = 1.0

    @property
    def expected(self) -> float:
        """The chance of the next guess, before it is made."""
        return self.chance * self.sequence.chances.mean


class DraftModel(Proposer):
    """Guesses the tokens after running texts with a second model that has the same vocabulary.

    The drafts change no token: the next step of the engine's model verifies them. All requests
    share the steps of the draft model. Its keys are in blocks of their own, with a prefix cache.
    It draws with the random numbers of the request, so that at any temperature
    it agrees with the engine's model as often as possible.

    vocab: the number of ids of the engine's model.
    longest: the number of tokens of the longest text that the draft model can continue.
    seconds: how long all rounds have taken.
    num_steps: how many steps the draft model has run.
    most_rests: after so many rounds without a draft, one is tried; earlier at first (TRY_AFTER).
    keeps_keys: whether the model's offload tiers also store its keys, since it cannot compute the
      keys of a prefix that the model has found in its cache.
    """

    most_rests = TRY_AFTER
    keeps_keys = False

    def __init__(self, executor: Executor, kv: KvManager, vocab: int, longest: int) -> None:
        self.executor = executor
        self.kv = kv
        self.cost = CostModel()
        self.seconds, self.num_steps = 0.0, 0
        self._vocab = vocab
        self._longest = longest
        self._sequences: dict[RequestId, DraftedText] = {}
        self._chances = Chances()
        self._rests = 0  # the rounds since the last one with a draft
        self._try_after = TRY_AFTER
        self._ended: dict[SlotId, Request] = {}  # the requests that have ended since the last round
        self._failed = False

    def propose(self, requests: Sequence[Request], current: Round) -> int:
        """Set the drafts of running requests that may have some (`most_drafts`), where it pays.

        An error ends no request: it ends the draft model. Each round needs another one.
        """
        ended, self._ended = self._ended, {}
        if self._failed:
            return 0
        began = time.perf_counter()
        try:
            slots = {request.id: request.slot for request in requests}
            if ended:
                self._forget_all_but(slots | {r.id: slot for slot, r in ended.items()})
            self._end(ended)
            self._forget_all_but(slots)
            self._round(requests, current.budget())
        except Exception:
            log.exception("the draft model failed; there are no drafts of it any more")
            self._failed = True
        self.seconds += time.perf_counter() - began
        return 0

    def finish(self, request: Request) -> None:
        """Note that the last step of a request has run; it still has its slot."""
        self._ended[request.slot] = request

    def report(self) -> dict[str, object]:
        """Return the steps of the draft model, the seconds of its rounds, and blocks of tiers."""
        found: dict[str, object] = {"draft_steps": self.num_steps, "draft_s": self.seconds}
        if (offload := self.kv.offload) is not None:
            found["draft_blocks_saved"] = offload.num_saved
            found["draft_blocks_restored"] = offload.num_restored
        return found

    @property
    def kept_keys(self) -> BlockBytes | None:
        """The keys that the model's offload tiers also store; None = there are none."""
        return ExecutorBlocks(self.executor, 1) if self.keeps_keys else None

    def keep(self, offload: Offload) -> None:
        """Let `offload` keep evicted keys; call it before the first round."""
        blocks, size, caching = self.kv.num_blocks, self.kv.block_size, self.kv.prefix_caching
        self.kv = KvManager(blocks, size, prefix_caching=caching, offload=offload)

    def tidy(self) -> bool:
        """Write a block of keys to disk while the engine is idle; False = all is done."""
        return self.kv.offload is not None and self.kv.offload.tidy()

    def forget_prefixes(self) -> None:
        """Remove all cached prefixes."""
        self.kv.published.clear()

    def close(self, wait_s: float = 1.0) -> None:
        """Write blocks of keys to disk within `wait_s` seconds; free the weights and the cache."""
        if self.kv.offload is not None:
            self.kv.offload.close(wait_s)
        self.executor.close()

    def _may_have_drafts(self, request: Request) -> bool:
        """Whether the next step may verify drafts of a request; the model reads texts only."""
        if request.most_drafts <= 0 or request.computes_prompt or request.media:
            return False
        return len(request.token_ids) + request.most_drafts <= self._longest

    # --- a round -----------------------------------------------------------------------------

    def _end(self, ended: Mapping[SlotId, Request]) -> None:
        """Do nothing for requests that have ended; ended: these requests by their slot."""

    def _round(self, requests: Sequence[Request], budget: DraftBudget) -> None:
        turns = self._chosen(self._turns(requests), budget)
        chunks, turns = self._first_chunks(turns, budget.took_s * CHUNK_SHARE)
        self._guess_on(chunks, turns, budget)

    def _turns(self, requests: Iterable[Request]) -> list[Draft]:
        """Return the turns of the requests that may have drafts of the model."""
        found = (self._turn(r) for r in requests if self._may_have_drafts(r))
        return [turn for turn in found if turn is not None]

    def _guess_on(self, chunks: list[SeqChunk], turns: list[Draft], budget: DraftBudget) -> None:
        """Run steps that guess a token for each of the turns, while further guesses pay."""
        while chunks:
            rows = self._step(chunks)
            turns = [t for t, row in zip(turns, rows, strict=True) if self._guess(t, row)]
            turns = self._paying(turns, budget) if self._trained else turns
            turns = [t for t in turns if self._grow(t.sequence, t.sequence.computed + 1)]
            chunks = [self._chunk(t.sequence, t.sequence.guessed[-1:]) for t in turns]

    def _turn(self, request: Request) -> Draft | None:
        """Return the turn of a request; None if it has its drafts, or likely ones of n-grams."""
        sequence = self._sequences.get(request.id)
        if sequence is None:
            sequence = self._begin(request, request.slot)
        elif len(request.token_ids) == sequence.base:
            return None  # the bitmasks of a grammar may belong to the drafts of the last round
        self._learn(sequence, request.token_ids)
        if request.drafts and request.chances[0] >= sequence.chances.mean:
            return None  # drafts of n-grams take no time
        return Draft(request, sequence)

    @property
    def _trained(self) -> bool:
        return self.num_steps >= TRIALS

    def _chosen(self, turns: list[Draft], budget: DraftBudget) -> list[Draft]:
        """Return the turns that pay; now and then one that does not, to learn whether it would."""
        if not turns or not self._trained:
            return turns[:1]
        given, took = budget.num_tokens, budget.took_s
        paying = self._paying(turns, budget)
        if paying:
            self._rests, self._try_after = 0, TRY_AFTER
            saved = self._saved(paying, given, took, budget.draft_s)
            return [turn for turn in paying if self._is_worth(turn, saved)]
        self._rests += 1
        if self._rests < self._try_after:
            return []
        self._rests, self._try_after = 0, min(2 * self._try_after, self.most_rests)
        turns[0].request.most_drafts = 1
        return turns[:1]

    def _is_worth(self, turn: Draft, saved: float) -> bool:
        """Whether the rest of a response saves the time to compute the tokens that a text lacks.

        saved: the seconds that drafts save for each token.
        """
        request, lacks = turn.request, turn.sequence.lacks
        if lacks <= FEW:
            return True
        left = min(request.max_tokens, max(LEAST_LEFT, 2 * request.num_output)) - request.num_output
        whole = self.cost.prompt_seconds(lacks, lacks * (turn.sequence.base - lacks / 2))
        return whole < saved * left

    def _paying(self, turns: list[Draft], budget: DraftBudget) -> list[Draft]:
        """Return the turns that get another guess, so that the tokens per second are the most."""
        turns.sort(key=lambda turn: -turn.expected)
        best, best_rate, took_s = 0, budget.num_tokens / budget.took_s, 0.0
        gain, keys = 0.0, 0
        for count, turn in enumerate(turns, 1):
            gain += turn.expected
            keys += turn.sequence.computed
            seconds = self.cost.decode_seconds(count, keys)
            rate = self._best_rate(gain, turn.sequence.chances.mean, count, seconds, budget)
            if rate > best_rate:
                best, best_rate, took_s = count, rate, seconds
        budget.num_tokens += sum(turn.expected for turn in turns[:best])
        budget.base_s += took_s
        budget.num_drafts += best
        return turns[:best]

    def _best_rate(
        self, gain: float, mean: float, count: int, seconds: float, budget: DraftBudget
    ) -> float:
        """Return the tokens per second with the best number of further guesses of `count` turns.

        A row may be the first one of another pass over the weights, so that it pays only with
        the rows after it.

        gain: the tokens that the next guesses are expected to give; later ones, `mean` times as
          many each. seconds: the time of a step of the draft model.
        """
        given, took, best = budget.num_tokens, budget.took_s, 0.0
        for guesses in range(1, FARTHEST + 1):
            given += gain
            gain *= mean
            best = max(
                best, given / (took + guesses * seconds + budget.seconds_for(guesses * count))
            )
            if gain < count * UNLIKELY:
                break
        return best

    def _saved(self, turns: Sequence[Draft], rows: float, before: float, draft_s: float) -> float:
        """Return the seconds that guesses of these turns are expected to save for each token.

        rows, before: the tokens and the seconds of a step without drafts.
        """
        count = len(turns)
        each = self.cost.decode_seconds(count, 0) + count * draft_s
        mean = sum(turn.expected for turn in turns) / count
        given, took, gain = rows, before, count * mean
        while gain * took > given * each and gain > 1e-3:
            given, took, gain = given + gain, took + each, gain * mean
        return max(before - took * rows / given, 0.0)

    # --- sequences ---------------------------------------------------------------------------

    def _begin(self, request: Request, slot: SlotId) -> DraftedText:
        """Admit a request, and find the part of its text that the cache has."""
        chain = PrefixChain(salt=request.chain.salt)
        sequence = DraftedText(slot, self.kv.new_tables(), chain, self._chances.copy())
        self._admit(slot, request, request.seed)
        match = self.kv.match_prefix(chain, request.token_ids)
        self.kv.adopt(sequence.tables, chain, match)
        sequence.computed = match.num_tokens
        sequence.base = len(request.token_ids)
        self._sequences[request.id] = sequence
        return sequence

    def _admit(self, slot: SlotId, request: Request, seed: int) -> None:
        params = request.params
        plain = SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
        )
        self.executor.admit(slot, SlotRequest(plain, seed, [], [], []))

    def _forget_all_but(self, slots: Mapping[RequestId, SlotId]) -> None:
        """Free the blocks and slots of requests that are not in `slots` with the same slot."""
        for number, sequence in [*self._sequences.items()]:
            if slots.get(number) != sequence.slot:
                self.kv.free(sequence.tables)
                self.executor.release(sequence.slot)
                del self._sequences[number]

    def _learn(self, sequence: DraftedText, ids: Sequence[int]) -> None:
        """Learn which guesses were right, and drop the keys of the others."""
        right = self._learn_chances(sequence, ids)
        sequence.computed = min(sequence.computed, sequence.base + right)
        sequence.base = len(ids)
        self.kv.publish(sequence.tables, sequence.chain, ids, sequence.computed, computed=True)

    def _learn_chances(self, sequence: DraftedText, ids: Sequence[int]) -> int:
        """Learn which guesses were right; return how many were."""
        right = 0
        after = ids[sequence.base :]
        for guess, kind, token in zip(sequence.guessed, sequence.kinds, after, strict=False):
            sequence.chances.learn(kind, GAIN, right=guess == token)
            self._chances.learn(kind, SHARED_GAIN, right=guess == token)
            if guess != token:
                break
            right += 1
        sequence.guessed, sequence.kinds = [], []
        return right

    # --- steps of the draft model --------------------------------------------------------------

    def _first_chunks(
        self, turns: list[Draft], seconds: float
    ) -> tuple[list[SeqChunk], list[Draft]]:
        """Return chunks with the tokens that texts lack, and the turns of complete texts.

        seconds: the most time for texts that lack many tokens. Only one of them gets a chunk.
        """
        turns.sort(key=lambda turn: turn.sequence.lacks)
        room, late = self.executor.max_tokens, False
        chunks: list[SeqChunk] = []
        complete: list[Draft] = []
        for turn in turns:
            sequence = turn.sequence
            start, count = sequence.computed, min(sequence.lacks, room)
            if sequence.lacks > FEW:
                count = min(count, max(self.cost.chunk(start, seconds), LEAST_CHUNK))
            if late or not count or not self._grow(sequence, start + count):
                continue
            late, room = sequence.lacks > FEW, room - count
            chunks.append(self._chunk(sequence, turn.request.token_ids[start : start + count]))
            if sequence.lacks:
                chunks[-1].rows = []
            else:
                complete.append(turn)
        return chunks, complete

    def _chunk(self, sequence: DraftedText, tokens: list[int]) -> SeqChunk:
        """Return a chunk with the next tokens of a text, which then count as computed."""
        start, rows = sequence.computed, [LogitRow(len(tokens) - 1, num_top=0)]
        sequence.computed += len(tokens)
        return SeqChunk(sequence.slot, tokens, start, sequence.tables, rows)

    def _grow(self, sequence: DraftedText, tokens: int) -> bool:
        return self.kv.grow(sequence.tables, tokens)

    def _step(self, chunks: list[SeqChunk]) -> list[RowResult]:
        """Run a step; return the results of its rows."""
        work = StepWork()
        for chunk in chunks:
            count = len(chunk.token_ids)
            if count > FEW:
                work.add_prompt(chunk.start, count)
            else:
                work.rows += 1
                work.keys += chunk.start
                work.drafts += count - 1
        began = price_clock()
        arrays = pack(StepBatch(chunks))
        results = unpack(self.executor.step(arrays), arrays.tops)
        self.cost.observe(work, price_clock() - began)
        self.num_steps += 1
        return results

    def _guess(self, turn: Draft, row: RowResult) -> bool:
        """Add the sampled token to the drafts of a request; return whether another may follow."""
        request, sequence, token = turn.request, turn.sequence, row.token
        if not 0 <= token < self._vocab or math.isnan(row.logprob) or token in request.stop_ids:
            return False
        kind = min(int(math.exp(row.logprob) * CLASSES), CLASSES - 1)
        if not sequence.guessed:
            request.drafts, request.chances = [], []
        sequence.guessed.append(token)
        sequence.kinds.append(kind)
        turn.chance *= (chance := sequence.chances.classes[kind])
        request.drafts.append(token)
        request.chances.append(chance)
        return len(sequence.guessed) < request.most_drafts


def build(parts: EngineParts) -> DraftModel:
    """Return the draft model of an engine.

    Raises:
        ModelError: the ids of the two models mean different tokens.
    """
    config, draft = parts.config, parts.draft
    executor, own_vocab = parts.load(parts.own)
    check_vocabulary(config, draft, min(parts.vocab, own_vocab))
    caching = config.enable_prefix_caching
    kv = KvManager(draft.kv_blocks, config.block_size, prefix_caching=caching)
    return DraftModel(executor, kv, parts.vocab, draft.max_model_len)


def check_vocabulary(config: EngineConfig, draft: DraftModelConfig, vocab: int) -> None:
    """Raise a ModelError unless each of `vocab` ids is the same token for both models."""
    from cpuserve.tokenizer.tokenizer import Tokenizer

    ours = Tokenizer.load(Path(config.tokenizer_path)).texts(vocab)
    theirs = Tokenizer.load(Path(draft.tokenizer_path)).texts(vocab)
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if our != their:
            msg = (
                f"the draft model {draft.model} has another vocabulary than {config.model}: "
                f"token {number} is {their[:40]!r}, not {our[:40]!r}"
            )
            raise ModelError(msg)
