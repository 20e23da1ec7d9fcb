"""Says how long measurements of engine steps will take, from the rates seen so far."""

from __future__ import annotations


class Forecast:
    """Predicts the seconds of prompts and of decode steps.

    The first prompt is short, so the first prediction for long prompts is usually too long.
    """

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0

    def saw_prompt(self, tokens: int, seconds: float) -> None:
        """Record that a prompt, or several at a time, took `seconds`. Long ones count more."""
        if tokens >= self._tokens:
            self._tokens, self._seconds = tokens, seconds

    def prompt(self, tokens: int) -> float:
        """Return the expected seconds of prompts with `tokens` tokens together."""
        return self._seconds * tokens / self._tokens if self._tokens else 0.0


def told_seconds(seconds: float) -> str:
    """Return an expected time as text, such as "about 40 s" or "about 3 minutes"."""
    if seconds < 1.5:
        return "about a second"
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} minutes"
