"""The machine, the thread placement, and utilization over the last ten seconds."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.base.ids import CpuId
from cpuserve.metrics.figures import CpuSample
from cpuserve.platforms.cgroup import own_cgroup
from cpuserve.platforms.limits import RateLimit
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

WINDOW_S = 10.0
SAMPLE_S = 0.25


class RankMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of a rank's weights and of its KV cache on each NUMA node now."""

    weights: dict[str, int]
    kv: dict[str, int]


class LiveReport(msgspec.Struct, frozen=True, kw_only=True):
    """Utilization over the last ten seconds; rates are null if unknown or if no step ran.

    With several engines, rates are means over the engines; only the first measures the roofline.

    busy: the share of time that engines spent in steps, from 0 to 1.
    bandwidth_bytes_per_s: bytes of packed weights read per second of steps.
    roofline_bytes_per_s: the memory bandwidth that the engine measured at its start.
    fraction_of_roofline: bandwidth divided by roofline.
      This fraction is low where arithmetic is the limit: during prefill, and with many requests.
    limits: the most tokens per second that 1, 4, 8 and 32 requests can decode together with this
      model, from the rates that the engine measured at its start; empty before the measurement.
    threads_on: the CPU on which each thread was last seen; -1 = not seen yet.
    misplaced: a text about threads that run outside of their CPUs; "" = no such threads.
    numa_binding: "bind", "first_touch" (the system refuses to bind memory, or ranks span nodes),
      "interleave" or "none" (there is one rank).
    ranks: the memory of each rank per NUMA node; empty if the kernel does not report it.
    throttled_*: counters since the control group was created; null = it has no CPU quota.
    """

    busy: float
    bandwidth_bytes_per_s: float | None
    roofline_bytes_per_s: float | None
    fraction_of_roofline: float | None
    limits: tuple[RateLimit, ...]
    threads_on: tuple[int, ...]
    misplaced: str
    numa_binding: str
    ranks: tuple[RankMemory, ...]
    throttled_periods: int | None
    throttled_s: float | None


class CpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """The response to GET /v1/cpu: the machine, the thread placement, and its utilization."""

    object: str
    platform: str
    isa: str
    machine: MachineReport
    placement: PlacementReport
    live: LiveReport


class CpuMeter:
    """Computes rates from the counters of engine steps; used on the event loop's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, engines: int = 1) -> None:
        self._clock = clock
        self._engines = engines
        # Samples of (time in s, seconds in steps, bytes read), at least SAMPLE_S seconds apart.
        self._samples: deque[tuple[float, float, float]] = deque([(clock(), 0.0, 0.0)])
        self._last = (0.0, 0.0)

    def on_step(self, stats: Stats) -> None:
        """Store the counters of the engine after a step."""
        now = self._clock()
        self._last = stats.busy_s, stats.weight_bytes
        if now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, *self._last))
            self._forget(now)

    def rates(self) -> tuple[float, float | None]:
        """Return (share of the window spent in steps, weight bytes read per second of steps).

        The second value is None if no step ran in the window.
        """
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
    """Makes the bodies of /v1/cpu and the CPU metrics of /metrics from the engines' reports."""

    def __init__(self, platform: Platform, configs: Sequence[EngineConfig]) -> None:
        self._platform = platform
        self._configs = configs
        self.meter = CpuMeter(engines=len(configs))

    def sample(self, stats: Stats, engine: Mapping[str, Any]) -> CpuSample:
        """Return the CPU metrics from `stats`, this process's control group, and `engine`.

        engine: the report that the engine sent at its start.
        """
        group = own_cgroup()
        return CpuSample(
            threads=sum(config.threads for config in self._configs),
            busy_s=stats.busy_s,
            weight_bytes=stats.weight_bytes,
            barrier_wait_s=stats.barrier_wait_s,
            roofline_bytes_per_s=stats.roofline_bytes_per_s,
            throttled_periods=group.throttled_periods,
            throttled_s=group.throttled_s,
            quota=group.cpu_quota,
            numa_binding=binding_mode(engine),
        )

    def report(self, engine: Mapping[str, Any], busy: float, bandwidth: float | None) -> CpuReport:
        """Return the body of /v1/cpu.

        engine: the current report of the engine.
        busy, bandwidth: the results of CpuMeter.rates.

        Do not call `report` on the event loop's thread,
        because reading the state of the machine again takes milliseconds.
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
                limits=msgspec.convert(engine.get("limits") or (), tuple[RateLimit, ...]),
                threads_on=tuple(engine.get("placement") or ()),
                misplaced=str(engine.get("misplaced") or ""),
                numa_binding=binding_mode(engine),
                ranks=tuple(_rank_memory(engine)),
                throttled_periods=host.cgroup.throttled_periods,
                throttled_s=host.cgroup.throttled_s,
            ),
        )


def binding_mode(engine: Mapping[str, Any]) -> str:
    """Return how the engine bound its memory to NUMA nodes; see LiveReport.numa_binding."""
    return str((engine.get("numa_binding") or {}).get("mode", "none"))


def _rank_memory(engine: Mapping[str, Any]) -> Iterator[RankMemory]:
    nodes = engine.get("memory_nodes") or {"weights": (), "kv": ()}
    for weights, kv in zip(nodes["weights"], nodes["kv"], strict=True):
        if weights or kv:
            texts = ({str(node): size for node, size in on.items()} for on in (weights, kv))
            yield RankMemory(weights=next(texts), kv=next(texts))


def placement_of(configs: Sequence[EngineConfig]) -> Placement:
    """Return the thread placement of all engines with these configurations."""
    ranks = tuple(rank for config in configs for rank in _ranks(config))
    front_end = tuple(CpuId(cpu) for cpu in configs[0].frontend_cpus or ()) or None
    return Placement(ranks, front_end, configs[0].passive_waits)


def _ranks(config: EngineConfig) -> Iterator[Rank]:
    begin = 0
    within = config.rank_cpus or [[] for _ in config.rank_threads]
    for threads, moving in zip(config.rank_threads, within, strict=True):
        cpus = None if config.cpus is None else config.cpus[begin : begin + threads]
        own = None if cpus is None else tuple(map(CpuId, cpus))
        yield Rank(threads, own, (), tuple(map(CpuId, moving)) or None)
        begin += threads
