"""EngineClient: how the front end (and LLM) talks to an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from cpuserve.engine.ipc import Output, Stats
from cpuserve.sampling.params import SamplingParams


class EngineClient(Protocol):
    """ProcessClient serves; InlineClient runs the engine in this process (LLM, tests)."""

    @property
    def info(self) -> dict[str, object]:
        """What Ready carried; {} before."""

    @property
    def stats(self) -> Stats:
        """The engine's gauges and counters after its last step."""

    async def wait_ready(self) -> None:
        """Return when the engine serves; StartupError with its line if it cannot."""

    def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        timeout_s: float | None = None,
        progress: bool = False,
    ) -> AsyncGenerator[Output, None]:
        """One sequence. Closing the iterator aborts it; EngineDead if the engine ends.

        After timeout_s, waiting included, DeadlineExceeded. progress: also outputs without tokens,
        after each part of the prompt.
        """

    async def ask(self, what: str) -> dict[str, object]:
        """A report from the engine ("roofline", "report", "check")."""

    @property
    def alive(self) -> bool:
        """The engine is ready and has not died."""

    async def close(self) -> None:
        """Stop the engine and reap its process."""
