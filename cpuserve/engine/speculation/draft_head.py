"""DraftHead: draft tokens of a head of the model, which reads the hidden states of its steps.

A head for multi-token prediction reads the inputs of the output matrix. An EAGLE-3 head reads the
inputs of some layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import structs

from cpuserve.base.errors import ModelError
from cpuserve.base.ids import RequestId, SlotId
from cpuserve.base.log import get_logger
from cpuserve.config.speculation import AUTO
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.prefix import PrefixChain
from cpuserve.core.request import Request
from cpuserve.core.scheduler import MOVING_S
from cpuserve.core.speculation.budget import DraftBudget
from cpuserve.core.step import RowResult, SeqChunk
from cpuserve.engine.speculation.draft_model import FEW, TRY_AFTER, Draft, DraftedText, DraftModel

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.engine.speculation.parts import EngineParts
    from cpuserve.loader.speculation.guess_heads import GuessHead
    from cpuserve.runtime.executor import Executor, Float32, StepRows

log = get_logger("engine")

# A random number is a function of seed + WEYL * (position of the sampled token + 1), modulo 2^64
# (`uniform` in csrc/kernels/table/sampling.h).
WEYL = 0x9E3779B97F4A7C15
# A head that rests has forgotten all texts. It begins them anew this number of rounds before it
# tries a guess, because its first guesses of a text are worse than later ones.
EARLY = 4


class DraftHead(DraftModel):
    """Guesses the tokens after running texts with a head of the model.

    A row of the head reads the hidden state of token p and the embedding of token p + 1, and
    guesses token p + 2. It attends to earlier rows, with keys in blocks of its own. The model keeps
    the hidden states of its last step only, so the head runs after each step, over prompts too,
    and over the last tokens of a response, because a next turn finds all of them in the cache.
    Further guesses read hidden states of the head itself. Their rows are computed again
    when the model has computed their tokens.

    After a prefix that the model finds in its cache or in an offload tier, the head finds its keys
    in its own cache or in the same tier. The key of the last token of such a prefix may belong to
    another next token.
    A text that lacks the hidden states of some tokens begins anew after them: the head then
    attends only to later tokens (`DraftedText.first`). This happens while no guesses pay.

    target: the executor of the model.
    head: the head that `executor` runs.
    """

    most_rests = 8 * TRY_AFTER  # each try also computes the rows of all texts for EARLY rounds
    keeps_keys = True

    def __init__(
        self,
        executor: Executor,
        kv: KvManager,
        vocab: int,
        longest: int,
        target: Executor,
        head: GuessHead,
    ) -> None:
        super().__init__(executor, kv, vocab, longest)
        self._target = target
        self._ids = head.ids
        # A row of the media buffer has the hidden state of an EAGLE-3 head before the inputs of the
        # model's layers. Other heads read both in the same columns.
        self._columns = head.program.media_width
        self._own_columns = head.spec.width if head.layers else 0
        self._last: dict[SlotId, int] = {}  # the row of each text's last token in the last step
        self._rows: dict[int, StepRows] = {}  # of the model's last step, by request slot

    def _end(self, ended: Mapping[SlotId, Request]) -> None:
        """Compute and publish the keys of the last tokens of texts that have ended."""
        self._rows = rows = self._target.step_rows()
        if self.kv.offload is not None:
            self.kv.offload.left_s = MOVING_S
        if self._has_rest or not self.keeps_keys:
            return
        texts: list[tuple[DraftedText, list[int]]] = []
        lacking: list[_Rows] = []
        for slot, request in ended.items():
            if slot not in rows or request.decides:
                continue
            # Without a response nobody knows the next token. The key of the last token of a prefix
            # may belong to any one.
            ids = request.token_ids + request.token_ids[-1:] * (not request.num_output)
            found = self._lacking(request, slot, ids)
            lacking += [] if found is None else [found]
            if (sequence := self._sequences.get(request.id)) is not None:
                texts.append((sequence, ids))
        self._compute(lacking)
        for sequence, ids in texts:
            self._publish(sequence, ids)

    @property
    def _has_rest(self) -> bool:
        """Whether no guess has paid for a while, and none is tried soon."""
        return 0 < self._rests < self._try_after - EARLY

    def _round(self, requests: Sequence[Request], budget: DraftBudget) -> None:
        rows = self._rows
        known = [request for request in requests if request.slot in rows]
        turns = self._chosen(self._turns(known), budget)
        if not turns and self._has_rest:
            self._forget_all_but({})
            return
        if self.kv.offload is not None:
            self._follow([request for request in requests if request.slot not in rows])
        self._guess_on(*self._catch_up(known, turns), budget)
        for request in known:
            if (sequence := self._sequences.get(request.id)) is not None:
                self._publish(sequence, request.token_ids)

    def _is_worth(self, turn: Draft, saved: float) -> bool:
        """Return True: a text lacks no more tokens than the last step of the model had."""
        del turn, saved
        return True

    # --- texts -------------------------------------------------------------------------------

    def _begin(self, request: Request, slot: SlotId) -> DraftedText:
        """Return a text without keys; a head that rests begins texts in each round."""
        chain = PrefixChain(salt=request.chain.salt)
        sequence = DraftedText(slot, self.kv.new_tables(), chain, self._chances.copy())
        sequence.base = len(request.token_ids)
        self._begin_at(request, sequence, 0)
        self._sequences[request.id] = sequence
        return sequence

    def _adopt(self, sequence: DraftedText, ids: Sequence[int]) -> None:
        """Give a text the keys of the longest cached prefix."""
        match = self.kv.match_prefix(sequence.chain, ids)
        self.kv.adopt(sequence.tables, sequence.chain, match)
        sequence.computed = match.num_tokens

    def _follow(self, requests: Sequence[Request]) -> None:
        """Give texts the keys of the blocks that the model is restoring from a tier.

        The model computes no tokens of these texts meanwhile.
        """
        for request in requests:
            end, sequence = request.num_computed, self._sequences.get(request.id)
            if not (end and request.computes_prompt) or self._is_left_out(request):
                continue
            if sequence is None:
                sequence = self._begin(request, request.slot)
            if not sequence.first:
                self._reach(sequence, request.token_ids, end)

    def _reach(self, sequence: DraftedText, ids: Sequence[int], end: int) -> None:
        """Give a text the keys before position `end` that are in the cache or in a tier."""
        kv, chain, tables, size = self.kv, sequence.chain, sequence.tables, self.kv.block_size
        if not sequence.computed:
            self._adopt(sequence, ids)
        while sequence.computed < end:
            found = kv.catch_up(tables, chain, ids, sequence.computed)
            sequence.computed += found
            if found:
                continue
            plan = kv.restorable(tables, chain, ids, sequence.computed)
            if plan is None or kv.offload is None or not kv.offload.has_time:
                return
            if not kv.grow(tables, sequence.computed + size):
                return
            if not kv.restore(tables, chain, plan):
                chain.plan, chain.failed = None, True
                return
            sequence.computed += size

    def _begin_at(self, request: Request, sequence: DraftedText, first: int) -> None:
        """Let the text begin at position `first`. Each token keeps its random number."""
        self.kv.free(sequence.tables)
        sequence.tables = self.kv.new_tables()
        sequence.first = sequence.computed = first
        self._admit(sequence.slot, request, request.seed + WEYL * (first + 1))

    def _learn(self, sequence: DraftedText, ids: Sequence[int]) -> None:
        """Learn which guesses were right, and drop the keys of all of them."""
        self._learn_chances(sequence, ids)
        sequence.computed = min(sequence.computed, sequence.base - 1)
        sequence.base = len(ids)

    def _publish(self, sequence: DraftedText, ids: Sequence[int]) -> None:
        """Publish the keys of a text, without those of guesses."""
        if sequence.first == 0:
            computed = min(sequence.computed, len(ids) - 1)
            self.kv.publish(sequence.tables, sequence.chain, ids, computed, computed=True)

    def _computed(self, request: Request) -> int:
        sequence = self._sequences.get(request.id)
        return 0 if sequence is None else sequence.computed

    def _grow(self, sequence: DraftedText, tokens: int) -> bool:
        return self.kv.grow(sequence.tables, tokens - sequence.first)

    # --- the rows of the model's last step -----------------------------------------------------

    def _catch_up(
        self, requests: Sequence[Request], turns: list[Draft]
    ) -> tuple[list[SeqChunk], list[Draft]]:
        """Compute the rows that texts lack, but not the last ones of `turns`, which sample.

        Return chunks with these last rows, and their turns.
        """
        few = max(1, min(FEW, self.executor.max_tokens // max(len(turns), 1)))
        sampling = {turn.request.id for turn in turns}
        last: dict[RequestId, _Rows] = {}
        # Texts that begin after a prefix may find keys that another text gets in this round.
        late = {r.id for r in requests if self._computed(r) < self._rows[r.slot].position}
        for begins in (False, True):
            earlier: list[_Rows] = []
            for request in requests:
                if (request.id in late) != begins:
                    continue
                found = self._lacking(request, request.slot, request.token_ids)
                if found is None:
                    continue
                kept = few if begins or not late else 1
                count = len(found.tokens) - (kept if request.id in sampling else 0)
                earlier.append(found.first(count))
                last[request.id] = found.rest(count)
            self._compute(earlier)
            for request in requests if late and not begins else ():
                if request.id in last:
                    self._publish(self._sequences[request.id], request.token_ids)
        turns = [turn for turn in turns if turn.request.id in last]
        return [self._chunk_of(last[turn.request.id], sample=True) for turn in turns], turns

    def _lacking(self, request: Request, slot: SlotId, ids: list[int]) -> _Rows | None:
        """Return the rows of the model's last step that a text lacks; None without memory."""
        step, sequence = self._rows[slot], self._sequences.get(request.id)
        if self._is_left_out(request):
            return None
        if sequence is None:
            sequence = self._begin(request, slot)
        elif sequence.base != len(ids):
            self._learn(sequence, ids)
        # The row of a token needs the next token, and rejected drafts are not in the text.
        end = min(step.position + step.tokens, len(ids) - 1)
        if not sequence.first:
            self._reach(sequence, ids, step.position)
        if sequence.computed < step.position:
            self._begin_at(request, sequence, step.position)
        start = sequence.computed
        if start >= end or not self._grow(sequence, end):
            return None
        at = step.row + start - step.position
        return _Rows(sequence, ids[start + 1 : end + 1], list(range(at, at + end - start)))

    def _is_left_out(self, request: Request) -> bool:
        return bool(request.media) or len(request.token_ids) > self._longest

    def _compute(self, rows: Iterable[_Rows]) -> None:
        """Compute the keys of rows that guess nothing, in steps as large as possible."""
        chunks: list[SeqChunk] = []
        room = self.executor.max_tokens
        for left in rows:
            while left.tokens:
                count = min(room, len(left.tokens))
                chunks.append(self._chunk_of(left.first(count)))
                left, room = left.rest(count), room - count
                if not room:
                    self._step(chunks)
                    chunks, room = [], self.executor.max_tokens
        if chunks:
            self._step(chunks)

    # --- steps of the head ---------------------------------------------------------------------

    def _chunk_of(self, rows: _Rows, *, sample: bool = False) -> SeqChunk:
        """Return a chunk with rows of the model; `media` has their numbers until `_step`."""
        chunk = self._chunk(rows.sequence, rows.tokens)
        chunk.media = rows.at
        if not sample:
            chunk.rows = []
        return chunk

    def _chunk(self, sequence: DraftedText, tokens: list[int]) -> SeqChunk:
        chunk = super()._chunk(sequence, tokens)
        chunk.start -= sequence.first
        return chunk

    def _step(self, chunks: list[SeqChunk]) -> list[RowResult]:
        """Run a step; each token has a hidden state of the model, or of the head's last step."""
        own = [self._last[chunk.slot] for chunk in chunks if chunk.media is None]
        theirs = [row for chunk in chunks for row in chunk.media or ()]
        source = self.executor if own else self._target
        states = source.read_hidden(np.array(own or theirs, np.int32))
        self.executor.write_media(0, self._as_media(states, own=bool(own)))
        ends = list(accumulate((len(chunk.token_ids) for chunk in chunks), initial=0))
        for chunk, begin, end in zip(chunks, ends, ends[1:], strict=False):
            chunk.media = list(range(begin, end))
            self._last[chunk.slot] = end - 1
        results = super()._step(chunks)
        if self._ids is not None:
            for row in results:
                row.token = int(self._ids[row.token]) if row.token >= 0 else row.token
        return results

    def _as_media(self, states: Float32, *, own: bool) -> Float32:
        """Return rows of the media buffer with hidden states of the head (`own`) or the model."""
        if not self._own_columns:
            return states
        rows = np.zeros((len(states), self._columns), np.float32)
        if own:
            rows[:, : self._own_columns] = states
        else:
            rows[:, self._own_columns :] = states
        return rows


