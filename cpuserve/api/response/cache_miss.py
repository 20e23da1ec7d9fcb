"""Explain cache misses in any dialect: a header says where a prompt differs from an earlier one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from cpuserve.serving.generate import Generation


class FirstDifference(msgspec.Struct):
    """The position of the first token that differs, and the texts from there on.

    The two APIs with cache diagnostics (Messages and Responses) do not have this member.

    before: the text of the earlier prompt.
    now: the text of this prompt.
    """

    token: int
    before: str | None
    now: str


CACHE_MISS = "x-cache-miss"


def cache_headers(generation: Generation) -> dict[str, str]:
    """Return the header that says why tokens of an earlier prompt are computed again, or {}."""
    miss = generation.cache_miss()
    # A header may have no DEL, the only character of ASCII that JSON does not escape.
    return {} if miss is None else {CACHE_MISS: json.dumps(miss).replace("\x7f", "\\u007f")}
