"""DraftModel: guesses of a second model, which runs between the steps of the first one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.base.ids import SlotId
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.request import Request
from cpuserve.core.speculation.budget import DraftBudget
from cpuserve.core.step import RowResult, SeqChunk
from cpuserve.engine.speculation.model_proposer import Guesser, ModelProposer
from cpuserve.engine.speculation.prices import GuessPrices
from cpuserve.engine.speculation.texts import FEW, DraftedText, DraftTexts, DraftTurn

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.config.speculation import DraftModelConfig
    from cpuserve.engine.speculation.parts import EngineParts
    from cpuserve.runtime.executor import Executor

# A chunk takes at most half the time of a step, so running streams do not seem to pause. It has at
# least LEAST_CHUNK tokens.
CHUNK_SHARE, LEAST_CHUNK = 0.5, 32
# The draft model computes a text only if the rest of the response is expected to save this time.
# A response is expected to have as many more tokens as it has, and at least LEAST_LEFT.
LEAST_LEFT = 32


class DraftModel(Guesser):
    """Guesses with a second model that has the same vocabulary, and reads only texts.

    Its keys are in blocks of their own, with a prefix cache.
    """

    def __init__(self, executor: Executor, kv: KvManager) -> None:
        self.texts = DraftTexts(executor, kv)
        self.prices = GuessPrices(self.texts, is_worth=self.is_worth)

    def can_guess(self, request: Request) -> bool:
        """Whether the text of a request has no media."""
        return not request.media

    def add(self, request: Request, slot: SlotId) -> DraftedText:
        """Return the text of a request, with the keys that the cache has."""
        text = self.texts.add(request, slot)
        self.texts.admit(slot, request, request.seed)
        self.texts.adopt(text, request.token_ids)
        return text

    def learn(self, text: DraftedText, ids: Sequence[int]) -> None:
        """Learn which guesses were right, drop the keys of the others, and publish the rest."""
        num_right = self.texts.learn(text, ids)
        text.computed = min(text.computed, text.base + num_right)
        text.base = len(ids)
        self.texts.kv.publish(text.tables, text.chain, ids, text.computed, computed=True)

    def is_worth(self, turn: DraftTurn, saved_s: float) -> bool:
        """Whether the rest of a response saves the time to compute the tokens that a text lacks.

        saved_s: the seconds that drafts save for each token.
        """
        request, lacks = turn.request, turn.text.lacks
        if lacks <= FEW:
            return True
        tokens_left = (
            min(request.max_tokens, max(LEAST_LEFT, 2 * request.num_output)) - request.num_output
        )
        keys = lacks * (turn.text.base - lacks / 2)
        return self.texts.cost.prompt_seconds(lacks, keys) < saved_s * tokens_left

    def first_chunks(
        self, requests: Sequence[Request], turns: list[DraftTurn], budget: DraftBudget
    ) -> tuple[list[SeqChunk], list[DraftTurn]]:
        """Return chunks with the tokens that texts lack, and the turns of complete texts.

        Texts that lack many tokens have a part of the time of a step. Only one of them
        gets a chunk.
        """
        del requests
        turns.sort(key=lambda turn: turn.text.lacks)
        seconds = budget.step_s * CHUNK_SHARE
        room = self.texts.executor.max_tokens
        is_late = False
        chunks: list[SeqChunk] = []
        complete: list[DraftTurn] = []
        for turn in turns:
            text = turn.text
            start, count = text.computed, min(text.lacks, room)
            if text.lacks > FEW:
                count = min(count, max(self.texts.cost.chunk(start, seconds), LEAST_CHUNK))
            if is_late or not count or not self.texts.kv.grow(text.tables, start + count):
                continue
            is_late, room = text.lacks > FEW, room - count
            chunks.append(text.chunk(turn.request.token_ids[start : start + count]))
            if text.lacks:
                chunks[-1].rows = []
            else:
                complete.append(turn)
        return chunks, complete

    def next_chunk(self, text: DraftedText) -> SeqChunk | None:
        """Return a chunk with the last guess of a text; None without memory."""
        if not self.texts.kv.grow(text.tables, text.computed + 1):
            return None
        return text.chunk(text.guesses[-1:])

    def run(self, chunks: list[SeqChunk]) -> list[RowResult]:
        """Run a step; return the results of its rows."""
        return self.texts.run(chunks)


def build(parts: EngineParts) -> ModelProposer:
    """Return the proposer of a draft model.

    Raises:
        ModelError: the ids of the two models mean different tokens.
    """
    config, draft = parts.config, parts.draft
    executor, own_vocab = parts.load(parts.own)
    check_vocabulary(config, draft, min(parts.vocab, own_vocab))
    caching = config.enable_prefix_caching
    kv = KvManager(draft.kv_blocks, config.block_size, prefix_caching=caching)
    return ModelProposer(DraftModel(executor, kv), parts.vocab, draft.max_model_len)


def check_vocabulary(config: EngineConfig, draft: DraftModelConfig, vocab: int) -> None:
    """Raise a ModelError unless each of `vocab` ids is the same token for both models."""
    from cpuserve.tokenizer.tokenizer import Tokenizer

    model_tokens = Tokenizer.load(Path(config.tokenizer_path)).texts(vocab)
    draft_tokens = Tokenizer.load(Path(draft.tokenizer_path)).texts(vocab)
    for number, (our, their) in enumerate(zip(model_tokens, draft_tokens, strict=True)):
        if our != their:
            msg = (
                f"the draft model {draft.model} has another vocabulary than {config.model}: "
                f"token {number} is {their[:40]!r}, not {our[:40]!r}"
            )
            raise ModelError(msg)
