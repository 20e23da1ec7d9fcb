"""Suggestions for options, values and architectures with a spelling error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping

# A name with one letter missing, doubled, changed or swapped has a similarity above CLOSE.
# Different options that share words are below it (measured on all flags of cpuserve and vLLM).
CLOSE = 0.75


def nearest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return "; did you mean {prefix}X?" for the most similar name X; "" if none is similar."""
    # The leading dashes would make any two flags look similar, so they are removed.
    names = {other.lstrip("-"): other for other in known}
    near = difflib.get_close_matches(name.lstrip("-"), names, n=1, cutoff=CLOSE)
    return f"; did you mean {prefix}{names[near[0]]}?" if near else ""


def nearest_and_all(name: str, known: Mapping[str, str], command: str) -> str:
    """Return the end of an error which says that `name` is not supported.

    This text has similar names, and the `command` that lists all supported names.
    known: maps the spelling of a supported name to compare with `name` ("llama") to the spelling
      that the error shows ("LlamaForCausalLM").
    """
    near = [known[other] for other in difflib.get_close_matches(name, known, cutoff=CLOSE)]
    said = f"the nearest are {', '.join(near)}, and " if near else ""
    return f"{said}`{command}` lists the {len(known)} that are"
