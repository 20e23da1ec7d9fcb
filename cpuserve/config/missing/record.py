"""The record of flags or variables that cpuserve does not have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Missing:
    """Names of another server, without counterpart. why: the reason, and an alternative if any."""

    names: tuple[str, ...]
    why: str
