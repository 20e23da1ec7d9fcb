"""Response headers with the limits of a caller, as a dialect calls them.

This module imports no web framework, because the startup server uses dialects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from cpuserve.serving.callers.allowance import Allowance

_KINDS = ("requests", "tokens")
_FACTS = ("limit", "remaining", "reset")


def _duration(seconds: float) -> str:
    """Return a number of seconds as the headers of OpenAI show it, such as "1m5s"."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def _time_after(seconds: float) -> str:
    """Return the time after so many seconds as the headers of Anthropic show it (RFC 3339)."""
    when = datetime.now(timezone.utc) + timedelta(seconds=math.ceil(seconds))
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class LimitHeaders:
    """The headers of a dialect.

    name: the pattern of a name, with the kind of the limit, and a fact about the limit.
    reset: how the headers show after how many seconds all of a limit is left again.
    """

    name: str
    reset: Callable[[float], str]

    def all(self) -> list[str]:
        """Return all headers that `of` may return."""
        return [self.name.format(kind=kind, fact=fact) for kind in _KINDS for fact in _FACTS]

    def of(self, allowance: Allowance | None) -> list[tuple[bytes, bytes]]:
        """Return the headers about the limits of requests and tokens a minute; [] for none."""
        if allowance is None:
            return []
        found = []
        for kind, limit in allowance.minute_limits().items():
            values = str(limit.limit), str(limit.left), self.reset(limit.reset_s)
            for fact, value in zip(_FACTS, values, strict=True):
                found.append((self.name.format(kind=kind, fact=fact).encode(), value.encode()))
        return found


OPENAI_LIMITS = LimitHeaders("x-ratelimit-{fact}-{kind}", _duration)
ANTHROPIC_LIMITS = LimitHeaders("anthropic-ratelimit-{kind}-{fact}", _time_after)
