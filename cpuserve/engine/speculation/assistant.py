"""Assistant: draft tokens of an assistant of Gemma 4, which reads the KV cache of its model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from cpuserve.base.ids import SlotId
from cpuserve.config.engine import KvGroup
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.table import BlockTable
from cpuserve.core.request import Request
from cpuserve.core.speculation.budget import DraftBudget
from cpuserve.core.step import LogitRow, SeqChunk
from cpuserve.engine.speculation.draft_head import WEYL, DraftHead
from cpuserve.engine.speculation.draft_model import TRY_AFTER, Draft, DraftedText

if TYPE_CHECKING:
    from cpuserve.engine.speculation.parts import EngineParts
    from cpuserve.loader.speculation.guess_heads import GuessHead
    from cpuserve.runtime.executor import Executor, StepRows


class Assistant(DraftHead):
    """Guesses the tokens after running texts with an assistant.

    An assistant stores no keys, so a text lacks none: not after a prefix from the cache, not after
    a preemption, and not after rounds without guesses. A row reads the embedding of the last token
    or of the last guess, and attends to the keys of the tokens before the last one.

    groups: the cache groups, in the model, of the KV layers that the assistant reads.
    """

    most_rests = TRY_AFTER  # a try costs no more than its guess
    keeps_keys = False  # it has none

    def __init__(
        self,
        executor: Executor,
        vocab: int,
        longest: int,
        target: Executor,
        head: GuessHead,
        groups: Sequence[int],
    ) -> None:
        kv = KvManager(1, 1, prefix_caching=False)
        super().__init__(executor, kv, vocab, longest, target, head)
        self._groups = groups
        self._requests: dict[SlotId, Request] = {}
        self._tables: dict[SlotId, list[BlockTable]] = {}  # as this executor has them

    def _round(self, requests: Sequence[Request], budget: DraftBudget) -> None:
        rows = self._rows
        known = [r for r in requests if r.slot in rows and self._row(r, rows[r.slot]) is not None]
        turns = self._chosen(self._turns(known), budget)
        chunks = [self._first_chunk(turn, rows[turn.request.slot]) for turn in turns]
        self._guess_on(chunks, turns, budget)

    def _may_have_drafts(self, request: Request) -> bool:
        """Whether the next step may verify drafts of a request; its keys may be of media."""
        if request.most_drafts <= 0 or request.computes_prompt:
            return False
        return len(request.token_ids) + request.most_drafts <= self._longest

    def _row(self, request: Request, step: StepRows) -> int | None:
        """Return the row in the model's last step of the token before the last one of a text."""
        at = len(request.token_ids) - 2 - step.position
        return step.row + at if 0 <= at < step.tokens else None

    # --- texts -------------------------------------------------------------------------------

    def _begin_at(self, request: Request, sequence: DraftedText, first: int) -> None:
        del first
        self._requests[sequence.slot] = request
        self._tables[sequence.slot] = [BlockTable() for _ in self._groups]
        self._admit(sequence.slot, request, request.seed + WEYL)

    def _learn(self, sequence: DraftedText, ids: Sequence[int]) -> None:
        self._learn_chances(sequence, ids)
        sequence.computed = sequence.base = len(ids)

    def _grow(self, sequence: DraftedText, tokens: int) -> bool:
        del sequence, tokens
        return True

    # --- steps of the assistant ----------------------------------------------------------------

    def _first_chunk(self, turn: Draft, step: StepRows) -> SeqChunk:
        """Return a chunk with the last token of a text, and the hidden state of the model."""
        request, row = turn.request, self._row(turn.request, step)
        assert row is not None
        for group, known in zip(self._groups, self._tables[request.slot], strict=True):
            follow(known, request.tables[group])
        chunk = self._chunk(turn.sequence, request.token_ids[-1:])
        chunk.media = [row]
        return chunk

    def _chunk(self, sequence: DraftedText, tokens: list[int]) -> SeqChunk:
        """Return a chunk with one token. All rows of a round are at the same place."""
        slot, last, guesses = sequence.slot, sequence.base - 1, len(sequence.guessed)
        request = self._requests[slot]
        if request.params.temperature > 0:
            # The random number of a row follows from its position, which does not change.
            self._admit(slot, request, request.seed + WEYL * (guesses + 1))
        rows = [LogitRow(0, num_top=0)]
        tables = self._tables[slot]
        return SeqChunk(slot, tokens, last - 1, tables, rows, angles=[[last]])


def follow(known: BlockTable, table: BlockTable) -> None:
    """Make `known` equal to `table`, and note from which entry on the executor lacks them."""
    same = min(len(known), len(table))
    if known[:same] != table[:same]:
        same = next(i for i in range(same) if known[i] != table[i])
    known.cut(same)
    known += table[same:]


def build(parts: EngineParts) -> Assistant:
    """Return an assistant of an engine's model; its executor has no KV blocks."""
    from cpuserve.loader.speculation.assistants import open_assistant
    from cpuserve.quant import quantize_online
    from cpuserve.runtime.native import NativeExecutor

    config, draft, whole = parts.config, parts.draft, parts.config.kv_groups
    groups = [
        next((number for number, group in enumerate(whole) if layer in group.layers), 0)
        for layer in draft.caches
    ]
    own = structs.replace(
        parts.own,
        kv_blocks=config.kv_blocks,
        kv_groups=[KvGroup(window=0, layers=[layer]) for layer in range(len(groups))],
        media_rows=draft.max_tokens,
        weight_cache_bytes=0,
    )
    head, weights = open_assistant(Path(own.model_path), Path(config.model_path))
    weights = quantize_online(weights, head.program, own.quantize)
    assert isinstance(parts.target, NativeExecutor)  # DrafterKind.head
    kv: dict[str, Any] = {"kv_owner": parts.target.native, "kv_layers": draft.caches}
    executor = NativeExecutor(own, head.program, weights, parts.team, **kv)
    return Assistant(executor, parts.vocab, draft.max_model_len, parts.target, head, groups)
