"""ReplicaClient: an EngineClient over one or several engine processes, which it restarts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import msgspec

from cpuserve.base.affinity import affinity, on_cpus
from cpuserve.base.background import keep
from cpuserve.base.errors import EngineDead
from cpuserve.base.log import get_logger
from cpuserve.config.engine import EngineConfig
from cpuserve.core.kv.cache_folder import SharedMemory
from cpuserve.engine.client import EngineClient, PayloadOf, ReplicaStatus
from cpuserve.engine.ipc import AddRequest, Output, StageProgress, Stats, TierStats
from cpuserve.engine.launch import CHILD_MODULE, SpareProcess, with_shared_memory
from cpuserve.engine.process import DiedAtStart, ProcessClient
from cpuserve.engine.router import SEQUENCE_TOKENS, Router

log = get_logger("engine")

COUNTERS = (
    "preemptions",
    "prompt_tokens",
    "generation_tokens",
    "steps",
    "prefix_queries",
    "prefix_hits",
    "busy_s",
    "weight_bytes",
    "barrier_wait_s",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
    "media_queries",
    "media_hits",
    "encode_s",
)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When and how often a dead engine is restarted; times are in seconds.

    The first restart is immediate. Later restarts wait first_s, doubled each time up to longest_s.
    Restarts are tried without end, because the cause may be temporary.
    After steady_s of service the engine counts as healthy, and its next restart is immediate again.

    first_attempts: number of starts that are tried when the server starts.
      After as many failures the server ends, so that its operator sees the failure.
    enabled: False = never restart.
    """

    first_s: float = 0.5
    longest_s: float = 60.0
    steady_s: float = 60.0
    first_attempts: int = 3
    enabled: bool = True

    def delay_s(self, deaths: int) -> float:
        """Return how long to wait after this number of deaths in a row."""
        return min(self.first_s * 2.0 ** (deaths - 2), self.longest_s) if deaths > 1 else 0.0


class ReplicaEngine(EngineClient, Protocol):
    """A replica as this module uses it: ProcessClient, or a fake in tests. It can be awaited."""

    on_step: Callable[[Stats], None] | None

    @property
    def hung(self) -> bool:
        """Whether the engine is alive and has work, but does not respond."""

    async def wait_ended(self) -> str:
        """Wait until the engine has ended and is reaped; return a text that says how it ended."""

    def kill(self) -> None:
        """Kill the engine and reap it; for callers without an event loop."""


@dataclass(frozen=True, slots=True)
class _LoadedLora:
    """An adapter that all replicas have loaded since the server started."""

    path: str
    fingerprint: object


OnProgress = Callable[[StageProgress], None]
Spawn = Callable[[int, OnProgress | None], ReplicaEngine]


class _Replica:
    """A replica: its current engine, its load, and its counters summed over all restarts."""

    def __init__(self, index: int, name: str, engine: ReplicaEngine) -> None:
        self.index = index
        self.name = name
        self.engine = engine
        self.trouble = ""  # why the engine is dead
        self.open = 0  # number of sequences that have not ended
        self.waiting_tokens = 0  # number of prompt tokens in sequences without output so far
        self.restarts = 0
        self.deaths = 0  # how often the engine died in a row, including failed starts
        self.given_up = False
        # Whether the engine was restarted and has not loaded all adapters yet.
        self.restoring = False
        self.missing: set[str] = set()  # names of adapters that could not be loaded after a restart
        self._before = Stats()  # the counters of all earlier engines of this replica
        self._buried = False

    @property
    def serves(self) -> bool:
        """Whether the replica gets new requests."""
        return self.engine.alive and not self.engine.hung and not self.restoring

    @property
    def load(self) -> float:
        """The load, in units of one running sequence."""
        return self.open + self.waiting_tokens / SEQUENCE_TOKENS

    @property
    def why(self) -> str:
        """Why the replica does not serve."""
        # Until an engine that has ended is buried, it alone knows why.
        hangs, dies = self.engine.alive and not self.restoring, self.engine.ended
        return self.engine.trouble if hangs or (dies and not self._buried) else self.trouble

    @property
    def stats(self) -> Stats:
        """Current gauges, and counters summed over all engines that this replica has had.

        The gauges of a dead engine are outdated and left out. An idle engine may have reported
        its gauges during its last step, so they are limited to open requests. An open request
        that was not reported as running counts as waiting, even if it came after the last step.
        """
        alive = self.engine.alive
        now = self.engine.stats if alive else Stats()
        stats = msgspec.structs.replace(
            now,
            running=min(now.running, self.open),
            kv_usage=now.kv_usage if self.open else 0.0,
        )
        stats.waiting = self.open - stats.running if alive else 0
        if not alive and not self._buried:
            _add(stats, self.engine.stats)
        _add(stats, self._before)
        measured = self._before.roofline_bytes_per_s
        stats.roofline_bytes_per_s = max(stats.roofline_bytes_per_s, measured)
        return stats

    def bury(self) -> None:
        """Add the counters and the roofline of the dead engine to the counters of the replica."""
        if self._buried:
            return
        stats, before = self.engine.stats, self._before
        _add(before, stats)
        before.roofline_bytes_per_s = max(before.roofline_bytes_per_s, stats.roofline_bytes_per_s)
        self._buried = True

    def put(self, engine: ReplicaEngine) -> None:
        """Make `engine` the current engine."""
        self.engine = engine
        self._buried = False


