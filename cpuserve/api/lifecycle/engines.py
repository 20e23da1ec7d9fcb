"""Start the engine processes of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cpuserve.config.engine import Resolved
    from cpuserve.engine.ipc import StageProgress
    from cpuserve.engine.launch import SpareProcess
    from cpuserve.engine.replicas import ReplicaClient


def start_engines(
    resolved: Resolved,
    on_progress: Callable[[StageProgress], None],
    *,
    restart: bool = True,
    spare: SpareProcess | None = None,
) -> ReplicaClient:
    """Start all engine processes of a model, and return without waiting for them.

    restart: whether an engine that dies is restarted.
    spare: may have a started, idle process that the next engine can use.
    """
    from cpuserve.engine.replicas import ReplicaClient, RestartPolicy

    policy = RestartPolicy(enabled=restart)
    return ReplicaClient.spawn(
        resolved.replicas, on_progress=on_progress, policy=policy, spare=spare
    )
