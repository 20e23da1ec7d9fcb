"""The members of a call that arguments of plugins of vLLM set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.sampling.extra_args import known_extras


def extra_values(extras: Mapping[str, Mapping[str, Any] | None]) -> dict[str, Any]:
    """Return the members of a call that arguments of plugins of vLLM set, by the field with them.

    Raises:
      InvalidRequest: an argument has the wrong type.
    """
    values: dict[str, Any] = {}
    ignored: list[str] = []
    for field, given in extras.items():
        known, others = known_extras(given or {})
        values |= known
        ignored += [f"{field}.{name}" for name in others]
    return {**values, "ignored": ignored} if ignored else values
