"""The `diagnostics` of messages: why the prefix cache has less of the prompt than expected.

A request has the id of an earlier response, and the response reports where its prompt differs from
the earlier one (https://platform.claude.com/docs/en/build-with-claude/cache-diagnostics).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.response.cache_miss import FirstDifference
from cpuserve.base.errors import InvalidRequest, brief

if TYPE_CHECKING:
    from cpuserve.serving.generation.generate import Generation
    from cpuserve.serving.models.recent_prompts import PromptDifference


class CacheMissReason(msgspec.Struct):
    """The first difference between this prompt and the prompt of the earlier response.

    cache_missed_input_tokens: the number of tokens of the earlier prompt
      from the difference to its end.
    """

    type: str
    cache_missed_input_tokens: int | msgspec.UnsetType = msgspec.UNSET
    first_difference: FirstDifference | msgspec.UnsetType = msgspec.UNSET


class Diagnostics(msgspec.Struct):
    """The result of comparing the prompt with an earlier prompt."""

    cache_miss_reason: CacheMissReason


def check_diagnostics(fields: dict[str, Any] | None) -> None:
    """Raise InvalidRequest if the request's `diagnostics` is invalid."""
    named = (fields or {}).get("previous_message_id")
    if named is not None and not isinstance(named, str):
        msg = f"diagnostics.previous_message_id must be the id of a message, got {brief(named)!r}"
        raise InvalidRequest(msg, param="diagnostics")


def diagnostics_of(
    fields: dict[str, Any] | None, generation: Generation
) -> Diagnostics | None | msgspec.UnsetType:
    """Return the member `diagnostics`: UNSET if not requested.

    None = the request refers to no earlier message, or its prompt begins with the earlier prompt.
    """
    if fields is None:
        return msgspec.UNSET
    named = fields.get("previous_message_id")
    if named is None:
        return None
    earlier = generation.earlier(named)
    if earlier is None:
        return Diagnostics(CacheMissReason("previous_message_not_found"))
    found = generation.difference_from(earlier)
    return None if found is None else Diagnostics(_reason(found))


def _reason(found: PromptDifference) -> CacheMissReason:
    # The Anthropic API has reasons for changes of model, tools, system text and messages.
    # Any other change is reported as "unavailable", without a number of tokens.
    kind = "unavailable" if found.reason == "settings_changed" else found.reason
    missed = msgspec.UNSET if kind == "unavailable" else found.missed
    return CacheMissReason(kind, missed, FirstDifference(found.token, found.before, found.now))
