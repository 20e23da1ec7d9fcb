"""A response header of all dialects: where a prompt differs from an earlier, cached prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.response.header_values import header_json

if TYPE_CHECKING:
    from cpuserve.serving.generation.generate import Generation


class FirstDifference(msgspec.Struct):
    """The position of the first different token, and the texts of both prompts from there on.

    This member is an extension: the APIs with cache diagnostics (Messages, Responses) lack it.

    before: the text of the earlier prompt from the first difference on.
    now: the text of this prompt from the first difference on.
    """

    token: int
    before: str | None
    now: str


CACHE_MISS = "x-cache-miss"


def cache_headers(generation: Generation) -> dict[str, str]:
    """Return a header that explains why cached tokens could not be reused; {} if none is needed."""
    miss = generation.cache_miss()
    return {} if miss is None else {CACHE_MISS: header_json(miss)}
