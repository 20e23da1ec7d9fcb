"""A Ray Serve application: `serve run cpuserve.integrations.ray_serve:app model=DIR`.

Each Ray replica runs an engine process on its own cores, and serves the whole HTTP API.
This module needs the extra `ray`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray import serve

from cpuserve.base.errors import ConfigError, EngineDead
from cpuserve.base.log import configure
from cpuserve.config.load import from_arguments
from cpuserve.engine.ipc import StageProgress
from cpuserve.integrations.cores import claim_cores

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

MAX_ONGOING_REQUESTS = 256
TARGET_ONGOING_REQUESTS = 8
GRACEFUL_SHUTDOWN_S = 30.0
HEALTH_PERIOD_S = 2.0
MAY_BE_0 = ("min_replicas", "upscale_delay_s", "downscale_delay_s")


@dataclass(frozen=True, slots=True)
class Scaling:
    """The options of Ray Serve: CPUs, and how the number of replicas follows the load.

    num_cpus: logical CPUs of a replica, which has its own cores.
    num_replicas: a fixed number of replicas. None: between min_replicas and max_replicas,
      so that each has target_ongoing_requests requests on average over look_back_period_s;
      the number grows after upscale_delay_s and shrinks after downscale_delay_s.
    max_ongoing_requests: the maximum number of requests in a replica; further ones wait outside it.
    """

    num_cpus: int = 1
    num_replicas: int | None = None
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float = TARGET_ONGOING_REQUESTS
    max_ongoing_requests: int = MAX_ONGOING_REQUESTS
    look_back_period_s: float = 30.0
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0

    def deployment(self) -> dict[str, Any]:
        """Return the options of serve.deployment."""
        options: dict[str, Any] = {
            "name": "cpuserve",
            "max_ongoing_requests": self.max_ongoing_requests,
            "ray_actor_options": {"num_cpus": self.num_cpus},
            "graceful_shutdown_timeout_s": GRACEFUL_SHUTDOWN_S,
            "health_check_period_s": HEALTH_PERIOD_S,
        }
        if self.num_replicas is not None:
            return {**options, "num_replicas": self.num_replicas}
        scaling = {
            "min_replicas": self.min_replicas,
            "max_replicas": max(self.min_replicas, self.max_replicas),
            "target_ongoing_requests": self.target_ongoing_requests,
            "look_back_period_s": self.look_back_period_s,
            "upscale_delay_s": self.upscale_delay_s,
            "downscale_delay_s": self.downscale_delay_s,
        }
        return {**options, "autoscaling_config": scaling}


def app(args: Mapping[str, Any]) -> serve.Application:
    """Return the application for `serve run`, `serve deploy` and serve.run.

    args: fields of Scaling, and options of cpuserve with the names of its flags (model,
    max_model_len, kv_cache_memory, ...); texts are parsed as on the command line.

    Raises:
        ConfigError: a name is unknown or a value has the wrong type.
    """
    scaling, options = _split(args)
    from_arguments(options)  # report a wrong name here, not in every replica
    deployment = serve.deployment(**scaling.deployment())(serve.ingress(_Forward())(RayReplica))
    bound: serve.Application = deployment.bind(options, scaling.num_cpus)
    return bound


def _split(args: Mapping[str, Any]) -> tuple[Scaling, dict[str, Any]]:
    own = Scaling.__dataclass_fields__
    given: dict[str, Any] = {}
    for name, value in args.items():
        if name in own:
            given[name] = _number(name, value)
    return Scaling(**given), {name: value for name, value in args.items() if name not in own}


def _number(name: str, value: object) -> float | int:
    fraction = name == "target_ongoing_requests" or name.endswith("_s")
    least = "0 or more" if name in MAY_BE_0 else "above 0"
    try:
        number = float(str(value)) if fraction else int(str(value))
    except ValueError:
        number = math.nan
    if not (0 < number < math.inf or (number == 0 and name in MAY_BE_0)):
        msg = f"{name}={value}: give a {'' if fraction else 'whole '}number {least}"
        raise ConfigError(msg)
    return number


class RayReplica:
    """One replica: claims cores, starts the engine on them, and serves HTTP."""

    async def __init__(self, options: Mapping[str, Any], num_cpus: int) -> None:  # type: ignore[misc]
        from cpuserve.api.lifecycle.engines import start_engines
        from cpuserve.api.lifecycle.front_end import FrontEnd
        from cpuserve.api.lifecycle.model_details import details_of
        from cpuserve.config.server import ServerOptions
        from cpuserve.platforms import select
        from cpuserve.prepare import prepare

        configure("info")
        asked = from_arguments(options)
        platform, _ = select(asked.options.platform)
        self._claim = claim_cores(num_cpus, platform.host())
        # The settings are resolved for these CPUs, and the engine inherits the CPU mask.
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, self._claim.cpus)
        prepared = prepare(asked)
        # Ray replaces a replica without a living engine, and sends requests to others meanwhile.
        restart = bool(prepared.resolved.others)
        self._client = start_engines(prepared.resolved, _ignore, restart=restart)
        server = ServerOptions(allowed_hosts=("*",))  # requests come through Ray's proxy
        try:
            front_end = FrontEnd(
                self._client,
                prepared.resolved.replicas,
                server,
                "",
                prepared.platform,
                details=details_of(prepared),
            )
            self._client.on_step = front_end.on_step
            await front_end.load()
        except BaseException:
            self._client.kill()
            raise
        self.asgi = front_end.app

    async def check_health(self) -> None:
        """Raise if the engine has died; Ray then replaces this replica."""
        if self._client.ended:
            msg = "the engine has died"
            raise EngineDead(msg)

    def __del__(self) -> None:
        if hasattr(self, "_client"):
            self._client.kill()
        if hasattr(self, "_claim"):
            self._claim.release()


def _ignore(report: StageProgress) -> None:
    """Ignore progress: nothing shows it."""


class _Forward:
    """The ASGI application that Ray calls. It forwards all calls to the replica of this process.

    The application is an object, because Ray calls a function to create an application.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        await serve.get_replica_context().servable_object.asgi(scope, receive, send)


async def _live(receive: Receive, send: Send) -> None:
    """Confirm lifespan events; the replica itself starts and stops the server."""
    while (await receive())["type"] != "lifespan.shutdown":
        await send({"type": "lifespan.startup.complete"})
    await send({"type": "lifespan.shutdown.complete"})
