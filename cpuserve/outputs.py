"""The results of `LLM`, with the fields of the offline API of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class Logprob:
    """The log probability of a token at its position; rank 1 is the most likely token."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class CompletionOutput:
    """One of the n sequences of a request.

    cumulative_logprob, logprobs: None unless SamplingParams.logprobs is set; for each position the
    chosen token, then the alternatives. stop_reason: the stop string or stop token id, if any.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        """Return whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions. prompt: None if token ids were given.

    prompt_logprobs: one entry per prompt token, the first one None; None if not requested.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a prompt, a vector of length 1."""

    embedding: list[float]


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding. prompt: None if token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair of texts, after the last activation of the reranker."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """A pair of texts, as the token ids of one prompt, and its score."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True
    num_cached_tokens: int = 0


def position_logprobs(row: TokenLogprob, tokenizer: Tokenizer) -> PositionLogprobs:
    """Return the chosen token, then the alternatives in the order of their probability."""

    def entry(token: int, logprob: float, rank: int) -> Logprob:
        return Logprob(logprob, rank, tokenizer.token_bytes(token).decode("utf-8", "replace"))

    found = {row.token: entry(row.token, row.logprob, row.rank)}
    for rank, (token, logprob) in enumerate(row.top, 1):
        found.setdefault(token, entry(token, logprob, rank))
    return found
