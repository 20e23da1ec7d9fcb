"""The results of `LLM`, with the fields of the offline API of vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.engine.ipc import TokenLogprob
    from cpuserve.sampling.beams import BeamSearchParams
    from cpuserve.sampling.params import SamplingParams
    from cpuserve.serving.beam_search import Beam
    from cpuserve.serving.decisions.results import LabelDiagnostics, Result
    from cpuserve.serving.events import Choice
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

    cumulative_logprob, logprobs: None unless SamplingParams.logprobs is set.
      `logprobs` has the chosen token and then the alternatives for each position.
    stop_reason: the stop string or stop token id that ended the sequence, if one did.
    reasoning: the thoughts of a response of `LLM.chat`, which `text` lacks; None = no thoughts.
    tool_calls: the tool calls of the response, as in assistant messages of the API of OpenAI:
      {"id", "type": "function", "function": {"name", "arguments"}}.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)

    def finished(self) -> bool:
        """Return whether the sequence has ended."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its completions.

    prompt: None if token ids were given.
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
class BeamSearchSequence:
    """One of the best texts that `LLM.beam_search` has found.

    tokens, text: the prompt and its continuation.
    logprobs: for each token after the prompt, its logprob and the alternatives.
    finish_reason: "stop" or "length".
    stop_reason: None, because a text ends only at the end of text.
    """

    tokens: list[int]
    logprobs: list[PositionLogprobs]
    cum_logprob: float
    text: str
    finish_reason: str
    stop_reason: int | str | None = None


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


@dataclass(slots=True)
class ClassificationRequestOutput:
    """A prompt and the values of its labels. prompt: None if token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class PoolingOutput:
    """The vector or the label values of a prompt, or a row of them for each of its tokens.

    If several tasks were requested, the data is a dict with the data of each task.
    """

    data: list[float] | list[list[float]] | dict[str, list[float] | list[list[float]]]


@dataclass(slots=True)
class PoolingRequestOutput:
    """A prompt and its result. prompt: None if token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: PoolingOutput
    finished: bool = True
    num_cached_tokens: int = 0


@dataclass(slots=True)
class ScoringOutput:
    """The score of a pair of texts: a reranker's final value, or the cosine of two embeddings."""

    score: float


@dataclass(slots=True)
class ScoringRequestOutput:
    """The token ids of a pair of texts, as the model read them, and the score of the pair."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: ScoringOutput
    finished: bool = True
    num_cached_tokens: int = 0


def completion_of(choice: Choice, params: SamplingParams, tokenizer: Tokenizer) -> CompletionOutput:
    """Return the output of a sequence that has ended; params: its sampling parameters."""
    done = CompletionOutput(choice.index, "".join(choice.text), choice.token_ids)
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
                tokenizer.decode(tokens, skip_special_tokens=False),
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
