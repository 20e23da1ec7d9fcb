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
    """Start all engine processes and return at once.

    restart: restart an engine that dies.
    spare: has maybe a process that the next engine can use.
    """
    from cpuserve.engine.replicas import ReplicaClient, RestartPolicy

    policy = RestartPolicy(enabled=restart)
    return ReplicaClient.spawn(
        resolved.replicas, on_progress=on_progress, policy=policy, spare=spare
    )
