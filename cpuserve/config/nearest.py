"""Suggestions for misspelt options and values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# A name with one letter missing, doubled, changed or swapped is more similar than this; different
# options that have words in common are less similar (measured on all flags of cpuserve and vLLM).
CLOSE = 0.75


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "; did you mean {prefix}X?" for the most similar name, or "" if none is similar."""
    # The leading dashes would make any two flags look similar.
    names = {other.lstrip("-"): other for other in known}
    near = difflib.get_close_matches(name.lstrip("-"), names, n=1, cutoff=CLOSE)
    return f"; did you mean {prefix}{names[near[0]]}?" if near else ""
