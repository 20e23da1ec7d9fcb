"""EngineClient: how the front end (and LLM) talks to an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cpuserve.engine.ipc import Output, Stats
from cpuserve.sampling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One of several engines: whether it serves, how often it was started again, its figures."""

    serves: bool
    restarts: int
    stats: Stats


class EngineClient(Protocol):
    """ProcessClient serves, ReplicaClient over several of them; InlineClient runs the engine in
    this process (LLM, tests)."""

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

    @property
    def ended(self) -> bool:
        """The engine has died or was closed, and nobody will start it again."""

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        """The engines behind this one, where there are several."""

    async def close(self) -> None:
        """Stop the engine and reap its process."""
