"""DraftHead: guesses of a head of the model, which reads the hidden states of its steps.

A head for multi-token prediction reads the inputs of the output matrix. An EAGLE-3 head reads the
inputs of some layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from cpuserve.base.errors import ModelError
from cpuserve.base.ids import RequestId, SlotId
from cpuserve.base.log import get_logger
from cpuserve.config.speculation import AUTO
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.request import Request
from cpuserve.core.scheduler import MOVING_S
from cpuserve.core.speculation.budget import DraftBudget
from cpuserve.core.step import RowResult, SeqChunk
from cpuserve.engine.speculation.hidden_states import WEYL, HiddenStates
from cpuserve.engine.speculation.model_proposer import Guesser, ModelProposer
from cpuserve.engine.speculation.prices import TRY_AFTER, GuessPrices
from cpuserve.engine.speculation.texts import FEW, DraftedText, DraftTexts, DraftTurn

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.engine.speculation.parts import EngineParts
    from cpuserve.loader.speculation.guess_heads import GuessHead
    from cpuserve.runtime.executor import Executor

log = get_logger("engine")

# A head that rests has forgotten all texts. It begins them anew this number of rounds before it
# tries a guess, because its first guesses of a text are worse than later ones.
EARLY = 4
# A head tries a guess less often than other drafters: each try also computes the rows of all texts
# for EARLY rounds.
MOST_RESTS = 8 * TRY_AFTER


class DraftHead(Guesser):
    """Guesses with a head of the model.

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
    attends only to later tokens (`DraftedText.first_position`). This happens while no guesses pay.

    longest: the number of tokens of the longest text that the head can continue.
    target: the executor of the model.
    head: the head that `executor` runs.
    """

    keeps_keys = True

    def __init__(
        self, executor: Executor, kv: KvManager, longest: int, target: Executor, head: GuessHead
    ) -> None:
        self.texts = DraftTexts(executor, kv)
        self.prices = GuessPrices(self.texts, MOST_RESTS)
        self._hidden = HiddenStates(self.texts, target, head)
        self._longest = longest

    def begin_round(self, ended: Mapping[SlotId, Request]) -> None:
        """Compute and publish the keys of the last tokens of texts that have ended."""
        self._hidden.take_step()
        if self.texts.kv.offload is not None:
            self.texts.kv.offload.left_s = MOVING_S
        if self.prices.rest_for(EARLY):
            return
        ended_texts: list[tuple[DraftedText, list[int]]] = []
        key_rows: list[_Rows] = []
        for slot, request in ended.items():
            if slot not in self._hidden.rows or request.decides:
                continue
            # Without a response nobody knows the next token. The key of the last token of a prefix
            # may belong to any one.
            ids = request.token_ids + request.token_ids[-1:] * (not request.num_output)
            rows = self._lacking(request, slot, ids)
            key_rows += [] if rows is None else [rows]
            if (text := self.texts.by_request.get(request.id)) is not None:
                ended_texts.append((text, ids))
        self._compute(key_rows)
        for text, ids in ended_texts:
            self._publish(text, ids)

    def can_guess(self, request: Request) -> bool:
        """Whether the model's last step had tokens of a request, whose text has no media."""
        return request.slot in self._hidden.rows and not request.media

    def first_chunks(
        self, requests: Sequence[Request], turns: list[DraftTurn], budget: DraftBudget
    ) -> tuple[list[SeqChunk], list[DraftTurn]]:
        """Compute the rows of all texts that the model's last step had, but the last of turns.

        Return chunks with these last rows, and their turns.
        """
        del budget
        if not turns and self.prices.rest_for(EARLY):
            self.texts.forget_all_but({})
            return [], []
        rows = self._hidden.rows
        if self.texts.kv.offload is not None:
            self._follow([request for request in requests if request.slot not in rows])
        return self._catch_up([request for request in requests if request.slot in rows], turns)

    def next_chunk(self, text: DraftedText) -> SeqChunk | None:
        """Return a chunk with the last guess of a text; None without memory."""
        return text.chunk(text.guesses[-1:]) if self._grow(text, text.computed + 1) else None

    def run(self, chunks: list[SeqChunk]) -> list[RowResult]:
        """Run a step; return the results of its rows."""
        return self._hidden.run(chunks)

    def end_round(self, requests: Sequence[Request]) -> None:
        """Publish the keys of texts."""
        for request in requests:
            text = self.texts.by_request.get(request.id)
            if text is not None and request.slot in self._hidden.rows:
                self._publish(text, request.token_ids)

    # --- texts -------------------------------------------------------------------------------

    def add(self, request: Request, slot: SlotId) -> DraftedText:
        """Return a text without keys; a head that rests begins texts in each round."""
        text = self.texts.add(request, slot)
        self._begin_at(request, text, 0)
        return text

    def learn(self, text: DraftedText, ids: Sequence[int]) -> None:
        """Learn which guesses were right, and drop the keys of all of them."""
        self.texts.learn(text, ids)
        text.computed = min(text.computed, text.base - 1)
        text.base = len(ids)

    def _begin_at(self, request: Request, text: DraftedText, position: int) -> None:
        """Let the text begin at position `position`. Each token keeps its random number."""
        self.texts.kv.free(text.tables)
        text.tables = self.texts.kv.new_tables()
        text.first_position = text.computed = position
        self.texts.admit(text.slot, request, request.seed + WEYL * (position + 1))

    def _follow(self, requests: Sequence[Request]) -> None:
        """Give texts the keys of the blocks that the model is restoring from a tier.

        The model computes no tokens of these texts meanwhile.
        """
        for request in requests:
            end, text = request.num_computed, self.texts.by_request.get(request.id)
            if not (end and request.computes_prompt) or self._is_left_out(request):
                continue
            if text is None:
                text = self.add(request, request.slot)
            if not text.first_position:
                self._reach(text, request.token_ids, end)

    def _reach(self, text: DraftedText, ids: Sequence[int], end: int) -> None:
        """Give a text the keys before position `end` that are in the cache or in a tier."""
        kv, chain, tables = self.texts.kv, text.chain, text.tables
        if not text.computed:
            self.texts.adopt(text, ids)
        while text.computed < end:
            num_cached = kv.catch_up(tables, chain, ids, text.computed)
            text.computed += num_cached
            if num_cached:
                continue
            plan = kv.restorable(tables, chain, ids, text.computed)
            if plan is None or kv.offload is None or not kv.offload.has_time:
                return
            if not kv.grow(tables, text.computed + kv.block_size):
                return
            if not kv.restore(tables, chain, plan):
                chain.plan, chain.failed = None, True
                return
            text.computed += kv.block_size

    def _publish(self, text: DraftedText, ids: Sequence[int]) -> None:
        """Publish the keys of a text, without those of guesses."""
        if text.first_position == 0:
            computed = min(text.computed, len(ids) - 1)
            self.texts.kv.publish(text.tables, text.chain, ids, computed, computed=True)

    def _num_computed(self, request: Request) -> int:
        text = self.texts.by_request.get(request.id)
        return 0 if text is None else text.computed

    def _grow(self, text: DraftedText, tokens: int) -> bool:
        """Give a text the blocks for its first `tokens` tokens; return False without memory.

        The tokens before its first position have no keys.
        """
        return self.texts.kv.grow(text.tables, tokens - text.first_position)

    # --- the rows of the model's last step -----------------------------------------------------

    def _catch_up(
        self, requests: Sequence[Request], turns: list[DraftTurn]
    ) -> tuple[list[SeqChunk], list[DraftTurn]]:
        """Compute the rows that texts lack, but not the last ones of `turns`, which sample.

        Return chunks with these last rows, and their turns.
        """
        num_sampling = max(1, min(FEW, self.texts.executor.max_tokens // max(len(turns), 1)))
        sampling_ids = {turn.request.id for turn in turns}
        sampling_rows: dict[RequestId, _Rows] = {}
        # Texts that begin after a prefix may find keys that another text gets in this round.
        positions = {request.id: self._hidden.rows[request.slot].position for request in requests}
        late_ids = {r.id for r in requests if self._num_computed(r) < positions[r.id]}
        for is_late in (False, True):
            key_rows: list[_Rows] = []
            for request in requests:
                if (request.id in late_ids) != is_late:
                    continue
                rows = self._lacking(request, request.slot, request.token_ids)
                if rows is None:
                    continue
                num_last = num_sampling if is_late or not late_ids else 1
                count = len(rows.tokens) - (num_last if request.id in sampling_ids else 0)
                key_rows.append(rows.first(count))
                sampling_rows[request.id] = rows.rest(count)
            self._compute(key_rows)
            for request in requests if late_ids and not is_late else ():
                if request.id in sampling_rows:
                    self._publish(self.texts.by_request[request.id], request.token_ids)
        turns = [turn for turn in turns if turn.request.id in sampling_rows]
        return [sampling_rows[turn.request.id].chunk() for turn in turns], turns

    def _lacking(self, request: Request, slot: SlotId, ids: list[int]) -> _Rows | None:
        """Return the rows of the model's last step that a text lacks; None without memory."""
        step, text = self._hidden.rows[slot], self.texts.by_request.get(request.id)
        if self._is_left_out(request):
            return None
        if text is None:
            text = self.add(request, slot)
        elif text.base != len(ids):
            self.learn(text, ids)
        # The row of a token needs the next token, and rejected drafts are not in the text.
        end = min(step.position + step.tokens, len(ids) - 1)
        if not text.first_position:
            self._reach(text, ids, step.position)
        if text.computed < step.position:
            self._begin_at(request, text, step.position)
        start = text.computed
        if start >= end or not self._grow(text, end):
            return None
        first_row = step.row + start - step.position
        numbers = list(range(first_row, first_row + end - start))
        return _Rows(text, ids[start + 1 : end + 1], numbers)

    def _is_left_out(self, request: Request) -> bool:
        return bool(request.media) or len(request.token_ids) > self._longest

    def _compute(self, key_rows: Iterable[_Rows]) -> None:
        """Compute the keys of rows that guess nothing, in steps as large as possible."""
        chunks: list[SeqChunk] = []
        room = self.texts.executor.max_tokens
        for rows in key_rows:
            while rows.tokens:
                count = min(room, len(rows.tokens))
                chunks.append(rows.first(count).chunk())
                chunks[-1].rows = []
                rows, room = rows.rest(count), room - count
                if not room:
                    self.run(chunks)
                    chunks, room = [], self.texts.executor.max_tokens
        if chunks:
            self.run(chunks)


class _Rows(NamedTuple):
    """Rows of the model's last step: their text, the tokens after them, and their numbers."""

    text: DraftedText
    tokens: list[int]
    numbers: list[int]

    def first(self, count: int) -> _Rows:
        """Return the first `count` rows."""
        return _Rows(self.text, self.tokens[: max(count, 0)], self.numbers[: max(count, 0)])

    def rest(self, count: int) -> _Rows:
        """Return the rows after the first `count` rows."""
        return _Rows(self.text, self.tokens[max(count, 0) :], self.numbers[max(count, 0) :])

    def chunk(self) -> SeqChunk:
        """Return a chunk of the text; `media` are the numbers of the rows (HiddenStates.run)."""
        chunk = self.text.chunk(self.tokens)
        chunk.media = self.numbers
        return chunk


def build(parts: EngineParts) -> ModelProposer | None:
    """Return the proposer of a head; None if nobody asked for the head, and it cannot be used.

    Raises:
        ModelError: the head that is asked for cannot be used.
    """
    config, draft = parts.config, parts.draft
    head_config = structs.replace(parts.own, media_rows=draft.max_tokens, weight_cache_bytes=0)
    try:
        head, executor = _head_executor(head_config, config.model_path, draft.layers, parts.team)
    except ModelError as error:
        if config.speculation is None or config.speculation.method != AUTO:
            raise
        log.warning("no tokens are guessed with the head of the model: %s", error)
        return None
    caching = config.enable_prefix_caching
    kv = KvManager(draft.kv_blocks, config.block_size, prefix_caching=caching)
    guesser = DraftHead(executor, kv, draft.max_model_len, parts.target, head)
    return ModelProposer(guesser, parts.vocab, draft.max_model_len)


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
    opened = open_eagle(path, Path(model)) if layers else open_head(path)
    if opened is None:
        msg = f"{config.model_path} has no head that guesses tokens any more"
        raise ModelError(msg)
    head, weights = opened
    weights = quantize_online(weights, head.program, config.quantize)
    return head, NativeExecutor(config, head.program, weights, team)
