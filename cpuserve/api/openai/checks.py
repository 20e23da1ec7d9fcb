"""Checks of OpenAI request fields that contradict each other or have the same meaning."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Protocol

from cpuserve.api.request.fields import is_set
from cpuserve.base.errors import InvalidRequest
from cpuserve.serving.calls.call import NO_LIMIT
from cpuserve.serving.calls.extras import extra_values
from cpuserve.serving.calls.params import check_repeat_penalty

if TYPE_CHECKING:
    from cpuserve.api.openai.schema import GenerationRequest
    from cpuserve.api.request.context import RequestContext


_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def shared_values(request: GenerationRequest) -> dict[str, Any]:
    """Return the members of a call that the three APIs write in the same fields.

    Raises:
      InvalidRequest: fields contradict each other.
    """
    if request.stream_options is not None and not request.stream:
        msg = "stream_options can only be set when `stream` is true"
        raise InvalidRequest(msg, param="stream_options")
    return {
        "repetition_penalty": _repetition_penalty(request),
        "structured_outputs": structure_of(request),
        **extra_values({"vllm_xargs": request.vllm_xargs, "extra_args": request.extra_args}),
    }


def _repetition_penalty(request: GenerationRequest) -> float | None:
    """Return the penalty from its vLLM or its llama.cpp field; InvalidRequest if they differ."""
    theirs, ours = request.repeat_penalty, request.repetition_penalty
    if theirs is None:
        return ours
    if ours not in (None, theirs):
        msg = "repeat_penalty and repetition_penalty mean the same: set one of them"
        raise InvalidRequest(msg, param="repeat_penalty")
    check_repeat_penalty(theirs)
    return theirs


class HasLength(Protocol):
    """A request with the fields that limit the length of its response."""

    @property
    def max_tokens(self) -> int | None:
        """The maximum number of response tokens, in the older OpenAI field."""

    @property
    def max_completion_tokens(self) -> int | None:
        """The maximum number of response tokens, in the newer field, which takes precedence."""

    @property
    def n_predict(self) -> int | None:
        """The maximum number of response tokens, in the llama.cpp field; negative = no limit."""


def length(request: HasLength) -> int | None:
    """Return the maximum number of response tokens; None = the default of the server.

    Raises:
      InvalidRequest: n_predict contradicts max_tokens or max_completion_tokens.
    """
    newer, theirs = request.max_completion_tokens, request.n_predict
    found = request.max_tokens if newer is None else newer
    if theirs is None or theirs == found:
        return found
    if found is None:
        return NO_LIMIT if theirs < 0 else theirs
    if theirs < 0:
        return found
    msg = f"n_predict and {length_field(request)} mean the same: set one of them"
    raise InvalidRequest(msg, param="n_predict")


def length_field(request: HasLength) -> str:
    """Return the name of the request field that limits the length of the response."""
    if request.max_completion_tokens is not None:
        return "max_completion_tokens"
    only_theirs = request.max_tokens is None and request.n_predict is not None
    return "n_predict" if only_theirs else "max_tokens"


_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def _guided(request: GenerationRequest) -> list[str]:
    """Return the fields of older versions of vLLM that set a structured output."""
    return [name for name in _GUIDED if getattr(request, name) not in (None, "", [])]


def structure_of(request: GenerationRequest) -> Any:
    """Return structured_outputs, also if the request has it in a field of older versions of vLLM.

    Raises:
      InvalidRequest: several fields set a structured output.
    """
    found = _guided(request)
    if not found:
        return request.structured_outputs
    given = [*found, *(["structured_outputs"] if is_set(request.structured_outputs) else [])]
    if len(given) > 1:
        msg = f"{given[0]} and {given[1]} exclude each other: set one of them"
        raise InvalidRequest(msg, param=given[0])
    return {found[0].removeprefix("guided_"): getattr(request, found[0])}


def form_field(request: GenerationRequest, other: str = "response_format") -> str:
    """Return the name of the request field that sets the structured output.

    other: another field of the endpoint that sets it.
    """
    if found := _guided(request):
        return found[0]
    return other if getattr(request, other.partition(".")[0]) is not None else "structured_outputs"


def take_request_id(request: RequestContext, given: str | None) -> None:
    """Use `given` as the response id, after the prefix of the endpoint; None changes nothing.

    Raises:
      InvalidRequest: `given` is too long or has invalid characters.
    """
    if given is None:
        return
    if not _REQUEST_ID.fullmatch(given):
        msg = "request_id must be 1 to 128 letters, digits and characters of . _ : -"
        raise InvalidRequest(msg, param="request_id")
    request.id = f"{request.id.removesuffix(request.request_id)}{given}"


def usage_in_each(request: GenerationRequest) -> bool:
    """Return whether every chunk of the stream contains the token usage so far."""
    return bool(request.stream_options and request.stream_options.continuous_usage_stats)
