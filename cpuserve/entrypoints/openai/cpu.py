"""GET /v1/cpu: the machine, who sits where, and what the engine gets out of it right now."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.entrypoints.openai.endpoint import get_serving
from cpuserve.entrypoints.openai.schema import json_answer
from cpuserve.errors import NotFound
from cpuserve.ids import CpuId
from cpuserve.metrics import CpuSample
from cpuserve.platforms.cgroup import own_cgroup
from cpuserve.platforms.placement import Placement, Rank
from cpuserve.platforms.report import (
    MachineReport,
    PlacementReport,
    describe,
    describe_placement,
)

if TYPE_CHECKING:
    from cpuserve.config.engine import EngineConfig
    from cpuserve.engine.ipc import Stats
    from cpuserve.platforms import Platform

router = APIRouter()

WINDOW_S = 10.0
SAMPLE_S = 0.25


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a rank's weights and of its keys and values, by the NUMA node they are on now."""

    weights: dict[str, int]
    kv: dict[str, int]


class LiveReport(msgspec.Struct, frozen=True, kw_only=True):
    """The last ten seconds; rates are null where no step ran, or nothing is known.

    busy: share of the time that steps took. bandwidth_bytes_per_s: packed weights read while they
    ran; roofline_bytes_per_s: what the probe read at the start; fraction_of_roofline: one by the
    other (low while prompts run, which are bound by arithmetic). Of several engines these are the
    figures of one: the mean, and for the roofline the first. threads_on: the CPU each thread
    was last seen on, -1 = not yet; misplaced: "" or who is not where it was bound. numa_binding:
    "bind", "first_touch" (the system refuses to bind, or ranks span nodes), "interleave" or "none"
    (one rank); ranks: where the memory of each is, empty where the kernel does not tell.
    throttled_*: of the control group since it exists, null without a quota.
    """

    busy: float
    bandwidth_bytes_per_s: float | None
    roofline_bytes_per_s: float | None
    fraction_of_roofline: float | None
    threads_on: tuple[int, ...]
    misplaced: str
    numa_binding: str
    ranks: tuple[RankMemory, ...]
    throttled_periods: int | None
    throttled_s: float | None


class CpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """What GET /v1/cpu answers."""

    object: str
    platform: str
    isa: str
    machine: MachineReport
    placement: PlacementReport
    live: LiveReport


class CpuMeter:
    """Follows the engine's counters; every method is called on the event loop's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, engines: int = 1) -> None:
        self._clock = clock
        self._engines = engines
        # (time, seconds in steps, bytes read) at most every SAMPLE_S
        self._samples: deque[tuple[float, float, float]] = deque([(clock(), 0.0, 0.0)])
        self._last = (0.0, 0.0)

    def on_step(self, stats: Stats) -> None:
        """A step ended."""
        now = self._clock()
        self._last = stats.busy_s, stats.weight_bytes
        if now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, *self._last))
            self._forget(now)

    def rates(self) -> tuple[float, float | None]:
        """(share of the window that steps took, bytes a second while they ran)."""
        now = self._clock()
        self._forget(now)
        began, busy, read = self._samples[0]
        spent = self._last[0] - busy
        idle = len(self._samples) == 1 and began <= now - WINDOW_S
        if idle or spent <= 0 or now <= began:
            return 0.0, None
        could = self._engines * min(now - began, WINDOW_S)
        return min(1.0, spent / could), (self._last[1] - read) / spent

    def _forget(self, now: float) -> None:
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()


class CpuView:
    """Answers for /v1/cpu and the CPU series of /metrics, of one platform and its engines."""

    def __init__(self, platform: Platform, configs: Sequence[EngineConfig]) -> None:
        self._platform = platform
        self._configs = configs
        self.meter = CpuMeter(engines=len(configs))

    def sample(self, stats: Stats, engine: Mapping[str, Any]) -> CpuSample:
        """What /metrics shows, given what the engine said at its start; reads a few small files."""
        group = own_cgroup()
        return CpuSample(
            threads=sum(config.threads for config in self._configs),
            busy_s=stats.busy_s,
            weight_bytes=stats.weight_bytes,
            roofline_bytes_per_s=stats.roofline_bytes_per_s,
            throttled_periods=group.throttled_periods,
            throttled_s=group.throttled_s,
            quota=group.cpu_quota,
            numa_binding=binding_mode(engine),
        )

    def report(self, engine: Mapping[str, Any], busy: float, bandwidth: float | None) -> CpuReport:
        """The answer, given what the engine says of itself and the meter's rates.

        Reads the machine anew, which takes milliseconds: not for the event loop.
        """
        host = self._platform.host()
        config = self._configs[0]
        roofline = float(engine.get("roofline_bytes_per_s") or 0) or None
        return CpuReport(
            object="cpu",
            platform=config.platform,
            isa=config.isa,
            machine=describe(host, self._platform.capabilities(host)),
            placement=describe_placement(host, placement_of(self._configs)),
            live=LiveReport(
                busy=busy,
                bandwidth_bytes_per_s=bandwidth,
                roofline_bytes_per_s=roofline,
                fraction_of_roofline=bandwidth / roofline if bandwidth and roofline else None,
                threads_on=tuple(engine.get("placement") or ()),
                misplaced=str(engine.get("misplaced") or ""),
                numa_binding=binding_mode(engine),
                ranks=tuple(_rank_memory(engine)),
                throttled_periods=host.cgroup.throttled_periods,
                throttled_s=host.cgroup.throttled_s,
            ),
        )


def binding_mode(engine: Mapping[str, Any]) -> str:
    """How weights and KV cache came to the nodes of their ranks, as the engine says."""
    return str((engine.get("numa_binding") or {}).get("mode", "none"))


def _rank_memory(engine: Mapping[str, Any]) -> Iterator[RankMemory]:
    nodes = engine.get("memory_nodes") or {"weights": (), "kv": ()}
    for weights, kv in zip(nodes["weights"], nodes["kv"], strict=True):
        if weights or kv:
            texts = ({str(node): size for node, size in on.items()} for on in (weights, kv))
            yield RankMemory(weights=next(texts), kv=next(texts))


def placement_of(configs: Sequence[EngineConfig]) -> Placement:
    """The placement that the configurations of all engines carry."""
    ranks = tuple(rank for config in configs for rank in _ranks(config))
    front_end = tuple(CpuId(cpu) for cpu in configs[0].frontend_cpus or ()) or None
    return Placement(ranks, front_end, configs[0].passive_waits)


def _ranks(config: EngineConfig) -> Iterator[Rank]:
    begin = 0
    for threads in config.rank_threads:
        cpus = None if config.cpus is None else config.cpus[begin : begin + threads]
        yield Rank(threads, None if cpus is None else tuple(map(CpuId, cpus)), ())
        begin += threads


@router.get("/v1/cpu", openapi_extra=json_answer(CpuReport))
async def show_cpu(request: Request) -> Response:
    """The machine, the placement and the last ten seconds."""
    serving = get_serving(request)
    serving.check_available()
    if serving.cpu is None:
        msg = "this server has no CPU report"
        raise NotFound(msg)
    engine = await serving.client.ask("report")
    rates = serving.cpu.meter.rates()
    report = await asyncio.to_thread(serving.cpu.report, engine, *rates)
    return Response(msgspec.json.encode(report), media_type="application/json")
