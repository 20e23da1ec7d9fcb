"""Drafters for tests of the scheduler."""

from __future__ import annotations

from cpuserve.core.speculation.drafter import Drafter
from cpuserve.core.speculation.ngram import in_python
from cpuserve.core.speculation.ngram_drafts import NgramDrafts
from cpuserve.core.speculation.ngram_proposer import NgramProposer


def make_drafter(kv, num_tokens, least, most, *, most_tokens=10_000, clock=None, others=()):
    """A drafter with indexes in Python."""
    source = NgramDrafts(in_python(least, most), most_tokens)
    return Drafter(kv, num_tokens, [NgramProposer(source), *others], clock)
