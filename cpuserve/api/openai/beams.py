"""Request fields of beam search: use_beam_search, length_penalty, and its width (best_of or n)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from cpuserve.api.request.fields import is_set
from cpuserve.base.errors import InvalidRequest, brief
from cpuserve.sampling.beams import MOST_BEAMS, BeamRules
from cpuserve.sampling.fields import CHAINED
from cpuserve.serving.calls.call import unsupported

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

# Fields that beam search does not support, each with the values that have no effect anyway.
_NOT_WITH_BEAMS: Mapping[str, Collection[Any]] = {
    "stream": (),
    "echo": (),
    "tools": (),
    "stop": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "prompt_logprobs": (),
    "logprob_token_ids": (),
    "logit_bias": (),
    "allowed_token_ids": (),
    "bad_words": (),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "repeat_penalty": (1,),
    "repetition_detection": (),
    "samplers": (),
    **{name: (field.unset,) for name, field in CHAINED.items() if field.starts},
    "top_n_sigma": (0, -1),
    "thinking_token_budget": (-1,),
    "thinking_budget_tokens": (-1,),
    "reasoning_budget_tokens": (-1,),
}


class HasBeams(Protocol):
    """A request with the fields that enable and configure beam search."""

    @property
    def n(self) -> int | None:
        """The number of responses to return."""

    @property
    def best_of(self) -> Any:
        """The width of the beam search; None = the same as `n`."""

    @property
    def use_beam_search(self) -> bool | None:
        """Whether the request uses beam search instead of sampling."""

    @property
    def length_penalty(self) -> float | None:
        """The exponent of the sequence length that divides the logprob in the score of a beam."""


def check_best_of(n: int, best_of: Any) -> None:
    """Raise InvalidRequest if best_of differs from n in a chat without beam search."""
    if best_of is not None and best_of != n:
        msg = f"best_of is only possible with use_beam_search: omit it, or set it to n ({n})"
        raise unsupported(msg, "best_of")


def sampled_best_of(request: HasBeams, *, stream: bool) -> int | None:
    """Return how many texts are sampled for each prompt; the n best of them are returned.

    None = n texts, which are all returned.

    Raises:
      InvalidRequest: best_of is out of range, or the response is a stream.
    """
    n, best_of = request.n or 1, request.best_of
    if request.use_beam_search or best_of in (None, n):
        return None
    if not isinstance(best_of, int) or best_of < n:
        msg = f"best_of must be a whole number of n ({n}) or more, got {brief(best_of)}"
        raise InvalidRequest(msg, param="best_of")
    if stream:
        msg = "best_of is not possible in a stream: omit it, or set stream to false"
        raise unsupported(msg, "best_of")
    return best_of


def beam_rules(request: HasBeams) -> BeamRules | None:
    """Return the parameters of the beam search of a request; None = the request samples tokens.

    Raises:
      InvalidRequest: a field is out of range, or excludes another field of the request.
    """
    n, best_of, penalty = request.n or 1, request.best_of, request.length_penalty
    if not request.use_beam_search:
        if penalty not in (None, 1):
            msg = "length_penalty needs use_beam_search: set it to true"
            raise unsupported(msg, "length_penalty")
        return None
    for name, neutral in _NOT_WITH_BEAMS.items():
        value = getattr(request, name, None)
        if is_set(value) and value not in neutral:
            msg = f"{name} is not possible with use_beam_search: omit it"
            raise unsupported(msg, name)
    field = "n" if best_of is None else "best_of"
    width = n if best_of is None else best_of
    if not isinstance(width, int) or not n <= width <= MOST_BEAMS:
        least = "" if best_of is None else f" n ({n}) or more, and"
        range_ = f"{least} at most {MOST_BEAMS}"
        msg = f"{field} must be{range_} with use_beam_search, got {brief(width)}"
        raise InvalidRequest(msg, param=field)
    return BeamRules(width, 1.0 if penalty is None else penalty)
