"""ResultProcessor: append the results of a step to requests, and end requests.

ParkedChunks: the chunks of steps that have no results yet. DamageWatch: results that are damaged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from cpuserve.base.ids import RequestId
from cpuserve.base.log import get_logger
from cpuserve.core.budget import PromptBudget
from cpuserve.core.cost import CostModel
from cpuserve.core.exclusion import no_token_left
from cpuserve.core.kv.manager import KvManager
from cpuserve.core.pooler import Pooler
from cpuserve.core.request import Delta, FinishReason, Request
from cpuserve.core.speculation.drafter import Drafter
from cpuserve.core.step import RowResult, SeqChunk, VectorResult

NO_CHOICE = (
    "no token could be sampled: the model's logits are NaN or infinite. A file of the model or of "
    "its adapter may be damaged"
)
NO_VECTOR = "there is no embedding: the model's results are NaN, infinite or all zero"


class ParkedChunks:
    """Chunks that wait for experts in the middle of the layers, by request id.

    Each is in every step, unchanged, until it has results (csrc/runtime/parts.h).
    """

    def __init__(self, most: int) -> None:
        """most: the most tokens that a step can have."""
        self._most = most
        self._chunks: dict[RequestId, SeqChunk] = {}
        self.in_step = False  # whether the step has such chunks

    @property
    def ids(self) -> set[RequestId]:
        """The requests with such chunks."""
        return set(self._chunks)

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all chunks."""
        return sum([len(chunk.token_ids) for chunk in self._chunks.values()])

    def charge(self, budget: PromptBudget, cost: CostModel) -> None:
        """Take the time of all chunks from the budget of a step, because they may go on in it."""
        for chunk in self._chunks.values():
            count = len(chunk.token_ids)
            seconds = cost.prompt_seconds(count, count * (chunk.start + 0.5 * count))
            budget.seconds = max(budget.seconds - seconds, 0.0)

    def park(self, number: RequestId, chunk: SeqChunk) -> None:
        """Keep a chunk for the next steps."""
        self._chunks[number] = chunk
        self.in_step = True

    def due(
        self, running: Iterable[Request], batch: Iterable[SeqChunk], *, masks_late: bool
    ) -> list[tuple[Request, SeqChunk]]:
        """Return the chunks for a step, as they were in the steps before.

        Decode rows that were not in those steps may leave too few tokens for a chunk. It is then
        forgotten, and the next step begins it again, with as many tokens as there are.

        batch: the other chunks of the step.
        masks_late: requests with bitmasks are passed over.
        """
        found: list[tuple[Request, SeqChunk]] = []
        self.in_step = False
        if not self._chunks:
            return found
        left = self._most - sum([len(chunk.token_ids) for chunk in batch])
        for request in running:
            chunk = self._chunks.get(request.id)
            if chunk is None or (masks_late and request.masked):
                continue
            if len(chunk.token_ids) > left:
                self.forget(request.id)
                continue
            left -= len(chunk.token_ids)
            found.append((request, chunk))
        self.in_step = bool(found)
        return found

    def forget(self, number: RequestId) -> None:
        """Forget the chunk of a request: it has results, or the request has lost its blocks."""
        self._chunks.pop(number, None)


