"""The record of flags or variables that cpuserve does not have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Missing:
    """Options of another server that cpuserve lacks. why: the reason, and an alternative if any."""

    names: tuple[str, ...]
    why: str
