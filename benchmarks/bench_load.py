#!/usr/bin/env python3
"""Time from the command to a server that answers, and memory of all its processes; JSON lines.

usage: bench_load.py MODEL [--rounds N] [serve options]

Fails if a process of the server has mapped torch: serving must not need it. "besides_weights" is
the private memory of all processes minus the tensors in the model's files, after one short request
(KV blocks take memory when they are first used).
"""

import argparse
import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

from cpuserve.bench.driver import LoadError, Target, complete, fetch
from cpuserve.bench.schema import Where, record
from cpuserve.bench.server import Server, serve_command
from cpuserve.config.load import from_arguments
from cpuserve.entrypoints.prepare import find, model_facts

MIB = 1 << 20
UNITS = {"ready": "s", "first_token": "s", "processes": "count"}


def processes(root: int) -> list[psutil.Process]:
    """The server's process and all below it."""
    process = psutil.Process(root)
    return [process, *process.children(recursive=True)]


def mapped(process: psutil.Process, word: str) -> list[str]:
    """Files with `word` in their name that the process has mapped."""
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    return sorted(set(re.findall(rf"/\S*{word}\S*\.so\S*", maps)))


def tensor_bytes(model: str) -> int:
    """Bytes of the model's tensors."""
    options = from_arguments({"model": model}).options
    return model_facts(options, find(options))[1].weight_bytes


def measure(model: str, more: list[str]) -> dict[str, float]:
    """One start: seconds to HTTP 200 on /health, to the first token, and memory after it."""
    with Server([model, *more]) as server:
        target = Target(server.url, "")
        status, _ = asyncio.run(fetch(target, "/health"))
        assert status == 200, status
        timing = asyncio.run(complete(target, [400, 401, 402], 1))
        found = processes(server.process.pid)
        for process in found:
            heavy = mapped(process, "torch")
            if heavy:
                raise SystemExit(f"bench_load: process {process.pid} mapped {heavy[0]}")
        memory = [p.memory_full_info() for p in found]
        return {
            "ready": server.ready_s,
            "first_token": timing.ttft,
            "rss": sum(m.rss for m in memory) / MIB,
            "private": sum(m.uss for m in memory) / MIB,
            "besides_weights": (sum(m.uss for m in memory) - tensor_bytes(model)) / MIB,
            "processes": float(len(found)),
        }


def time_to_health(model: str, more: list[str], port: int) -> float:
    """Seconds from the command to the first 200 of /health."""
    command = serve_command([model, *more, "--port", str(port)])
    started = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            try:
                status, _ = asyncio.run(fetch(Target(f"http://127.0.0.1:{port}", ""), "/health"))
            except LoadError:
                status = 0
            if status == 200:
                return time.perf_counter() - started
            time.sleep(0.01)
    finally:
        process.terminate()
        process.wait()
    raise SystemExit("bench_load: the server ended before it was ready")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8123)
    args, more = parser.parse_known_args()
    where = Where(host="", isa="", threads=0, model=args.model)
    health = [time_to_health(args.model, more, args.port) for _ in range(args.rounds)]
    print(record("health", "s", health, where).to_json())
    rounds = [measure(args.model, more) for _ in range(args.rounds)]
    for name in rounds[0]:
        unit = UNITS.get(name, "MiB")
        print(record(name, unit, [r[name] for r in rounds], where).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