class ResultProcessor:
    """Turns the results of one request's rows into a Delta.

    drop: a function that removes an ended request from the scheduler, with its blocks and slot.
    """

    def __init__(
        self, kv: KvManager, drop: Callable[[Request], None], drafter: Drafter | None
    ) -> None:
        self.kv = kv
        self.drafter = drafter
        self._drop = drop

    def append(self, request: Request, chunk: SeqChunk, results: list[RowResult]) -> Delta | None:
        """Append `results` to `request`; None while its prompt is still being scored."""
        if request.pooler is not None:
            return self._pool(request, request.pooler, results)
        for row in results:
            if row.token < 0 or math.isnan(row.logprob):
                return self._fail_sampling(request, scored=row.token >= 0)
        delta = Delta(request, [])
        labels = request.num_labels
        if labels and chunk.rows and chunk.rows[-1].target < 0:
            *results, sampled_row = results
            results, scored = results[:-labels], results[-labels:]
            sampled_row.top = [(row.token, row.logprob) for row in scored]
            results.append(sampled_row)
        if request.prompt_rows is not None and request.num_output == 0:
            sampled = bool(chunk.rows) and chunk.rows[-1].target < 0
            request.score_prompt(results[:-1] if sampled else results)
            results = results[-1:] if sampled else []
            if request.num_computed < request.num_prompt:
                return None
            delta.prompt_rows = request.prompt_rows
        if not results:
            return self._finish(delta, "length") if not request.max_tokens else None
        token = results[0].token
        if sure := request.take_unsent():
            delta.tokens += sure
            self._count(delta, len(sure), len(sure))
        delta.tokens.append(token)
        if request.num_top >= 0:
            delta.rows = results
        finish = request.append(token)
        return delta if finish is None else self._finish(delta, finish)

    def append_drafts(self, request: Request, chunk: SeqChunk, results: list[RowResult]) -> Delta:
        """Append the results of a decode row and its drafts, as if each token had its own step."""
        if results[0].token < 0:
            return self._fail_sampling(request)
        sure = request.take_unsent()
        delta, finish = Delta(request, [*sure]), None
        for row in results:
            if row.token < 0 or finish is not None:
                break  # the next step samples the token of this row, if it can
            delta.tokens.append(row.token)
            finish = request.append(row.token)
        count = len(delta.tokens) - len(sure)
        self._count(delta, len(sure) + chunk.num_drafts, len(delta.tokens) - 1)
        computed = request.num_computed = chunk.start + chunk.rows[0].index + count
        self.kv.truncate(request.tables, computed)
        if computed // self.kv.block_size > chunk.start // self.kv.block_size:
            self.kv.publish(
                request.tables, request.chain, request.token_ids, computed, computed=True
            )
            self.kv.slide(request.tables, computed)
        if request.num_top >= 0:
            delta.rows = results[:count]
        return delta if finish is None else self._finish(delta, finish)

    def _count(self, delta: Delta, drafts: int, accepted: int) -> None:
        delta.drafts = drafts
        if self.drafter is not None:
            self.drafter.count(drafts, accepted)

    def _fail_sampling(self, request: Request, *, scored: bool = False) -> Delta:
        """End `request` with an error, since no token could be sampled for it.

        scored: a token could be sampled, but the logprob of a token of the prompt is NaN.
        """
        # If the parameters of this request can exclude all tokens, only the blocks that it
        # published leave the prefix cache: other requests must not lose prefixes because of it.
        # Otherwise all its blocks leave it, because shared blocks may hold broken keys or values.
        if request.params.bars_tokens:
            self.kv.published.unpublish_own(request.chain)
        else:
            self.kv.published.unpublish(self.kv.held(request.tables))
        delta = Delta(request, [], "error", error=NO_CHOICE)
        if not scored and (fields := request.excluding_fields):
            delta.error, delta.fault = no_token_left(fields), fields[0]
        self._drop(request)
        return delta

    def _pool(self, request: Request, pooler: Pooler, results: list[RowResult]) -> Delta | None:
        """Pass the vectors to the pooler; after the last token, return its embedding or score."""
        vectors = [row.vector for row in results if isinstance(row, VectorResult)]
        assert len(vectors) == len(results), "the row of an embedding has no vector"
        pooler.add(vectors)
        if request.num_computed < request.num_prompt:
            return None
        vector = pooler.result()
        if vector is None:  # the keys and values in its blocks may be broken as well
            self.kv.published.unpublish(self.kv.held(request.tables))
            self._drop(request)
            return Delta(request, [], "error", error=NO_VECTOR)
        return self._finish(Delta(request, [], vector=vector), "stop")

    def _finish(self, delta: Delta, finish: FinishReason) -> Delta:
        request = delta.request
        delta.finish = finish
        if finish == "stop" and delta.tokens and delta.tokens[-1] in request.params.stop_token_ids:
            delta.stop_id = delta.tokens[-1]
        self.kv.publish_end(request.tables, request.chain, request.num_computed)
        if self.drafter is not None:
            self.drafter.finish(request)
        self._drop(request)
        return delta


# The results of a single prompt may overflow, but not of so many requests in a row.
DAMAGED_STEPS = 16

log = get_logger("engine")


class DamageWatch:
    """Counts the steps in a row without a finite result."""

    def __init__(self) -> None:
        self._steps = 0

    def see(self, deltas: Iterable[Delta]) -> bool:
        """Note the results of a step; return whether the model's weights count as damaged.

        A step without results changes nothing. Requests with an adapter do not count,
        because the adapter may be damaged.
        """
        finite = broken = False
        for delta in deltas:
            finite |= not (delta.error or delta.processed)
            broken |= delta.error in (NO_CHOICE, NO_VECTOR) and delta.request.adapter < 0
        if finite:
            self._steps = 0
        elif broken:
            self._steps += 1
            if self._steps == DAMAGED_STEPS:
                log.error(
                    "the model's weights are damaged: %d steps in a row computed no finite number",
                    DAMAGED_STEPS,
                )
        return self._steps >= DAMAGED_STEPS
