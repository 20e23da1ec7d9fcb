"""`cpuserve bench load`: the time until a started server is ready, and the memory it uses."""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.base.children import start_child
from cpuserve.base.errors import StartupError
from cpuserve.bench.driver import LoadError, Target, complete, fetch, first_model
from cpuserve.bench.schema import Record, Where, record
from cpuserve.bench.server import START_TIMEOUT_S, ServerProcess, private_flags, serve_command, stop

if TYPE_CHECKING:
    import psutil

    from cpuserve.config.engine import EngineConfig

MIB = 1 << 20
POLL_S = 0.01
SETTLE_S = 1.0  # after this many idle seconds, an engine has prepared its KV memory
PROMPT = [400, 401, 402]
TEXT = "The capital of France is"


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The memory of an engine process in bytes.

    before: resident memory before the process loads the model.
    peak: the maximum resident memory while it loads the model.
    weights, kv: the sizes of the packed weights and of the KV blocks after loading.
    """

    before: int
    peak: int
    weights: int
    kv: int


@dataclass(frozen=True, slots=True)
class StartTimes:
    """Seconds from the command to the first status 200 of /health, and to the first token."""

    health: float
    first_token: float


def load_records(
    arguments: Sequence[str],
    config: EngineConfig,
    where: Where,
    weight_bytes: int,
    rounds: int,
    tell: Callable[[str], None],
    *,
    cold: bool = False,
) -> list[Record]:
    """Return records of start times, of memory after one short request, and of peak memory.

    cold: also measure starts after the page cache of the machine was dropped.
    weight_bytes: the size of all tensors in the model's files. Two records are divided by it:
    the peak of the engine's resident memory, and the increase of this memory since loading began.
    The memory of several processes is the sum of their proportional set sizes,
    which counts shared pages once.

    Raises:
        StartupError: the server ended before it was ready, a process of it loaded torch,
            or this process may not drop the page cache.
    """
    found: dict[str, tuple[str, list[float]]] = {}

    def note(name: str, unit: str, value: float) -> None:
        found.setdefault(name, (unit, []))[1].append(value)

    for i in range(rounds):
        tell(f"start {i + 1} of {rounds}")
        for kind in ("cold_", "") if cold else ("",):
            if kind:
                drop_page_cache()
            start = time_start(arguments)
            note(f"{kind}health", "s", start.health)
            note(f"{kind}start_to_first_token", "s", start.first_token)
    for i in range(rounds):
        tell(f"memory {i + 1} of {rounds}")
        for name, (unit, value) in server_memory(arguments).items():
            note(name, unit, value)
        engine = engine_memory(config)
        rest = found["pss"][1][-1] - (engine.weights + engine.kv) / MIB
        note("besides_weights_and_kv", "MiB", rest)
        note("engine_before_load", "MiB", engine.before / MIB)
        note("engine_peak", "MiB", engine.peak / MIB)
        if weight_bytes:
            note("engine_peak_of_weights", "ratio", engine.peak / weight_bytes)
            note("load_peak_of_weights", "ratio", (engine.peak - engine.before) / weight_bytes)
    shape = {"weights_mib": round(weight_bytes / MIB, 1)}
    return [
        record(name, unit, values, where, better="less", parameters=shape)
        for name, (unit, values) in found.items()
    ]


def time_start(arguments: Sequence[str]) -> StartTimes:
    """Start a server, request a token from it as soon as it is healthy, and stop it.

    Raises:
        StartupError: the server ended before it was healthy, or took longer than START_TIMEOUT_S.
    """
    port, key = _free_port(), secrets.token_hex(8)
    target = Target(f"http://127.0.0.1:{port}", "", key)
    command = serve_command([*arguments, *private_flags(port, key)])
    started = time.perf_counter()
    process = start_child(command, stdout=subprocess.DEVNULL, text=True)
    try:
        while process.poll() is None:
            if _healthy(target):
                health = time.perf_counter() - started
                return StartTimes(health, asyncio.run(_first_token(target)) - started)
            if time.perf_counter() - started > START_TIMEOUT_S:
                msg = (
                    "the server to measure did not answer /health with 200 within "
                    f"{START_TIMEOUT_S:g} s; start it with `cpuserve serve` to see why"
                )
                raise StartupError(msg)
            time.sleep(POLL_S)
    finally:
        stop(process)
    msg = f"the server to measure ended with exit code {process.returncode} before it was ready"
    raise StartupError(msg)


async def _first_token(target: Target) -> float:
    """Return the time.perf_counter() at which the first token of a response arrived."""
    timing = await complete(await first_model(target.url, target.api_key), TEXT, 1)
    return timing.started + timing.ttft


def drop_page_cache() -> None:
    """Make the kernel drop all cached files, as after a boot; StartupError without permission."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3\n")
    except OSError as error:
        msg = f"the page cache cannot be dropped ({error}); run as root, or leave out --cold"
        raise StartupError(msg) from error


def _healthy(target: Target) -> bool:
    try:
        return asyncio.run(fetch(target, "/health"))[0] == 200
    except LoadError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def server_memory(arguments: Sequence[str]) -> dict[str, tuple[str, float]]:
    """Return {metric: (unit, value)}: a server's start time, and memory after a short request."""
    with ServerProcess(arguments) as server:
        target = asyncio.run(first_model(server.url, server.key))
        timing = asyncio.run(complete(target, PROMPT, 1))
        time.sleep(SETTLE_S)
        found = processes(server.process.pid)
        for process in found:
            heavy = mapped(process.pid, "torch")
            if heavy:
                msg = (
                    f"process {process.pid} of the server mapped {heavy[0]}; "
                    "only models that run without torch can be measured"
                )
                raise StartupError(msg)
        memory = [p.memory_full_info() for p in found]
        return {
            "ready": ("s", server.ready_s),
            "first_token": ("s", timing.ttft),
            "rss": ("MiB", sum(m.rss for m in memory) / MIB),
            "pss": ("MiB", sum(getattr(m, "pss", m.rss) for m in memory) / MIB),
            "processes": ("count", float(len(found))),
        }


def processes(root: int) -> list[psutil.Process]:
    """Return the process `root` and all its descendants."""
    import psutil

    process = psutil.Process(root)
    return [process, *process.children(recursive=True)]


def mapped(pid: int, word: str) -> list[str]:
    """Return the paths of shared libraries with `word` in their name that a process has mapped."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return []
    return sorted(set(re.findall(rf"/\S*{word}\S*\.so\S*", maps)))


def engine_memory(config: EngineConfig) -> EngineMemory:
    """Load the model in a separate engine process, and return its memory figures."""
    return asyncio.run(_engine_memory(config))


async def _engine_memory(config: EngineConfig) -> EngineMemory:
    from cpuserve.engine.ipc import AddRequest
    from cpuserve.engine.process import ProcessClient
    from cpuserve.sampling.params import SamplingParams

    client = ProcessClient.spawn(config)
    try:
        await client.wait_ready()
        async for _ in client.generate(AddRequest.of(PROMPT, SamplingParams(max_tokens=1))):
            pass
        await asyncio.sleep(SETTLE_S)
        report = await client.ask("report")
    finally:
        await client.close()
    memory = report.get("memory")
    held: dict[str, int] = memory if isinstance(memory, dict) else {}
    return EngineMemory(
        _bytes(report.get("rss_before_load_bytes")),
        _bytes(report.get("load_peak_bytes")),
        held.get("weights_resident", 0),
        held.get("kv_resident", 0),
    )


def _bytes(value: object) -> int:
    return int(value) if isinstance(value, int | float) else 0
