"""ReplicaClient: several engine processes as one engine, which outlives any of them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from cpuserve.config.engine import EngineConfig
from cpuserve.engine.client import EngineClient, ReplicaStatus
from cpuserve.engine.ipc import Output, Progress, Stats
from cpuserve.engine.process import CHILD_MODULE, ProcessClient
from cpuserve.engine.router import SEQUENCE_TOKENS, Router
from cpuserve.errors import CpuserveError, EngineDead
from cpuserve.log import get_logger
from cpuserve.sampling.params import SamplingParams

log = get_logger("engine")

COUNTERS = (
    "preemptions",
    "prompt_tokens",
    "generation_tokens",
    "steps",
    "prefix_queries",
    "prefix_hits",
    "swap_hits",
    "disk_hits",
    "busy_s",
    "weight_bytes",
)

TIER_GAUGES = ("swap_blocks", "swap_bytes", "disk_blocks", "disk_bytes")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead replica starts again, in seconds.

    The first time at once, then after first_s, doubled each time up to longest_s; a replica that
    has served for steady_s begins anew. It is given up after `attempts` failed starts in a row.
    """

    first_s: float = 0.5
    longest_s: float = 30.0
    steady_s: float = 60.0
    attempts: int = 5

    def delay_s(self, deaths: int) -> float:
        """How long to wait after that many deaths in a row."""
        return min(self.first_s * 2.0 ** (deaths - 2), self.longest_s) if deaths > 1 else 0.0


class Engine(EngineClient, Protocol):
    """One replica: an engine that can be told dead from alive (ProcessClient, fakes)."""

    on_step: Callable[[Stats], None] | None

    async def wait_ended(self) -> str:
        """Return when the engine is gone and reaped, with how it ended."""

    def kill(self) -> None:
        """End the engine at once and reap it; for callers without an event loop."""


Spawn = Callable[[int], Engine]


class _Replica:
    """One place among the replicas: the engine that is there now, and what has happened to it."""

    def __init__(self, index: int, engine: Engine) -> None:
        self.index = index
        self.engine = engine
        self.open = 0  # sequences that have not ended
        self.waiting_tokens = 0  # prompt tokens of those without an output
        self.restarts = 0
        self.deaths = 0  # in a row
        self.failed_starts = 0  # in a row
        self.given_up = False
        self._before = Stats()  # counters of the engines that were here before
        self._buried = False

    @property
    def load(self) -> float:
        """In running sequences."""
        return self.open + self.waiting_tokens / SEQUENCE_TOKENS

    @property
    def stats(self) -> Stats:
        """Gauges of now, counters over all engines that were here.

        A dead engine's last gauges say nothing, and an idle one's may be of its last step.
        """
        alive = self.engine.alive
        now = self.engine.stats if alive else Stats()
        stats = msgspec.structs.replace(
            now,
            running=min(now.running, self.open),
            kv_usage=now.kv_usage if self.open else 0.0,
        )
        stats.waiting = min(now.waiting, self.open - stats.running)
        if not alive and not self._buried:
            _add(stats, self.engine.stats)
        _add(stats, self._before)
        measured = self._before.roofline_bytes_per_s
        stats.roofline_bytes_per_s = max(stats.roofline_bytes_per_s, measured)
        return stats

    def bury(self) -> None:
        """Keep what the engine counted and measured, which has died."""
        stats, before = self.engine.stats, self._before
        _add(before, stats)
        before.roofline_bytes_per_s = max(before.roofline_bytes_per_s, stats.roofline_bytes_per_s)
        self._buried = True

    def put(self, engine: Engine) -> None:
        """`engine` is here now."""
        self.engine = engine
        self._buried = False


def _add(to: Stats, more: Stats) -> None:
    """Add the counters of `more`."""
    for name in COUNTERS:
        setattr(to, name, getattr(to, name) + getattr(more, name))


