"""EngineClient: the interface of the front end and LLM to an engine in any process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cpuserve.engine.ipc import AddRequest, Output, Stats

PayloadOf = Callable[[int], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """The state of one engine: whether it serves, the number of restarts, and its statistics.

    hung: whether it has work, but does not respond.
    """

    serves: bool
    restarts: int
    stats: Stats
    hung: bool = False


class EngineClient(Protocol):
    """The methods of an engine that the front end and `LLM` call.

    Implementations: ReplicaClient (`serve`) has one or several ProcessClients, which run an engine
    in a child process; InlineClient (LLM, tests) runs the engine in this process.
    """

    @property
    def info(self) -> dict[str, object]:
        """The content of the Ready message; {} before it arrived."""

    @property
    def stats(self) -> Stats:
        """The engine's gauges and counters after its last step."""

    async def wait_ready(self) -> None:
        """Wait until the engine is ready; raise its StartupError if it cannot start."""

    def generate(
        self,
        request: AddRequest,
        *,
        timeout_s: float | None = None,
        payload_of: PayloadOf | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Generate one sequence; closing the iterator aborts it.

        timeout_s: the longest time that it may take, in seconds; None = no limit.
        payload_of: returns the payload of the item with this index, if the item has none.
          An engine asks for it only if the rows of the item are not in a cache,
          and perhaps again after a preemption. Its RequestError ends the request.

        Raises:
          EngineDead: the engine has ended.
          DeadlineExceeded: the request took more than timeout_s, including time in the queue.
        """

    async def ask(self, what: str, **details: Any) -> dict[str, object]:
        """Return the report `what` ("roofline", "report" or "check"), or change the engine.

        "reset_prefix_cache" removes all cached prefixes and returns {}.
        "load_adapter" (details: name, path, in_place) and "unload_adapter" (name) return {}.
        If they fail, the adapters stay as they were,
        and the result has "error" (a text) and "fault" (whether the adapter is the cause),
        and "again" if this system refused its file and the same change may succeed later.
        """

    @property
    def alive(self) -> bool:
        """Whether the engine is ready and has not died."""

    @property
    def ended(self) -> bool:
        """Whether the engine has died or was closed, and will not be restarted."""

    @property
    def trouble(self) -> str:
        """Why no request can run now, if the engine is not `alive`."""

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        """The status of each engine process that this client may restart; empty if it has none."""

    async def close(self) -> None:
        """Stop the engine, and reap its process if it has one."""
