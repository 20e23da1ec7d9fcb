"""ServerState, which all routes share: the models, their limits, and the shutdown state."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cpuserve.api.callers.known_callers import KnownCallers
from cpuserve.api.request.body_budget import BodyBudget
from cpuserve.api.request.sealed import Seal
from cpuserve.api.stored.store import Store
from cpuserve.base.errors import NotServing
from cpuserve.engine.grammars.messages import MODULE as GRAMMARS_MODULE
from cpuserve.engine.launch import CHILD_MODULE
from cpuserve.media.decoding.client import MODULE as MEDIA_MODULE
from cpuserve.media.kinds import KINDS
from cpuserve.metrics.http import HttpMetrics
from cpuserve.metrics.processes import Processes
from cpuserve.tokenizer.limited.client import MODULE as TOKENIZERS_MODULE
from cpuserve.tokenizer.rendering.client import MODULE as RENDERING_MODULE

if TYPE_CHECKING:
    from fastapi import Request

    from cpuserve.config.engine import EngineConfig
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.models.limits import ClientLimits
    from cpuserve.serving.models.registry import ModelRegistry

# The role of a process in metrics by the module that its command runs.
_ROLES = {
    CHILD_MODULE: "engine",
    GRAMMARS_MODULE: "grammars",
    RENDERING_MODULE: "templates",
    MEDIA_MODULE: f"{KINDS['image'].noun}s",
    TOKENIZERS_MODULE: "tokenizers",
}
DAMAGED = (
    "The model's weights are damaged: none of the last steps computed a finite number. "
    "Check the files of the model, or download them again, then start the server again"
)


@dataclass(slots=True)
class ServerState:
    """The served models and the state of the HTTP server.

    draining: whether the server will stop soon:
      load balancers should send no new requests, but the server still serves them.
    stopping: whether the server no longer serves any requests.
    config: the settings of the first model's engines.
    stored: the responses and conversations that clients have stored.
    background: the tasks of responses that run without a client.
    callers: the API keys, and the limits of their callers.
    seal: seals and opens the thoughts that clients send back as opaque texts.
    cpu: the CpuView of /v1/cpu; None = there is none.
    certificate: the certificate of TLS; None = the server speaks plain HTTP.
    batches: the BatchService (batches/start.py); None = the server has no --files-dir.
    created: the CreatedModels (ollama/created/store.py); None = the server has no --models-dir.
    records: the Records (http/records.py): the logs of requests; None = not chosen yet.
      Their types are Any here, because the folders of these five are above this one.
    """

    models: ModelRegistry
    cpu: Any = None
    config: EngineConfig | None = None
    draining: bool = False
    stopping: bool = False
    http: HttpMetrics = field(default_factory=HttpMetrics)
    processes: Processes = field(default_factory=lambda: Processes(_ROLES))
    stored: Store = field(default_factory=Store)
    callers: KnownCallers = field(default_factory=KnownCallers)
    seal: Seal = field(default_factory=Seal)
    certificate: Any = None
    batches: Any = None
    created: Any = None
    records: Any = None
    background: set[asyncio.Task[None]] = field(default_factory=set)
    bodies: BodyBudget = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = BodyBudget(self.limits.max_held_bytes)

    @property
    def context(self) -> ModelContext:
        """The first model of the command line; /health reports the health of this model."""
        return self.models.first

    @property
    def limits(self) -> ClientLimits:
        """The limits on requests of clients."""
        return self.context.limits

    async def end_background(self) -> None:
        """Cancel the responses that run without a client, and return when all have ended."""
        tasks = list(self.background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # what ends with a task runs in the next turn of the event loop

    def unavailable(self) -> str | None:
        """Return why the server cannot serve requests now; None = it can."""
        return "The server is shutting down" if self.stopping else self.context.unavailable()

    def unhealthy(self) -> tuple[str, str] | None:
        """Return (status, reason) if load balancers should send no requests here, else None."""
        context, reason = self.context, self.unavailable()
        if self.draining or self.stopping:
            return "draining", reason or "The server is shutting down: send requests elsewhere"
        if reason is None and self.records is not None:
            reason = self.records.unhealthy()
            if reason is not None:
                return "failed", reason
        if reason is None:
            reason = DAMAGED if context.client.stats.damaged else self.models.trouble
            return None if reason is None else ("failed", reason)
        if context.failed is not None or context.client.ended:
            return "failed", reason
        return "restarting" if context.ready else "loading", reason

    def check_open(self) -> None:
        """Raise NotServing (503) if no model can serve requests now.

        If the server has several models, the others serve requests while the first model restarts.
        """
        first = self.context
        if self.stopping or not self.models.several or not first.ready or first.failed is not None:
            self.check_available()

    def check_available(self) -> None:
        """Raise NotServing (503) with the reason if the first model cannot serve now."""
        reason = self.unavailable()
        if reason is not None:
            raise NotServing(reason)


def get_state(request: Request) -> ServerState:
    """Return the ServerState of the app that handles the request."""
    state: ServerState = request.app.state.server
    return state
