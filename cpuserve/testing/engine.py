"""ScriptedEngine: follows a script in place of a real engine, below the real front end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cpuserve.base.errors import EngineDead
from cpuserve.core.media import MediaItem
from cpuserve.engine.client import PayloadOf, ReplicaStatus
from cpuserve.engine.ipc import AddRequest, Output, Stats, TokenLogprob
from cpuserve.sampling.params import SamplingParams

# A step of a script: an output, a pause in seconds, an event to wait for, or an error to raise.
EngineStep = Output | float | asyncio.Event | Exception
# A script is called with the engine, the sequence number, the prompt and the sampling parameters.
EngineScript = Callable[["ScriptedEngine", int, list[int], SamplingParams], Iterable[EngineStep]]


def logprob_of(token: int, top: int) -> TokenLogprob:
    """Return a recognizable logprob: the token has rank 2, and the alternatives are 0, 1, 2, ..."""
    alternatives = [(i, -0.5 * (i + 1)) for i in range(top)]
    return TokenLogprob(token, -0.25 * (token % 8) - 0.125, 2, alternatives)


@dataclass
class ScriptedEngine:
    """An EngineClient that returns the outputs of `script`, and records the requests it gets.

    info: the content of the Ready message.
    asked: the prompt and the sampling parameters of each sequence.
    wishes: for each sequence, its timeout in seconds and whether it wants progress reports.
    media: the media items of each sequence.
    encoded: the payload of each item by its digest, which the engine asks for once.
    running: the number of sequences that are running now.
    aborted: the number of sequences that were closed before their last output.
    """

    script: EngineScript
    info: dict[str, Any] = field(default_factory=dict)
    stats: Stats = field(default_factory=Stats)
    alive: bool = True
    trouble: str = "the engine was killed by SIGKILL"
    replicas: tuple[ReplicaStatus, ...] = ()
    asked: list[tuple[list[int], SamplingParams]] = field(default_factory=list)
    wishes: list[tuple[float | None, bool]] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    continued: list[bool] = field(default_factory=list)
    media: list[list[MediaItem]] = field(default_factory=list)
    encoded: dict[bytes, bytes] = field(default_factory=dict)
    running: int = 0
    aborted: int = 0

    @property
    def ended(self) -> bool:
        """Whether the engine has been closed."""
        return not self.alive

    async def wait_ready(self) -> None:
        """Return immediately, because a scripted engine loads nothing."""

    async def generate(
        self,
        request: AddRequest,
        *,
        timeout_s: float | None = None,
        payload_of: PayloadOf | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Yield the outputs of the script for one sequence; raise the errors of the script."""
        prompt_ids, params = request.prompt_ids.tolist(), request.params
        self.wishes.append((timeout_s, request.progress))
        self.continued.append(request.continues)
        self.priorities.append(request.priority)
        number = len(self.asked)
        self.asked.append((prompt_ids, params))
        self.media.append(list(request.media))
        self.running += 1
        finished = False
        try:
            for index, item in enumerate(request.media):
                if item.digest not in self.encoded:
                    assert payload_of is not None, "nobody has the payload"
                    self.encoded[item.digest] = await payload_of(index)
            for step in self.script(self, number, prompt_ids, params):
                if isinstance(step, Exception):
                    finished = True
                    raise step
                if isinstance(step, Output):
                    finished = step.finish is not None
                    yield step
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    await asyncio.sleep(step)
            assert finished, "a script must finish"
        finally:
            self.running -= 1
            self.aborted += not finished

    def forget(self) -> None:
        """Clear the records of all requests so far."""
        for kept in (self.asked, self.wishes, self.priorities, self.continued, self.media):
            kept.clear()

    async def ask(self, what: str, **_: Any) -> dict[str, object]:
        """Return an empty report; EngineDead if the engine has been closed."""
        if not self.alive:
            msg = f"the engine was killed by SIGKILL, and cannot report {what!r}"
            raise EngineDead(msg)
        return {"ok": True}

    async def close(self) -> None:
        """Mark the engine as ended; later calls of `ask` raise EngineDead."""
        self.alive = False
