"""Suggestions for misspelt options, values and architectures."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

# A name with one letter missing, doubled, changed or swapped is more similar than this; different
# options that have words in common are less similar (measured on all flags of cpuserve and vLLM).
CLOSE = 0.75


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "; did you mean {prefix}X?" for the most similar name, or "" if none is similar."""
    # The leading dashes would make any two flags look similar.
    names = {other.lstrip("-"): other for other in known}
    near = difflib.get_close_matches(name.lstrip("-"), names, n=1, cutoff=CLOSE)
    return f"; did you mean {prefix}{names[near[0]]}?" if near else ""


def nearest_and_all(name: str, known: Mapping[str, str], command: str) -> str:
    """Return the end of an error that `name` is not supported.

    It has the names that are similar, and the `command` that lists all supported names.
    known: for each supported name, the spelling that is compared with `name` ("llama") and the
      spelling that the error shows ("LlamaForCausalLM").
    """
    near = [known[other] for other in difflib.get_close_matches(name, known, cutoff=CLOSE)]
    said = f"the nearest are {', '.join(near)}, and " if near else ""
    return f"{said}`{command}` lists the {len(known)} that are"