def _add(to: Stats, more: Stats, *, held: bool = False) -> None:
    """Add the counters of `more` to `to`; held: and the current size of its tiers."""
    for name in COUNTERS:
        setattr(to, name, getattr(to, name) + getattr(more, name))
    tiers = dict(to.tiers)
    for name, tier in more.tiers.items():
        before = tiers.get(name, TierStats())
        blocks, size = (tier.blocks, tier.bytes) if held else (0, 0)
        tiers[name] = TierStats(
            before.blocks + blocks, before.bytes + size, before.hits + tier.hits
        )
    to.tiers = tiers


class ReplicaClient:
    """EngineClient over engines with the same model. `spawn` creates it, without an event loop.

    A request runs on one engine, and fails if that engine dies. It is not repeated on another
    engine, because it may have caused the death. A dead engine is restarted.
    """

    def __init__(
        self,
        spawn: Spawn,
        count: int,
        block_size: int,
        policy: RestartPolicy | None = None,
        on_progress: OnProgress | None = None,
        memory: SharedMemory | None = None,
    ) -> None:
        """on_progress gets the loading progress of the first engine; all engines load the same."""
        self._memory = memory or SharedMemory()
        self.on_step: Callable[[Stats], None] | None = None
        self._spawn = spawn
        self._policy = policy or RestartPolicy()
        self._router = Router(count, block_size)
        self._on_progress = on_progress
        self._ready = False
        self._closing = False
        self._asleep = False
        self._changing = asyncio.Lock()  # only one change of adapters runs at a time
        self._adapters: dict[
            str, _LoadedLora | None
        ] = {}  # the adapters that changed since the start, by name; None = unloaded
        self._keepers: list[asyncio.Task[None]] = []
        self._replicas: list[_Replica] = []
        try:
            for index in range(count):
                name = f"replica {index}" if count > 1 else "the engine"
                self._replicas.append(_Replica(index, name, self._start(index)))
                self._listen(self._replicas[-1])
        except BaseException:
            self.kill()
            raise

    @classmethod
    def spawn(
        cls,
        configs: Sequence[EngineConfig],
        *,
        on_progress: OnProgress | None = None,
        module: str = CHILD_MODULE,
        policy: RestartPolicy | None = None,
        spare: SpareProcess | None = None,
    ) -> ReplicaClient:
        """Start an engine for each of `configs`; see ProcessClient.spawn."""
        allowed = affinity()

        def start(index: int, on_progress: OnProgress | None) -> ProcessClient:
            # A restart runs on a thread of the front end, which may be pinned to other CPUs.
            with on_cpus(allowed):
                return ProcessClient.spawn(
                    configs[index], on_progress=on_progress, module=module, spare=spare
                )

        routed = configs[0].enable_prefix_caching and len(configs) > 1
        block_size = configs[0].block_size if routed else 0
        memory, configs = with_shared_memory(configs)
        return cls(start, len(configs), block_size, policy, on_progress, memory)

    # --- EngineClient -------------------------------------------------------------------------

    @property
    def info(self) -> dict[str, object]:
        """The `info` in the first engine's Ready message; {} before all engines are ready."""
        return self._replicas[0].engine.info if self._ready else {}

    @property
    def stats(self) -> Stats:
        """Sums over all replicas; KV usage and time per step are means over the serving replicas.

        The roofline describes one replica,
        because busy_s and weight_bytes are sums over steps, and each step ran on one replica.
        """
        if len(self._replicas) == 1:
            return self._replicas[0].stats
        total = Stats()
        num_serving = sum(r.serves for r in self._replicas)
        for replica in self._replicas:
            stats = replica.stats
            _add(total, stats, held=True)
            total.running += stats.running
            total.waiting += stats.waiting
            total.prompt_rate += stats.prompt_rate
            total.damaged |= stats.damaged
            if replica.serves:
                total.kv_usage += stats.kv_usage / num_serving
                total.step_s += stats.step_s / num_serving
            measured = stats.roofline_bytes_per_s
            total.roofline_bytes_per_s = max(total.roofline_bytes_per_s, measured)
        return total

    @property
    def replicas(self) -> Sequence[ReplicaStatus]:
        """The status of each replica."""
        return [
            ReplicaStatus(r.serves or self._asleep, r.restarts, r.stats, r.engine.hung)
            for r in self._replicas
        ]

    async def wait_ready(self) -> None:
        """Wait until all engines serve; raise the StartupError of an engine that cannot start."""
        waiting = [asyncio.ensure_future(self._first_start(r)) for r in self._replicas]
        try:
            await asyncio.gather(*waiting)
        finally:
            for task in waiting:
                task.cancel()
        self._ready = True
        self._keepers = [
            keep(f"restarting {r.name}", partial(self._keep, r)) for r in self._replicas
        ]

    async def generate(
        self,
        request: AddRequest,
        *,
        timeout_s: float | None = None,
        payload_of: PayloadOf | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Generate one sequence on the replica that the router chooses; see EngineClient."""
        replica = self._choose(request)
        engine, waiting = replica.engine, len(request.prompt_ids)
        replica.open += 1
        replica.waiting_tokens += waiting
        try:
            stream = engine.generate(request, timeout_s=timeout_s, payload_of=payload_of)
            async with aclosing(stream) as outputs:
                async for output in outputs:
                    if waiting and output.tokens:
                        replica.waiting_tokens -= waiting
                        waiting = 0
                    yield output
        finally:
            replica.open -= 1
            replica.waiting_tokens -= waiting

    async def ask(self, what: str, **details: Any) -> dict[str, object]:
        """Return a report: "roofline" of one replica, or "check" or "report" of all replicas.

        "reset_prefix_cache" empties the caches of all replicas that serve.
        Changes of adapters are made in all replicas, or in none.
        """
        if what in ("load_adapter", "unload_adapter"):
            async with self._changing:
                change = self._load_adapter if what == "load_adapter" else self._unload_adapter
                return await change(**details)
        serving = [r for r in self._replicas if r.serves]
        if not serving:
            raise EngineDead(self.trouble)
        if what == "roofline":
            return await serving[0].engine.ask(what)
        replies = await asyncio.gather(*(r.engine.ask(what) for r in serving))
        if what == "reset_prefix_cache":
            return next((a for a in replies if a), {})
        if what == "check":
            return next((a for a in replies if a != {"ok": True}), replies[0])
        # Only the first engine measures the roofline, when the server starts. All other engines
        # report 0, and restarted engines as well. `stats` keeps the measured value.
        measured = {"roofline_bytes_per_s": self.stats.roofline_bytes_per_s}
        return {**(_whole(replies) if len(self._replicas) > 1 else replies[0]), **measured}

    @property
    def alive(self) -> bool:
        """Whether a replica serves, or all replicas sleep and can be woken."""
        serves = self._asleep or any(r.serves for r in self._replicas)
        return self._ready and not self._closing and serves

    @property
    def ended(self) -> bool:
        """Whether all engines are dead and no engine will be restarted."""
        return self._closing or all(r.given_up for r in self._replicas)

    @property
    def trouble(self) -> str:
        """Why no engine serves now."""
        if self._closing:
            return "the server is shutting down"
        if not self._ready:
            return "the engine is not ready"
        if self._asleep:
            return "the model sleeps until the next request for text, vectors or scores"
        if len(self._replicas) == 1 or self.ended:
            return self._replicas[0].why
        return "no engine serves now: all have stopped responding or are being started again"

    async def close(self) -> None:
        """Stop all engines and reap their processes."""
        if self._closing:
            return
        self._closing = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(r.engine.close() for r in self._replicas))
        await asyncio.to_thread(self._memory.close)

    @property
    def asleep(self) -> bool:
        """Whether the engines were ended by `sleep`."""
        return self._asleep

    async def sleep(self) -> None:
        """End all engines, which frees their memory. Requests that still run get EngineDead."""
        if self._asleep or self._closing:
            return
        self._asleep = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for replica in self._replicas:
            self._router.forget(replica.index)
        await asyncio.gather(*(r.engine.close() for r in self._replicas))
        await asyncio.to_thread(self._memory.clear)

    async def wake(self) -> None:
        """Start the sleeping engines with their adapters; return when the engines serve.

        Raises:
            StartupError: an engine cannot start; all engines sleep again.
        """
        if not self._asleep or self._closing:
            return
        try:
            for replica in self._replicas:
                replica.bury()
                replica.deaths, replica.restoring = 0, False
                await self._replace(replica)
            await self.wait_ready()
            async with self._changing:
                await asyncio.gather(*(self._restore(r) for r in self._replicas))
            self._asleep = False
        except BaseException:
            self._asleep = False
            await self.sleep()
            raise

    def kill(self) -> None:
        """Kill all engines and reap them; for callers without an event loop."""
        self._closing = True
        for replica in self._replicas:
            replica.engine.kill()
        self._memory.close()

    # --- adapters -----------------------------------------------------------------------------

    async def _load_adapter(self, name: str, path: str, in_place: bool) -> dict[str, object]:
        """Load an adapter in all replicas; a replica that is restarting loads it afterwards."""
        details = {"name": name, "path": path, "in_place": in_place}
        replies = await self._ask_all("stage_adapter", **details)
        if not replies:
            raise EngineDead(self.trouble)
        error = next((reply for reply in replies if "error" in reply), None)
        if len({reply.get("fingerprint") for reply in replies}) > 1 and error is None:
            why = "its files changed while they were being read; load it again"
            error = {"error": f"adapter {name}: {why}", "fault": True}
        if error is not None:
            await self._ask_all("drop_adapter", name=name)
            return error
        self._adapters[name] = _LoadedLora(path, replies[0]["fingerprint"])
        for replica in self._replicas:
            replica.missing.discard(name)
        await self._ask_all("use_adapter", name=name)
        return {}

    async def _unload_adapter(self, name: str) -> dict[str, object]:
        self._adapters[name] = None
        for replica in self._replicas:
            replica.missing.discard(name)
        await self._ask_all("unload_adapter", name=name)
        return {}

    async def _ask_all(self, what: str, **details: Any) -> list[dict[str, object]]:
        """Ask all replicas that serve; return the replies, without those from engines that died."""
        engines = [r.engine for r in self._replicas if r.engine.alive and not r.restoring]
        asked = [engine.ask(what, **details) for engine in engines]
        replies = await asyncio.gather(*asked, return_exceptions=True)
        for reply in replies:
            if isinstance(reply, BaseException) and not isinstance(reply, EngineDead):
                raise reply
        return [reply for reply in replies if not isinstance(reply, BaseException)]

    async def _restore(self, replica: _Replica) -> None:
        """Repeat all changes of adapters since the server's start in a restarted engine."""
        replica.missing.clear()
        ask = replica.engine.ask
        for name, wanted in self._adapters.items():
            if wanted is None:
                await ask("unload_adapter", name=name)
                continue
            reply = await ask("stage_adapter", name=name, path=wanted.path, in_place=True)
            if reply.get("fingerprint") == wanted.fingerprint:
                await ask("use_adapter", name=name)
                continue
            why = reply.get("error") or f"adapter {name}: its files have changed"
            log.error("%s: %s; load it again, in place", replica.name, why)
            replica.missing.add(name)
            await ask("unload_adapter", name=name)

    # --- routing ------------------------------------------------------------------------------

    def _choose(self, request: AddRequest) -> _Replica:
        params = request.params
        loads = [
            r.load if r.serves and params.adapter not in r.missing else None for r in self._replicas
        ]
        if all(load is None for load in loads):
            why = self.trouble
            if any(r.serves for r in self._replicas):
                why = f"the adapter {params.adapter} could not be loaded again after a restart"
            raise EngineDead(why)
        salt = f"{params.adapter or ''}{params.scale_key}@{params.cache_salt or ''}"
        ids, media = request.prompt_ids, request.media
        return self._replicas[self._router.choose(ids, loads, salt, media)]

    def _listen(self, replica: _Replica) -> None:
        def on_step(_stats: Stats) -> None:
            if self.on_step is not None:
                self.on_step(self.stats)

        replica.engine.on_step = on_step

    # --- restarts -----------------------------------------------------------------------------

    def _start(self, index: int) -> ReplicaEngine:
        return self._spawn(index, self._report if index == 0 else None)

    def _report(self, progress: StageProgress) -> None:
        if self._on_progress is not None and not self._ready:
            self._on_progress(progress)

    async def _first_start(self, replica: _Replica) -> None:
        """Wait until `replica` serves; restart its engine if it dies without an error message.

        The system may have killed it while memory was short. An engine that reports an error
        is not restarted, nor is an engine that has died first_attempts times (RestartPolicy).
        """
        attempts = self._policy.first_attempts if self._policy.enabled else 1
        while True:
            try:
                await replica.engine.wait_ready()
            except DiedAtStart as error:
                replica.deaths += 1
                if replica.deaths >= attempts:
                    raise
                log.error("%s; starting attempt %d of %d", error, replica.deaths + 1, attempts)
                await asyncio.sleep(self._policy.delay_s(replica.deaths))
                await self._replace(replica)
            else:
                return

    async def _keep(self, replica: _Replica) -> None:
        """Restart the engine whenever it dies, if the policy allows it."""
        while True:
            began = time.monotonic()
            how = await replica.engine.wait_ended()
            replica.deaths = 1 + replica.deaths * (time.monotonic() - began < self._policy.steady_s)
            replica.bury()
            self._router.forget(replica.index)
            told = f"{replica.name}: {how}" if len(self._replicas) > 1 else how
            if not self._policy.enabled:
                replica.trouble, replica.given_up = how, True
                # The end of a single engine ends the server, which logs it.
                if len(self._replicas) > 1:
                    log.error("%s", told)
                return
            replica.trouble = f"{how}; it is being started again"
            log.error("%s; it is being started again", told)
            await self._revive(replica)

    async def _revive(self, replica: _Replica) -> None:
        """Try to start the engine until it serves."""
        while True:
            await asyncio.sleep(self._policy.delay_s(replica.deaths))
            began = time.monotonic()
            replica.restoring = True
            try:
                await self._replace(replica)
                await replica.engine.wait_ready()
                async with self._changing:
                    await self._restore(replica)
                    replica.restoring = False
            except Exception as error:
                replica.deaths += 1
                wait = self._policy.delay_s(replica.deaths)
                replica.trouble = f"{error}; the start will be tried again"
                log.error("%s: %s; the next attempt is in %.3g s", replica.name, error, wait)
            else:
                replica.restarts += 1
                log.warning("%s serves again after %.1f s", replica.name, time.monotonic() - began)
                return

    async def _replace(self, replica: _Replica) -> None:
        """Start a new engine and make it the current engine of the replica."""
        await replica.engine.close()
        replica.put(self._start(replica.index))
        self._listen(replica)


def _whole(reports: Sequence[dict[str, object]]) -> dict[str, object]:
    """Return one report for all: the first, with the threads and ranks of all, and `replicas`."""
    whole = {**reports[0], "replicas": list(reports)}
    if seen := [report["placement"] for report in reports if "placement" in report]:
        whole["placement"] = [cpu for cpus in seen if isinstance(cpus, list) for cpu in cpus]
        whole["misplaced"] = "; ".join(str(r["misplaced"]) for r in reports if r.get("misplaced"))
    if placed := [nodes for r in reports if isinstance(nodes := r.get("memory_nodes"), dict)]:
        whole["memory_nodes"] = {
            what: [rank for nodes in placed for rank in nodes[what]] for what in placed[0]
        }
    return whole