class ReplicaClient:
    """EngineClient over several engines with the same model. Made by `spawn`, without a loop.

    A request runs on one of them and ends with it: it is not repeated elsewhere, since it may be
    what the engine died of.
    """

    def __init__(
        self, spawn: Spawn, count: int, block_size: int, policy: RestartPolicy | None = None
    ) -> None:
        self.on_step: Callable[[Stats], None] | None = None
        self._spawn = spawn
        self._policy = policy or RestartPolicy()
        self._router = Router(count, block_size)
        self._how = "the engines are not ready"
        self._ready = False
        self._closing = False
        self._keepers: list[asyncio.Task[None]] = []
        self._replicas: list[_Replica] = []
        try:
            for index in range(count):
                self._replicas.append(_Replica(index, spawn(index)))
                self._listen(self._replicas[-1])
        except BaseException:
            self.kill()
            raise

    @classmethod
    def spawn(
        cls,
        configs: Sequence[EngineConfig],
        *,
        on_progress: Callable[[Progress], None] | None = None,
        module: str = CHILD_MODULE,
        policy: RestartPolicy | None = None,
    ) -> ReplicaClient:
        """Start an engine for each of `configs`; see ProcessClient.spawn.

        on_progress hears of the first start of the first one: they load the same.
        """
        allowed = _affinity()
        listeners = {0: on_progress}

        def start(index: int) -> ProcessClient:
            # A later start is one of the front end, which may have been pinned meanwhile.
            with _on_cpus(allowed):
                reports = listeners.pop(index, None)
                return ProcessClient.spawn(configs[index], on_progress=reports, module=module)

        caching = configs[0].enable_prefix_caching
        return cls(start, len(configs), configs[0].block_size if caching else 0, policy)

    # --- EngineClient -------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, object]:
        """What Ready of the first carried; {} before."""
        return self._replicas[0].engine.info if self._ready else {}

    @property
    def stats(self) -> Stats:
        """Sums over all replicas, but the mean of those that serve of KV use and time per step.

        The roofline is one replica's, as busy_s and weight_bytes are of their steps.
        """
        total = Stats()
        num_serving = sum(r.engine.alive for r in self._replicas)
        for replica in self._replicas:
            stats = replica.stats
            _add(total, stats)
            total.running += stats.running
            total.waiting += stats.waiting
            total.prompt_rate += stats.prompt_rate
            for name in TIER_GAUGES:
                setattr(total, name, getattr(total, name) + getattr(stats, name))
            if replica.engine.alive:
                total.kv_usage += stats.kv_usage / num_serving
                total.step_s += stats.step_s / num_serving
            measured = stats.roofline_bytes_per_s
            total.roofline_bytes_per_s = max(total.roofline_bytes_per_s, measured)
        return total

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        """How each of them is."""
        return [ReplicaStatus(r.engine.alive, r.restarts, r.stats) for r in self._replicas]

    async def wait_ready(self) -> None:
        """Return when all serve; StartupError with the line of one that cannot."""
        waiting = [asyncio.ensure_future(r.engine.wait_ready()) for r in self._replicas]
        try:
            await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()
        self._ready = True
        self._how = "no engine serves at the moment: they are being started again"
        self._keepers = [asyncio.create_task(self._keep(r)) for r in self._replicas]

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        priority: int = 0,
        *,
        timeout_s: float | None = None,
        progress: bool = False,
    ) -> AsyncGenerator[Output, None]:
        """One sequence, on the replica that suits it; see EngineClient.generate."""
        replica = self._choose(prompt_ids, params)
        engine, waiting = replica.engine, len(prompt_ids)
        replica.open += 1
        replica.waiting_tokens += waiting
        try:
            outputs = engine.generate(
                prompt_ids, params, priority, timeout_s=timeout_s, progress=progress
            )
            async with aclosing(outputs):
                async for output in outputs:
                    if waiting and output.tokens:
                        replica.waiting_tokens -= waiting
                        waiting = 0
                    yield output
        finally:
            replica.open -= 1
            replica.waiting_tokens -= waiting

    async def ask(self, what: str) -> dict[str, object]:
        """A report: "roofline" of one replica; "check" of all; "report" of one, with `replicas`."""
        serving = [r for r in self._replicas if r.engine.alive]
        if not serving:
            raise EngineDead(self._how)
        if what == "roofline":
            return await serving[0].engine.ask(what)
        answers = await asyncio.gather(*(r.engine.ask(what) for r in serving))
        if what == "check":
            return next((a for a in answers if a != {"ok": True}), answers[0])
        return _whole(answers)

    @property
    def alive(self) -> bool:
        """At least one replica serves."""
        return self._ready and not self._closing and any(r.engine.alive for r in self._replicas)

    @property
    def ended(self) -> bool:
        """All replicas have been given up."""
        return self._closing or all(r.given_up for r in self._replicas)

    async def close(self) -> None:
        """Stop all engines and reap their processes."""
        if self._closing:
            return
        self._closing = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(r.engine.close() for r in self._replicas))

    def kill(self) -> None:
        """End all engines at once and reap them; for callers without an event loop."""
        self._closing = True
        for replica in self._replicas:
            replica.engine.kill()

    # --- routing ------------------------------------------------------------------------------

    def _choose(self, prompt_ids: list[int], params: SamplingParams) -> _Replica:
        loads = [r.load if r.engine.alive else None for r in self._replicas]
        if all(load is None for load in loads):
            raise EngineDead(self._how)
        return self._replicas[self._router.choose(prompt_ids, loads, params.cache_salt or "")]

    def _listen(self, replica: _Replica) -> None:
        def on_step(_stats: Stats) -> None:
            if self.on_step is not None:
                self.on_step(self.stats)

        replica.engine.on_step = on_step

    # --- keeping them alive -------------------------------------------------------------------

    async def _keep(self, replica: _Replica) -> None:
        """Start the replica again whenever it dies, until it is given up."""
        while not replica.given_up:
            began = time.monotonic()
            how = await replica.engine.wait_ended()
            replica.deaths = 1 + replica.deaths * (time.monotonic() - began < self._policy.steady_s)
            replica.bury()
            self._router.forget(replica.index)
            log.error("replica %d: %s; it is started again", replica.index, how)
            await self._revive(replica)

    async def _revive(self, replica: _Replica) -> None:
        """Start until it serves, or is given up."""
        replica.failed_starts = 0
        while True:
            await asyncio.sleep(self._policy.delay_s(replica.deaths))
            began = time.monotonic()
            try:
                await self._replace(replica)
            except (CpuserveError, OSError) as error:
                replica.deaths += 1
                replica.failed_starts += 1
                if replica.failed_starts >= self._policy.attempts:
                    self._give_up(replica, error)
                    return
                log.error("replica %d did not start: %s", replica.index, error)
            else:
                replica.restarts += 1
                took = time.monotonic() - began
                log.warning("replica %d serves again after %.1f s", replica.index, took)
                return

    async def _replace(self, replica: _Replica) -> None:
        """Put a new engine in the dead one's place, and wait until it serves."""
        await replica.engine.close()
        replica.put(self._spawn(replica.index))
        self._listen(replica)
        await replica.engine.wait_ready()

    def _give_up(self, replica: _Replica, error: Exception) -> None:
        replica.given_up = True
        left = sum(not r.given_up for r in self._replicas)
        self._how = (
            f"replica {replica.index} failed to start {replica.failed_starts} times in a row and "
            f"is given up: {error}"
        )
        log.error("%s; %d of %d replicas are left", self._how, left, len(self._replicas))


def _whole(reports: Sequence[dict[str, object]]) -> dict[str, object]:
    """The first report, all of them in `replicas`, and the threads and ranks of all."""
    whole = {**reports[0], "replicas": list(reports)}
    seen = [report["placement"] for report in reports if "placement" in report]
    if seen:
        whole["placement"] = [cpu for cpus in seen if isinstance(cpus, list) for cpu in cpus]
        whole["misplaced"] = "; ".join(str(r["misplaced"]) for r in reports if r.get("misplaced"))
    placed = [nodes for r in reports if isinstance(nodes := r.get("memory_nodes"), dict)]
    if placed:
        whole["memory_nodes"] = {
            what: [rank for nodes in placed for rank in nodes[what]] for what in placed[0]
        }
    return whole


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


@contextmanager
def _on_cpus(cpus: set[int]) -> Iterator[None]:
    """Let what this thread starts run on `cpus`; the thread goes back to its own."""
    own = _affinity()
    if own == cpus:
        yield
        return
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
