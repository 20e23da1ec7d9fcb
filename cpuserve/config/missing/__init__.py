"""Flags and variables of other servers that cpuserve does not have, and what to do instead.

A flag is refused with this advice, and a variable is ignored with a note at the start.
"""

from __future__ import annotations

from cpuserve.config.missing import llama_cpp, ollama, vllm
from cpuserve.config.missing.record import Missing

MISSING: tuple[Missing, ...] = (*vllm.MISSING, *llama_cpp.MISSING, *ollama.MISSING)
UNREAD: tuple[Missing, ...] = (*llama_cpp.UNREAD, *ollama.UNREAD)

_WHY = {name.lstrip("-"): missing.why for missing in MISSING for name in missing.names}
_WHY_UNREAD = {name: missing.why for missing in UNREAD for name in missing.names}


def why_missing(name: str) -> str | None:
    """Return why an option of another server is refused; None if `name` is not such an option.

    name: a flag, or a key of a config file.
    """
    key = name.lstrip("-").replace("_", "-")
    return _WHY.get(key) or _WHY.get(key.removeprefix("no-"))


def why_unread(variable: str) -> str | None:
    """Return what to set instead of a variable of another server; None for other variables."""
    return _WHY_UNREAD.get(variable)


__all__ = ["MISSING", "UNREAD", "Missing", "why_missing", "why_unread"]
