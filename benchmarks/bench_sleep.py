#!/usr/bin/env python3
"""Memory of a server awake and asleep, and the times of a wake and of a swap; JSON lines.

usage: bench_sleep.py MODEL [--other MODEL] [--rounds 5] [--idle 1.0] [--flag=value of serve]

The first server serves MODEL with `--sleep-idle`. In each round a short request wakes it (`wake`,
the time to its first token), its memory is read, it falls asleep, and its memory is read again.
The second server serves MODEL and `--other` (without it, MODEL twice). Each may take 60 %
of the free memory for its KV cache, so only one fits. Requests alternate between them, and `swap`
is the time to the first token. `wake_cpu` and `swap_cpu` are the CPU seconds of all processes
of the server in the same time. The first wake and the first two swaps do not count.
"""

import argparse
import asyncio
import json
import sys
import time

import psutil

from cpuserve.bench.driver import LoadError, Target, complete, fetch, first_model
from cpuserve.bench.load import MIB, SETTLE_S, TEXT, processes
from cpuserve.bench.observe import where
from cpuserve.bench.schema import record
from cpuserve.bench.server import ServerProcess
from cpuserve.cli.bench_flags import number

ASLEEP_TIMEOUT_S = 60.0
POLL_S = 0.05
TRIM_S = 2.0  # the front end returns free memory a second after the engines have ended
NAMES = ("one", "two")
KV_SHARE = 0.6


def memory(pid):
    """Return the resident, proportional and private memory of all processes in MiB."""
    parts = [p.memory_full_info() for p in processes(pid)]
    totals = {kind: sum(getattr(m, kind) for m in parts) for kind in ("rss", "pss", "uss")}
    return {kind: total / MIB for kind, total in totals.items()}


def cpu_seconds(pid):
    """Return the CPU seconds of all processes, including children that have ended."""
    front, *children = processes(pid)
    times = front.cpu_times()
    ended = times.children_user + times.children_system
    return times.user + times.system + ended + sum(sum(c.cpu_times()[:2]) for c in children)


def wait_asleep(pid):
    """Wait until the engines have ended; LoadError if they do not."""
    deadline = time.perf_counter() + ASLEEP_TIMEOUT_S
    while psutil.Process(pid).children():
        if time.perf_counter() > deadline:
            msg = f"the server did not fall asleep within {ASLEEP_TIMEOUT_S:g} s; is it in use?"
            raise LoadError(msg)
        time.sleep(POLL_S)
    time.sleep(TRIM_S)


def first_token(target, pid):
    """Return (wall, CPU) seconds until a short request has its first and only token."""
    before = cpu_seconds(pid)
    timing = asyncio.run(complete(target, TEXT, 1))
    return timing.ttft, cpu_seconds(pid) - before


def measure_sleep(args, more):
    """Return (where, {(metric, unit): samples}) of a server that sleeps and wakes."""
    found = {}
    with ServerProcess([args.model, f"--sleep-idle={args.idle}", *more]) as server:
        pid = server.process.pid
        target = asyncio.run(first_model(server.url, server.key))
        here = asyncio.run(where(target))
        for i in range(args.rounds + 1):
            wait_asleep(pid)
            asleep = memory(pid)
            wall, cpu = first_token(target, pid)
            time.sleep(min(SETTLE_S, args.idle / 2))
            if i:
                for kind, size in asleep.items():
                    found.setdefault((f"asleep_{kind}", "MiB"), []).append(size)
                for kind, size in memory(pid).items():
                    found.setdefault((f"awake_{kind}", "MiB"), []).append(size)
                found.setdefault(("wake", "s"), []).append(wall)
                found.setdefault(("wake_cpu", "s"), []).append(cpu)
    return here, found


def check_alone(server, name):
    """Raise LoadError unless the model `name` is loaded and no other is."""
    _, body = asyncio.run(fetch(Target(server.url, name, server.key), "/api/ps"))
    loaded = [model["name"] for model in json.loads(body)["models"]]
    if loaded != [name]:
        msg = f"{loaded} are loaded, so there was no swap; give a larger --kv-cache-memory"
        raise LoadError(msg)


def measure_swaps(args, more):
    """Return {(metric, unit): samples} of two models that take turns in memory."""
    kv = int(KV_SHARE * psutil.virtual_memory().available / MIB)
    flags = [
        f"--served-model-name={NAMES[0]}",
        f"--also-serve={NAMES[1]}={args.other or args.model}",
        f"--kv-cache-memory={kv}MiB",
    ]
    swaps = []
    with ServerProcess([args.model, *flags, *more]) as server:
        pid = server.process.pid
        for _ in range(args.rounds + 1):
            for name in reversed(NAMES):
                swaps.append(first_token(Target(server.url, name, server.key), pid))
                check_alone(server, name)
    walls, cpus = zip(*swaps[len(NAMES) :], strict=True)
    return {("swap", "s"): walls, ("swap_cpu", "s"): cpus}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--other", help="the second model of the swaps (default: MODEL again)")
    parser.add_argument("--rounds", type=number(int, 1), default=5)
    parser.add_argument("--idle", type=float, default=1.0)
    args, more = parser.parse_known_args()
    here, found = measure_sleep(args, more)
    found |= measure_swaps(args, more)
    shape = {"idle_s": args.idle, "other": args.other or args.model}
    for (name, unit), samples in found.items():
        print(record(name, unit, samples, here, better="less", parameters=shape).to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
