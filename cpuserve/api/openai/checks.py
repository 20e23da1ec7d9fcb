"""Checks of OpenAI request fields that contradict each other or mean the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cpuserve.api.request.fields import check_repeat_last_n
from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import NO_LIMIT, unsupported
from cpuserve.serving.params import check_repeat_penalty

if TYPE_CHECKING:
    from cpuserve.api.openai.schema import GenerationRequest


def check_fields_together(request: GenerationRequest) -> None:
    """Raise InvalidRequest for combinations of fields that are not supported."""
    check_repeat_last_n(
        request.repeat_last_n,
        (request.repeat_penalty, 1),
        (request.repetition_penalty, 1),
        (request.presence_penalty, 0),
        (request.frequency_penalty, 0),
    )
    if request.best_of is not None and request.best_of != (request.n or 1):
        msg = f"best_of is not supported yet: omit it, or set it to n ({request.n or 1})"
        raise unsupported(msg, "best_of")
    _check_stream(request)


def repetition_penalty(request: GenerationRequest) -> float | None:
    """Return the penalty under its vLLM or llama.cpp name; InvalidRequest if the two differ."""
    theirs, ours = request.repeat_penalty, request.repetition_penalty
    if theirs is None:
        return ours
    if ours not in (None, theirs):
        msg = "repeat_penalty and repetition_penalty mean the same: set one of them"
        raise InvalidRequest(msg, param="repeat_penalty")
    check_repeat_penalty(theirs)
    return theirs


class Length(NamedTuple):
    """The name of the field that limits the response, and its value; None = the default length."""

    name: str
    tokens: int | None


def length(request: GenerationRequest, newer: int | None) -> Length:
    """Return the token limit of the response; newer: max_completion_tokens, over max_tokens.

    Raises:
      InvalidRequest: n_predict, the llama.cpp name of this limit, contradicts the limit.
    """
    old, theirs = request.max_tokens, request.n_predict
    found = Length("max_tokens", old) if newer is None else Length("max_completion_tokens", newer)
    if theirs is None or theirs == found.tokens:
        return found
    if found.tokens is None:
        return Length("n_predict", NO_LIMIT if theirs < 0 else theirs)
    if theirs < 0:
        return found
    msg = f"n_predict and {found.name} mean the same: set one of them"
    raise InvalidRequest(msg, param="n_predict")


def _check_stream(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        msg = "stream_options can only be set when `stream` is true"
        raise InvalidRequest(msg, param="stream_options")
    if request.stream and request.prompt_logprobs is not None:
        msg = "prompt_logprobs is not available when `stream` is true"
        raise InvalidRequest(msg, param="prompt_logprobs")


def usage_in_each(request: GenerationRequest) -> bool:
    """Return whether every chunk of the stream has the usage."""
    return bool(request.stream_options and request.stream_options.continuous_usage_stats)
