"""The results of `LLM`, with the fields of the offline API of vLLM."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import numpy as np
import numpy.typing as npt

from cpuserve.lora.request import LoRARequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.metrics.server import Sequence as Record
    from cpuserve.sampling.beams import BeamSearchParams
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.calls.events import Choice
    from cpuserve.serving.decisions.results import LabelDiagnostics, Result
    from cpuserve.serving.generation.beam_search import Beam
    from cpuserve.tokenizer.tokenizer import Tokenizer

Float32 = npt.NDArray[np.float32]
Out = TypeVar("Out")


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

    cumulative_logprob, logprobs: None unless SamplingParams.logprobs is set.
      `logprobs` has the chosen token and then the alternatives for each position.
    stop_reason: the stop string or stop token id that ended the sequence, if one did.
    reasoning: the thoughts of a response of `LLM.chat`, which `text` lacks; None = no thoughts.
    tool_calls: the tool calls of the response, as in assistant messages of the API of OpenAI:
      {"id", "type": "function", "function": {"name", "arguments"}}.
    lora_request: the adapter that the request selected.
    routed_experts, sampling_mask, spec_decode_metrics, weight_versions: always None.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    routed_experts: None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | str | None = None
    sampling_mask: None = None
    spec_decode_metrics: None = None
    weight_versions: None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def finished(self) -> bool:
        """Return whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestStateStats:
    """The times and counts of a request; of several sequences, of the first one.

    arrival_time: seconds since 1970.
    queued_ts, scheduled_ts, first_token_ts, last_token_ts: time.monotonic(), 0.0 = never.
    first_token_latency: seconds from the arrival to the first token.
    """

    num_generation_tokens: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions.

    prompt: None if token ids were given.
    prompt_logprobs: one entry per prompt token, the first one None; None if not requested.
    metrics: the times and counts of the request.
    lora_request: the adapter that the request selected.
    encoder_prompt, encoder_prompt_token_ids, num_cache_creation_tokens,
      prompt_token_id_logprobs, kv_transfer_params, ec_transfer_params: always None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestStateStats | None = None
    lora_request: LoRARequest | str | None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int = 0
    num_cache_creation_tokens: None = None
    prompt_token_id_logprobs: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the best texts that `LLM.beam_search` has found.

    tokens, text: the prompt and its continuation.
    logprobs: for each token after the prompt, its logprob and the alternatives.
    lora_request: the adapter that the request selected.
    finish_reason: "stop" or "length".
    stop_reason: None, because a text ends only at the end of text.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float
    text: str
    finish_reason: str
    stop_reason: int | str | None = None
    lora_request: LoRARequest | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The texts that a beam search has found for a prompt, the best one first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class DecisionOutput:
    """The results and diagnostics of the questions of `LLM.decide`, by the ids of the questions.

    num_prompt_tokens: the prompt tokens of all questions; the tokens of the state count once.
    num_cached_tokens: the prompt tokens that an earlier call left in the prefix cache.
    """

    answers: dict[str, Result]
    diagnostics: dict[str, LabelDiagnostics]
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of a prompt, a vector of length 1."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of values of the embedding."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The value of each label of a classifier. labels: the names of the labels in this order."""

    probs: list[float]
    labels: list[str] = field(default_factory=list)

    @property
    def num_classes(self) -> int:
        """The number of labels of the classifier."""
        return len(self.probs)

    @property
    def label(self) -> str:
        """The name of the label with the largest value."""
        return self.labels[self.probs.index(max(self.probs))]


@dataclass(slots=True, eq=False)
class PoolingOutput:
    """The vector or the label values of a prompt, or a row of them for each of its tokens, in fp32.

    If several tasks were requested, the data is a dict with the data of each task.
    """

    data: Float32 | dict[str, Float32]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PoolingOutput):
            return NotImplemented
        a, b = self.data, other.data
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)
        both = not isinstance(a, dict) and not isinstance(b, dict)
        return both and np.array_equal(cast("Float32", a), cast("Float32", b))

    __hash__ = None  # type: ignore[assignment]


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair of texts: a reranker's final value, or the cosine of two embeddings."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput(Generic[Out]):
    """A prompt and its result. prompt: None if token ids or a pair of texts were given.

    error: always None, because an error is raised.
    """

    request_id: str
    outputs: Out
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    error: None = None
    prompt: str | None = None


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A prompt and its embedding."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """A prompt and the values of its labels."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """The token ids of a pair of texts, as the model read them, and the score of the pair."""


def stats_of(record: Record) -> RequestStateStats:
    """Return the times and counts of a sequence that has ended."""
    latency = record.first - record.arrival if record.first else 0.0
    return RequestStateStats(
        num_generation_tokens=record.tokens,
        arrival_time=time.time() - (time.monotonic() - record.arrival),
        queued_ts=record.arrival,
        scheduled_ts=record.scheduled,
        first_token_ts=record.first,
        last_token_ts=record.last,
        first_token_latency=latency,
    )


def completion_of(choice: Choice, params: SamplingParams, tokenizer: Tokenizer) -> CompletionOutput:
    """Return the output of a sequence that has ended; params: its sampling parameters."""
    text = "".join(choice.text) if params.detokenize else ""
    done = CompletionOutput(choice.index, text, choice.token_ids)
    done.finish_reason, done.stop_reason = choice.reason, choice.stop_reason
    done.reasoning = choice.reasoning or None
    for call in choice.calls:
        function = {"name": call.name, "arguments": "".join(call.arguments)}
        done.tool_calls.append({"id": call.id, "type": "function", "function": function})
    if params.logprobs is not None:
        ranked = not params.scored_ids
        done.logprobs = [
            position_logprobs(row, tokenizer, ranked=ranked) for row in choice.logprobs
        ]
        done.cumulative_logprob = sum((row.logprob for row in choice.logprobs), 0.0)
    return done


def beam_output(
    prompt: list[int], beams: Sequence[Beam], params: BeamSearchParams, tokenizer: Tokenizer
) -> BeamSearchOutput:
    """Return the output of a beam search; as in vLLM, its texts begin with the prompt."""
    found = BeamSearchOutput([])
    for beam in beams:
        cut = beam.end is not None and not params.include_stop_str_in_output
        tokens = [*prompt, *(beam.tokens[:-1] if cut else beam.tokens)]
        found.sequences.append(
            BeamSearchSequence(
                tokens,
                [position_logprobs(row, tokenizer) for row in beam.logprobs],
                beam.total,
                tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens),
                "length" if beam.end is None else "stop",
            )
        )
    return found


def position_logprobs(
    row: TokenLogprob, tokenizer: Tokenizer, *, ranked: bool = True
) -> PositionLogprobs:
    """Return the chosen token, then the alternatives in the order of their probability.

    ranked: False = the alternatives are tokens that the request listed, with unknown ranks.
    """

    def entry(token: int, logprob: float, rank: int | None) -> Logprob:
        return Logprob(logprob, rank, tokenizer.token_bytes(token).decode("utf-8", "replace"))

    found = {row.token: entry(row.token, row.logprob, row.rank)}
    for rank, (token, logprob) in enumerate(row.top, 1):
        found.setdefault(token, entry(token, logprob, rank if ranked else None))
    return found
