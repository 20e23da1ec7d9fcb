"""DraftTexts: the texts of running requests in the executor of a drafter, and its steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpuserve.base.ids import RequestId, SlotId
from cpuserve.core.cost import CostModel, StepWork, price_clock
from cpuserve.core.kv.manager import KvManager, Tables
from cpuserve.core.kv.prefix import PrefixChain
from cpuserve.core.request import Request
from cpuserve.core.step import LogitRow, RowResult, SeqChunk, StepBatch
from cpuserve.runtime.pack import pack, unpack
from cpuserve.sampling.fields import SHAPING
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest

if TYPE_CHECKING:
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

    def learn(self, kind: int, gain: float, *, is_right: bool) -> None:
        """Note whether a guess of class `kind` was right."""
        self.mean += gain * (is_right - self.mean)
        self.seen[kind] += 1
        early = max(gain, 1.0 / (2 + self.seen[kind]))
        self.classes[kind] += early * (is_right - self.classes[kind])


@dataclass(slots=True)
class DraftedText:
    """The text of a request in a drafter.

    computed: how many of the first tokens of the text have keys in the cache.
    first_position: where these tokens begin (of a DraftHead; a DraftModel has keys of all tokens).
    base: the number of tokens of the text before `guesses`, the guesses for the tokens after it.
    kinds: the class of each guess.
    """

    slot: SlotId
    tables: Tables
    chain: PrefixChain
    chances: Chances
    computed: int = 0
    first_position: int = 0
    base: int = 0
    guesses: list[int] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)

    @property
    def lacks(self) -> int:
        """How many tokens of the text have no keys in the cache."""
        return self.base - self.computed

    def chunk(self, tokens: list[int]) -> SeqChunk:
        """Return a chunk with the next tokens, which then count as computed; the last one samples.

        Its position is counted from `first_position`.
        """
        start, rows = self.computed - self.first_position, [LogitRow(len(tokens) - 1, num_top=0)]
        self.computed += len(tokens)
        return SeqChunk(self.slot, tokens, start, self.tables, rows)


@dataclass(slots=True)
class DraftTurn:
    """A request that gets drafts in this round.

    chance: the probability that all its guesses so far are right.
    """

    request: Request
    text: DraftedText
    chance: float = 1.0

    @property
    def expected(self) -> float:
        """The chance of the next guess, before it is made."""
        return self.chance * self.text.chances.mean


class DraftTexts:
    """The texts of running requests in an executor of their own, with blocks of keys of their own.

    by_request: the texts, by the id of their request.
    chances: of the guesses for all texts.
    cost: the cost model of the steps of the executor.
    num_steps: how many steps have run.
    """

    def __init__(self, executor: Executor, kv: KvManager) -> None:
        self.executor = executor
        self.kv = kv
        self.by_request: dict[RequestId, DraftedText] = {}
        self.chances = Chances()
        self.cost = CostModel()
        self.num_steps = 0

    def add(self, request: Request, slot: SlotId) -> DraftedText:
        """Return the text of a request that has none yet; it has no keys."""
        text = DraftedText(
            slot,
            self.kv.new_tables(),
            PrefixChain(salt=request.chain.salt),
            self.chances.copy(),
            base=len(request.token_ids),
        )
        self.by_request[request.id] = text
        return text

    def admit(self, slot: SlotId, request: Request, seed: int) -> None:
        """Let the executor sample in this slot as the request does, without its other rules."""
        draft_params = SamplingParams(**{name: getattr(request.params, name) for name in SHAPING})
        self.executor.admit(slot, SlotRequest(draft_params, seed, [], [], []))

    def adopt(self, text: DraftedText, ids: Sequence[int]) -> None:
        """Give a text the keys of the longest cached prefix."""
        match = self.kv.match_prefix(text.chain, ids)
        self.kv.adopt(text.tables, text.chain, match)
        text.computed = match.num_tokens

    def forget_all_but(self, slots: Mapping[RequestId, SlotId]) -> None:
        """Free the blocks and slots of requests that are not in `slots` with the same slot."""
        for number, text in [*self.by_request.items()]:
            if slots.get(number) != text.slot:
                self.kv.free(text.tables)
                self.executor.release(text.slot)
                del self.by_request[number]

    def learn(self, text: DraftedText, ids: Sequence[int]) -> int:
        """Learn which guesses were right, and forget them; return how many were."""
        num_right = 0
        tokens = ids[text.base :]
        for guess, kind, token in zip(text.guesses, text.kinds, tokens, strict=False):
            text.chances.learn(kind, GAIN, is_right=guess == token)
            self.chances.learn(kind, SHARED_GAIN, is_right=guess == token)
            if guess != token:
                break
            num_right += 1
        text.guesses, text.kinds = [], []
        return num_right

    def run(self, chunks: list[SeqChunk]) -> list[RowResult]:
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
        start_s = price_clock()
        arrays = pack(StepBatch(chunks))
        results = unpack(self.executor.step(arrays), arrays.tops)
        self.cost.observe(work, price_clock() - start_s)
        self.num_steps += 1
        return results
