"""Assistant: guesses of an assistant, which reads the KV cache of its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import structs

from cpuserve.base.ids import SlotId
from cpuserve.config.engine import KvGroup
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.kv.table import BlockTable
from cpuserve.core.request import Request
from cpuserve.core.speculation.budget import DraftBudget
from cpuserve.core.step import LogitRow, RowResult, SeqChunk
from cpuserve.engine.speculation.hidden_states import WEYL, HiddenStates
from cpuserve.engine.speculation.model_proposer import Guesser, ModelProposer
from cpuserve.engine.speculation.prices import GuessPrices
from cpuserve.engine.speculation.texts import DraftedText, DraftTexts, DraftTurn

if TYPE_CHECKING:
    from cpuserve.engine.speculation.parts import EngineParts
    from cpuserve.loader.speculation.guess_heads import GuessHead
    from cpuserve.runtime.executor import Executor


class Assistant(Guesser):
    """Guesses with an assistant of the model.

    An assistant stores no keys, so a text lacks none: not after a prefix from the cache, not after
    a preemption, and not after rounds without guesses. A row reads the embedding of the last token
    or of the last guess, and attends to the keys of the tokens before the last one, which may be
    of media.

    target: the executor of the model.
    head: the assistant that `executor` runs.
    groups: the cache groups, in the model, of the KV layers that the assistant reads.
    """

    def __init__(
        self, executor: Executor, target: Executor, head: GuessHead, groups: Sequence[int]
    ) -> None:
        self.texts = DraftTexts(executor, KvManager(1, 1, prefix_caching=False))
        self.prices = GuessPrices(self.texts)
        self._hidden = HiddenStates(self.texts, target, head)
        self._groups = groups
        self._requests: dict[SlotId, Request] = {}
        self._tables: dict[SlotId, list[BlockTable]] = {}  # as this executor has them

    def begin_round(self, ended: Mapping[SlotId, Request]) -> None:
        """Note the rows of the model's last step."""
        del ended
        self._hidden.take_step()

    def can_guess(self, request: Request) -> bool:
        """Whether the model's last step had the token before the last one of a text."""
        return self._row(request) is not None

    def _row(self, request: Request) -> int | None:
        """Return the row in the model's last step of the token before the last one of a text."""
        step = self._hidden.rows.get(request.slot)
        if step is None:
            return None
        index = len(request.token_ids) - 2 - step.position
        return step.row + index if 0 <= index < step.tokens else None

    def add(self, request: Request, slot: SlotId) -> DraftedText:
        """Return the text of a request."""
        text = self.texts.add(request, slot)
        self._requests[slot] = request
        self._tables[slot] = [BlockTable() for _ in self._groups]
        self.texts.admit(slot, request, request.seed + WEYL)
        return text

    def learn(self, text: DraftedText, ids: Sequence[int]) -> None:
        """Learn which guesses were right; a text lacks no keys."""
        self.texts.learn(text, ids)
        text.computed = text.base = len(ids)

    def first_chunks(
        self, requests: Sequence[Request], turns: list[DraftTurn], budget: DraftBudget
    ) -> tuple[list[SeqChunk], list[DraftTurn]]:
        """Return chunks with the last tokens of texts and hidden states of the model, and turns."""
        del requests, budget
        chunks: list[SeqChunk] = []
        for turn in turns:
            request, row = turn.request, self._row(turn.request)
            assert row is not None, "a text without this row has no turn"
            for group, table in zip(self._groups, self._tables[request.slot], strict=True):
                follow(table, request.tables[group])
            chunks.append(self._chunk(turn.text, request.token_ids[-1:]))
            chunks[-1].media = [row]
        return chunks, turns

    def next_chunk(self, text: DraftedText) -> SeqChunk:
        """Return a chunk with the last guess of a text, which reads the assistant's own state."""
        return self._chunk(text, text.guesses[-1:])

    def run(self, chunks: list[SeqChunk]) -> list[RowResult]:
        """Run a step; return the results of its rows."""
        return self._hidden.run(chunks)

    def _chunk(self, text: DraftedText, tokens: list[int]) -> SeqChunk:
        """Return a chunk with one token. All rows of a round are at the same place."""
        slot, position, num_guesses = text.slot, text.base - 1, len(text.guesses)
        request = self._requests[slot]
        if request.params.temperature > 0:
            # The random number of a row follows from its position, which does not change.
            self.texts.admit(slot, request, request.seed + WEYL * (num_guesses + 1))
        rows = [LogitRow(0, num_top=0)]
        return SeqChunk(slot, tokens, position - 1, self._tables[slot], rows, angles=[[position]])


def follow(copy: BlockTable, table: BlockTable) -> None:
    """Make `copy` equal to `table`, and note from which entry on the executor lacks them."""
    num_equal = min(len(copy), len(table))
    if copy[:num_equal] != table[:num_equal]:
        num_equal = next(i for i in range(num_equal) if copy[i] != table[i])
    copy.cut(num_equal)
    copy += table[num_equal:]


def build(parts: EngineParts) -> ModelProposer:
    """Return the proposer of an assistant; its executor has no KV blocks."""
    from cpuserve.loader.speculation.assistants import open_assistant
    from cpuserve.quant import quantize_online
    from cpuserve.runtime.native import NativeExecutor

    config, draft, model_groups = parts.config, parts.draft, parts.config.kv_groups
    groups = [
        next((number for number, group in enumerate(model_groups) if layer in group.layers), 0)
        for layer in draft.caches
    ]
    assistant_config = structs.replace(
        parts.own,
        kv_blocks=config.kv_blocks,
        kv_groups=[KvGroup(window=0, layers=[layer]) for layer in range(len(groups))],
        media_rows=draft.max_tokens,
        weight_cache_bytes=0,
    )
    head, weights = open_assistant(Path(assistant_config.model_path), Path(config.model_path))
    weights = quantize_online(weights, head.program, assistant_config.quantize)
    assert isinstance(parts.target, NativeExecutor)  # DrafterKind.head
    kv: dict[str, Any] = {"kv_owner": parts.target.native, "kv_layers": draft.caches}
    executor = NativeExecutor(assistant_config, head.program, weights, parts.team, **kv)
    guesser = Assistant(executor, parts.target, head, groups)
    return ModelProposer(guesser, parts.vocab, draft.max_model_len)
