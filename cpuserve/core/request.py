"""Request: the state of one sequence in the engine. Delta: the results of a step for a request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from cpuserve.base.ids import BlockId, RequestId, SlotId
from cpuserve.core.exclusion import excluding_fields, stop_ids
from cpuserve.core.kv.prefix import PrefixChain
from cpuserve.core.kv.table import BlockTable
from cpuserve.core.media import MediaItem, Placeholders
from cpuserve.core.pooler import Pooler
from cpuserve.core.step import HIDDEN, LogitRow, RowResult, SeqChunk
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.slot import SlotRequest

FinishReason = Literal["stop", "length", "repetition", "abort", "error"]
NO_SLOT = SlotId(-1)


@dataclass(slots=True)
class Wait:
    """The waits of one request, in seconds of each cause (base/waits.py, core/waits.py).

    queued: before it first got a slot; their sum is Request.scheduled - Request.arrival.
    held: after that, without a token of its prompt in a step.
    cause, since: what holds back this request only, and since when; "" = nothing.
    mark: the seconds of the queue's clock when the queue began to hold it back; None = it does not.
    """

    queued: dict[str, float] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    cause: str = ""
    since: float = 0.0
    mark: dict[str, float] | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One sequence. The KV cache holds the first `num_computed` of its `token_ids`.

    token_ids: token ids of the prompt, then of the output.
    max_tokens: most tokens to generate (admission.output_limit).
    eos_ids: tokens that end the output.
      Tokens of params.stop_token_ids end it as well, and are reported in Delta.stop_id.
    num_top: number of alternatives to report for each output token, -1 = no logprobs.
    prompt_rows: None, or the result for each scored prompt token.
      Entry 0 is None, because no logits predict the first token.
      Placeholders of media have None as well.
    arrival, scheduled: time.monotonic() when the request arrived, and when it first got a slot.
    progress: whether to report a Delta after each chunk of the prompt.
    continues: whether the request continues the response of an earlier request.
    fresh: whether its caller came back with it: no other prompt of the caller waited,
      and the caller had had no more work than others (CallerShares.came).
    rank: sort key of the queue (queue.rank_of).
    num_lost: number of prompt tokens that were computed in steps that were ended early.
    drafts: the tokens that may follow, and may be verified by the next step.
    chances: for each of `drafts` its probability to be right if all drafts before it are.
    most_drafts: the most draft tokens that the next step may verify, 0 = none would pay.
    sure: how many of the last tokens no step has sampled or computed yet,
      because the grammar allowed no others (`jump`).
    unsent: the tokens of that kind that no Delta has had yet.
    pooler: computes an embedding or a score from the vectors of the prompt;
      the request then generates no tokens.
    adapter: the slot of the LoRA adapter, -1 = none.
    salt: requests with different salts share no cached prefixes; None = params.cache_salt.
    media: the media items of the prompt, in order.
    ready: whether the request may start:
      False while its grammar is being compiled (`Scheduler.make_ready`).
    wait: what has held it back before its first token, for how long.

    A text with a grammar (params.structured_outputs) ends where the grammar allows no more text,
    even with ignore_eos.
    """

    id: RequestId
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_ids: frozenset[int] = frozenset()
    arrival: float = 0.0
    priority: int = 0
    progress: bool = False
    continues: bool = False
    fresh: bool = False
    pooler: Pooler | None = None
    adapter: int = -1
    salt: str | None = None
    media: Sequence[MediaItem] = ()
    ready: bool = True
    order: int = -1
    rank: tuple[float, int] = (0.0, -1)
    num_prompt: int = 0
    num_computed: int = 0
    slot: SlotId = NO_SLOT
    tables: list[BlockTable] = field(default_factory=list)
    stop_ids: frozenset[int] = frozenset()
    num_top: int = -1
    prompt_rows: list[RowResult | None] | None = None
    cached_tokens: int = 0
    scheduled: float = 0.0
    num_preemptions: int = 0
    num_lost: float = 0.0
    decode_rows: list[LogitRow] = field(default_factory=list)
    chain: PrefixChain = field(default_factory=PrefixChain)
    drafts: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)
    most_drafts: int = 0
    sure: int = 0
    unsent: list[int] = field(default_factory=list)
    samples_slowly: bool = False
    wait: Wait = field(default_factory=Wait)
    _jumps: bool = False

    def __post_init__(self) -> None:
        params = self.params
        self.num_prompt = len(self.token_ids)
        # A request for an embedding generates no tokens, so no token can end it.
        self.stop_ids = stop_ids(params, self.eos_ids if self.pooler is None else ())
        self.num_top = -1 if params.num_top is None else params.num_top
        self.prompt_rows = None if params.prompt_logprobs is None else [None]
        self.decode_rows = [LogitRow(0, -1, self.num_top, mask=self.mask)]
        plain = _samples_without_state(params)
        self._jumps = self.masked and self.num_top < 0 and plain
        self.samples_slowly = self.masked or not plain
        self.chain.salt = params.cache_salt or "" if self.salt is None else self.salt
        self.chain.placeholders = Placeholders(self.media) if self.media else None

    @property
    def num_output(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.num_prompt

    @property
    def masked(self) -> bool:
        """Whether the bitmask of a grammar says which tokens may be sampled."""
        return self.params.masks_tokens

    @property
    def mask(self) -> int:
        """The LogitRow.mask of a row that samples the next token."""
        return 0 if self.masked else -1

    @property
    def can_jump(self) -> bool:
        """Whether a token need not be sampled if its grammar allows no other token.

        Samplers with a state and logprobs need a result for each token, and a token that
        the request itself excludes has to be noticed.
        """
        return self._jumps and self.num_output >= self.params.min_tokens

    @property
    def decides(self) -> bool:
        """Whether the request is a decision: it scores labels and samples one token."""
        return bool(self.params.label_ids) and self.max_tokens == 1

    @property
    def num_labels(self) -> int:
        """Number of rows that score labels, before the row that samples the first token."""
        return 0 if self.num_output else len(self.params.label_ids)

    @property
    def is_running(self) -> bool:
        """Whether the request has a slot, and therefore blocks."""
        return self.slot != NO_SLOT

    @property
    def computes_prompt(self) -> bool:
        """Whether more than one decode row is needed, or a token of the prompt is not computed."""
        decoded = len(self.token_ids) - 1 - self.sure
        return self.num_computed < decoded or self.num_computed < self.num_prompt

    @property
    def counts_prompt(self) -> bool:
        """Whether the statistics count the prompt; they count it once for each response."""
        return not (self.num_preemptions or self.continues)

    @property
    def reads_prefixes(self) -> bool:
        """Whether cached prompt tokens need not run, as the request needs no result for them."""
        if self.params.skip_reading_prefix_cache:
            return False
        if self.pooler is not None:
            return self.pooler.reads_prefixes
        return self.prompt_rows is None or len(self.prompt_rows) >= self.num_prompt

    def chunk(self, tokens: list[int], start: int, rows: list[LogitRow]) -> SeqChunk:
        """Return the chunk of a step for these tokens; the first one has position `start`."""
        scale = self.params.adapter_scale
        return SeqChunk(self.slot, tokens, start, self.tables, rows, 0, self.adapter, scale)

    def uses(self, blocks: set[BlockId], end: int | None = None) -> bool:
        """Whether any block table has one of `blocks` among its first `end` entries."""
        return any(not blocks.isdisjoint(table[:end]) for table in self.tables)

    @property
    def prompt_text(self) -> list[int]:
        """The tokens of the prompt that a sampler counts: not the placeholders of media."""
        prompt, found = self.token_ids[: self.num_prompt], self.chain.placeholders
        return prompt if found is None else found.without(prompt)

    def rows(self, end: int) -> list[LogitRow]:
        """Return a LogitRow for each token from num_computed to end - 1 that needs a result."""
        start, ids = self.num_computed, self.token_ids
        if self.pooler is not None:
            return [
                LogitRow(p - start, HIDDEN) for p in self.pooler.positions(start, end, len(ids))
            ]
        rows: list[LogitRow] = []
        if self.prompt_rows is not None:
            num_top = self.params.prompt_logprobs or 0
            # prompt_rows[p + 1] is the result of position p; results from before a preemption stay.
            first = max(start, len(self.prompt_rows) - 1)
            last = min(end, self.num_prompt - 1)
            rows = [LogitRow(p - start, ids[p + 1], num_top) for p in range(first, last)]
            if (found := self.chain.placeholders) is not None:
                rows = [row for row in rows if start + row.index + 1 not in found]
        if end == len(ids) and self.max_tokens:
            labels = self.params.label_ids[: self.num_labels]
            rows += [LogitRow(end - 1 - start, label, 0) for label in labels]
            rows.append(LogitRow(end - 1 - start, -1, self.num_top, mask=self.mask))
        return rows

    def score_prompt(self, results: Iterable[RowResult]) -> None:
        """Append the results of scored prompt tokens; the placeholders of media get None."""
        scored, found = self.prompt_rows, self.chain.placeholders
        assert scored is not None, "the prompt is not scored"
        for result in results:
            while found is not None and len(scored) in found:
                scored.append(None)
            scored.append(result)
        if found is not None and self.num_computed >= self.num_prompt:
            scored += [None] * (self.num_prompt - len(scored))

    @property
    def excluding_fields(self) -> list[str]:
        """The request fields that can exclude every token of the next row (exclusion.py)."""
        stops = self.stop_ids if self.num_output < self.params.min_tokens else frozenset()
        return excluding_fields(self.params, stops)

    @property
    def next_rows(self) -> list[LogitRow]:
        """The row that samples the next token, after all tokens before it are computed."""
        if not self.sure:
            return self.decode_rows
        return [LogitRow(self.sure, -1, self.num_top, mask=self.mask)]

    def jump(self, tokens: list[int]) -> None:
        """Append the only tokens that the grammar of a running request allows, between steps.

        The next step computes them, but samples none of them.
        """
        assert self.is_running, "only a running request can jump"
        assert not self.sure, "the tokens of the last jump are not computed yet"
        self.token_ids += tokens
        self.unsent += tokens
        self.sure = len(tokens)

    def take_unsent(self) -> list[int]:
        """Return the tokens that no step sampled and no Delta has had, and forget them."""
        taken, self.unsent, self.sure = self.unsent, [], 0
        return taken

    def append(self, token: int) -> FinishReason | None:
        """Append a generated token; return the finish reason if the sequence ends with it."""
        self.token_ids.append(token)
        num_output = len(self.token_ids) - self.num_prompt
        if token in self.stop_ids and num_output > self.params.min_tokens:
            return "stop"
        repeats = self.params.repetition_detection
        if (
            repeats is not None
            and num_output > self.params.min_tokens
            and repeats.finds(self.token_ids, num_output)
        ):
            return "repetition"
        return "length" if num_output >= self.max_tokens else None


def _samples_without_state(params: SamplingParams) -> bool:
    """Whether sampling depends on no earlier token, and only a grammar excludes tokens."""
    return (
        params.repetition_detection is None
        and params.chain is None
        and params.allowed_token_ids is None
        and not (params.penalizes or params.bad_word_ids or params.logit_bias)
        and not params.banned_ngram_size
    )


class Delta(msgspec.Struct):
    """The results of one step for one request.

    rows: the results for `tokens`, if the request asks for logprobs.
    prompt_rows: the results for the whole prompt, in a single Delta when the prompt is scored.
    stop_id: the token of params.stop_token_ids that ended the output.
    processed: number of prompt tokens computed so far, in a Delta that reports only progress.
    vector: the complete embedding, fp32 little-endian.
    fault: the request field that caused `error`.
    unavailable: whether `error` is no fault of the request, which may succeed later.
    drafts: how many tokens the step did not have to sample one by one: draft tokens,
      and the tokens that a grammar determined.
    """

    request: Request
    tokens: list[int]
    finish: FinishReason | None = None
    stop_id: int | None = None
    rows: list[RowResult] | None = None
    prompt_rows: list[RowResult | None] | None = None
    error: str | None = None
    processed: int = 0
    vector: bytes | None = None
    fault: str | None = None
    unavailable: bool = False
    drafts: int = 0


class SlotHost(Protocol):
    """The part of an Executor that the scheduler uses: sampler state per slot."""

    def admit(self, slot: int, request: SlotRequest) -> None:
        """Create the sampler state of `slot`, or replace it."""

    def release(self, slot: int) -> None:
        """Delete the sampler state and the block tables of `slot`."""

    def mirostat_mu(self, slot: int) -> float:
        """Return the state mu of the mirostat sampler for `slot`; 0 without mirostat."""


def keep_state(slots: SlotHost, request: Request) -> None:
    """Copy the state of mirostat to the request, because it does not follow from the tokens."""
    if request.params.mirostat:
        mu = slots.mirostat_mu(request.slot)
        request.params = msgspec.structs.replace(request.params, mirostat_mu=mu)
