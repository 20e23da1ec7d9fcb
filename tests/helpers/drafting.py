"""Drafters for tests of the scheduler."""

from __future__ import annotations

from cpuserve.core.speculation.drafter import Drafter
from cpuserve.core.speculation.ngram import in_python
from cpuserve.core.speculation.ngram_drafts import NgramDrafts


def make_drafter(kv, num_tokens, least, most, *, most_tokens=10_000, clock=None):
    """A drafter with indexes in Python."""
    return Drafter(kv, num_tokens, NgramDrafts(in_python(least, most), most_tokens), clock)
