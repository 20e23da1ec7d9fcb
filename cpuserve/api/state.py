"""ServerState, which all endpoints share: the models, limits, and whether the server stops."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpuserve.api.request.body_budget import BodyBudget
from cpuserve.api.stored.store import Store
from cpuserve.errors import NotFound, ServiceUnavailable
from cpuserve.metrics.http import HttpMetrics

if TYPE_CHECKING:
    from fastapi import Request

    from cpuserve.api.batches.service import BatchService
    from cpuserve.api.ollama.created.store import CreatedModels
    from cpuserve.api.status.cpu_view import CpuView
    from cpuserve.config.engine import EngineConfig
    from cpuserve.serving.context import ModelContext
    from cpuserve.serving.limits import ClientLimits
    from cpuserve.serving.registry import ModelRegistry


@dataclass(slots=True)
class ServerState:
    """The served models and the state of the HTTP server.

    `draining`: the server will stop, and load balancers should send it no new requests, but it
      still serves them.
    `stopping`: it serves no requests any more.
    `config`: the settings of the first model's engines.
    stored: the responses and conversations that clients store.
    batches: the batches of clients; None = the server keeps no files.
    created: the models that clients create; None = the server keeps none.
    """

    models: ModelRegistry
    cpu: CpuView | None = None
    config: EngineConfig | None = None
    draining: bool = False
    stopping: bool = False
    http: HttpMetrics = field(default_factory=HttpMetrics)
    stored: Store = field(default_factory=Store)
    batches: BatchService | None = None
    created: CreatedModels | None = None
    bodies: BodyBudget = field(init=False)

    def __post_init__(self) -> None:
        self.bodies = BodyBudget(self.limits.max_held_bytes)

    @property
    def context(self) -> ModelContext:
        """The first model, which is always loaded; /health reports the health of this model."""
        return self.models.first

    @property
    def limits(self) -> ClientLimits:
        """The limits on what clients may use."""
        return self.context.limits

    def unavailable(self) -> str | None:
        """Return why requests cannot be answered now, or None if they can."""
        return "The server is shutting down" if self.stopping else self.context.unavailable()

    def unhealthy(self) -> tuple[str, str] | None:
        """Return (status, reason) if load balancers should send no requests here, else None."""
        context, reason = self.context, self.unavailable()
        if self.draining or self.stopping:
            return "draining", reason or "The server is shutting down: send requests elsewhere"
        if reason is None:
            return None
        if context.failed is not None or context.client.ended:
            return "failed", reason
        return "restarting" if context.ready else "loading", reason

    def check_open(self) -> None:
        """Raise ServiceUnavailable (503) if no model can serve requests now.

        With several models, the others still serve requests while the first one restarts.
        """
        first = self.context
        if self.stopping or not self.models.several or not first.ready or first.failed is not None:
            self.check_available()

    def check_available(self) -> None:
        """Raise ServiceUnavailable (503) with the reason if the first model cannot serve now."""
        reason = self.unavailable()
        if reason is not None:
            raise ServiceUnavailable(reason)


def get_state(request: Request) -> ServerState:
    """Return the ServerState of the app that received the request."""
    state: ServerState = request.app.state.server
    return state


def created_models(state: ServerState) -> CreatedModels:
    """Return the created models of the server; NotFound if it keeps none."""
    if state.created is None:
        msg = (
            "This server keeps no models of clients: models are served from the start, see "
            "--models, or start it with --models-dir DIR"
        )
        raise NotFound(msg, code="models_disabled")
    return state.created