class _Rows(NamedTuple):
    """Rows of the model's last step: their text, the tokens after them, and their numbers."""

    sequence: DraftedText
    tokens: list[int]
    at: list[int]

    def first(self, count: int) -> _Rows:
        """Return the first `count` rows."""
        return _Rows(self.sequence, self.tokens[: max(count, 0)], self.at[: max(count, 0)])

    def rest(self, count: int) -> _Rows:
        """Return the rows after the first `count` rows."""
        return _Rows(self.sequence, self.tokens[max(count, 0) :], self.at[max(count, 0) :])


def build(parts: EngineParts) -> DraftHead | None:
    """Return the head of an engine's model; None if nobody asked for it, and it cannot be used.

    Raises:
        ModelError: the head that is asked for cannot be used.
    """
    config, draft = parts.config, parts.draft
    own = structs.replace(parts.own, media_rows=draft.max_tokens, weight_cache_bytes=0)
    try:
        head, executor = _head_executor(own, config.model_path, draft.layers, parts.team)
    except ModelError as error:
        if config.speculation is None or config.speculation.method != AUTO:
            raise
        log.warning("no tokens are guessed with the head of the model: %s", error)
        return None
    caching = config.enable_prefix_caching
    kv = KvManager(draft.kv_blocks, config.block_size, prefix_caching=caching)
    return DraftHead(executor, kv, parts.vocab, draft.max_model_len, parts.target, head)


def _head_executor(
    config: EngineConfig, model: str, layers: list[int], team: Any
) -> tuple[GuessHead, Executor]:
    """Return a head and its executor.

    model: the path of the engine's model. layers: those that an EAGLE-3 head reads.
    """
    from cpuserve.loader.speculation.eagle_heads import open_eagle
    from cpuserve.loader.speculation.guess_heads import open_head
    from cpuserve.quant import quantize_online
    from cpuserve.runtime.native import NativeExecutor

    path = Path(config.model_path)
    found = open_eagle(path, Path(model)) if layers else open_head(path)
    if found is None:
        msg = f"{config.model_path} has no head that guesses tokens any more"
        raise ModelError(msg)
    head, weights = found
    weights = quantize_online(weights, head.program, config.quantize)
    return head, NativeExecutor(config, head.program, weights, team)
