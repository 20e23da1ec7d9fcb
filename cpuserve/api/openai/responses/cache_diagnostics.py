"""The `prompt_cache_diagnostics` of a Response: where its prompt differs from an earlier prompt.

A request sets the id of an earlier response in `prompt_cache_options.comparison_response_id`
(https://developers.openai.com/api/docs/guides/prompt-caching/diagnostics).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.response.cache_miss import FirstDifference

if TYPE_CHECKING:
    from cpuserve.serving.generation.generate import Generation

# The reasons in the OpenAI API by PromptDifference.reason; all others become "input_changed".
_REASONS = {
    "model_changed": "model_changed",
    "tools_changed": "tools_changed",
    "settings_changed": "reasoning_effort_changed",
}


class CacheOptions(msgspec.Struct):
    """The `prompt_cache_options` of a request. `mode` and `ttl` have no effect."""

    comparison_response_id: str | None = None
    mode: str | None = None
    ttl: str | None = None
    prewarm: bool | None = None


class CacheDiagnostics(msgspec.Struct):
    """The result of a comparison; type: cache_hit, cache_miss or comparison_response_not_found.

    cache_missed_tokens: the number of tokens of the earlier prompt
      from the first difference to its end.
    comparison_reusable_tokens: the number of all tokens of the earlier prompt.
    """

    type: str
    reason: str | msgspec.UnsetType = msgspec.UNSET
    cache_missed_tokens: int | msgspec.UnsetType = msgspec.UNSET
    comparison_reusable_tokens: int | msgspec.UnsetType = msgspec.UNSET
    first_difference: FirstDifference | msgspec.UnsetType = msgspec.UNSET


def cache_diagnostics(
    options: CacheOptions | None, generation: Generation
) -> CacheDiagnostics | msgspec.UnsetType:
    """Return the member `prompt_cache_diagnostics`; UNSET if the request does not ask for it."""
    named = None if options is None else options.comparison_response_id
    if named is None:
        return msgspec.UNSET
    earlier = generation.earlier(named)
    if earlier is None:
        return CacheDiagnostics("comparison_response_not_found")
    found = generation.difference_from(earlier)
    if found is None:
        return CacheDiagnostics("cache_hit")
    reason = _REASONS.get(found.reason, "input_changed")
    shown = FirstDifference(found.token, found.before, found.now)
    return CacheDiagnostics("cache_miss", reason, found.missed, found.total, shown)
