#!/usr/bin/env python3
"""CPU time of the front end with records of requests, as a multiple of that without; JSON lines.

usage: bench_records.py [MODEL] [--streams 64] [--rate 200] [--tokens 256] [--pairs 200]
                        [--dialects completions chat] [--kinds logged observed audited]
                        [--instructions]

One server has requests with and without records, in rounds that take turns. Its engine computes
nothing (scripted_server.py). `logged` = the access log of all requests; `observed` = also traces,
which go to a collector, and a monitor that reads /metrics every 15 s; `audited` = also the
audit log. In a round, --streams clients each send a request, for --tokens tokens on average.
A sample is the CPU time of a round of the front end's process (all threads, until the records are
written), divided by the CPU time of the next round without records. /metrics is read once
after a round, and counts as often as a monitor reads it while requests run. Facts have the interval
that has the median with a probability of 95 %, the CPU time of a token without records,
and how often a monitor reads in a round.

CPU time depends on what else the machine does. --instructions counts the instructions of the front
end in place of it, but none of the system. The server then runs in Valgrind, 50 times as slow:
choose a --rate that it can keep up with, such as 10 with 32 streams, and few pairs.
"""

import argparse
import asyncio
import math
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from bench_front_end import DIALECTS, HERE, Clock, Stream, body_of, generated

from cpuserve.bench.driver import first_model
from cpuserve.bench.http import exchange
from cpuserve.bench.observe import where
from cpuserve.bench.schema import record
from cpuserve.bench.server import ServerProcess
from cpuserve.cli.bench_flags import number
from cpuserve.loader.builtin import DEFAULT

# All records have been written after these times, the second in Valgrind; traces take longest.
# One export has the traces of a round; each export of a busy server has 256 requests.
TRACES_S = 3.0
WRITTEN_S, WRITTEN_SLOWLY_S = TRACES_S + 1, TRACES_S + 7
SCRAPES_S = 15.0  # Prometheus' usual interval is 15 s (scrape_interval in deploy/monitoring)
KINDS = ("logged", "observed", "audited")


class Collector(BaseHTTPRequestHandler):
    """Takes traces, and forgets them."""

    requests = 0

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        Collector.requests += 1
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_):
        """Log nothing."""


class Instructions:
    """The instructions of a process that Valgrind runs with the options of `command`."""

    def __init__(self, pid, folder):
        self.pid, self.folder, self.count = pid, Path(folder), 0

    @staticmethod
    def command(folder):
        """Return the command that runs a server in Valgrind."""
        return ["valgrind", "--quiet", "--tool=callgrind", f"--callgrind-out-file={folder}/counts"]

    def read(self):
        """Return how many instructions have run; each reading writes a file with the new ones."""
        subprocess.run(["callgrind_control", "-d", str(self.pid)], check=True, capture_output=True)
        while not (found := self.dumped()):
            time.sleep(0.2)
        self.count += int(found[1])
        return self.count

    def dumped(self):
        """Return the match of the total in the next file, and remove it; None if there is none."""
        for file in self.folder.glob("counts.*"):
            if found := re.search(r"^totals: (\d+)$", file.read_text(), re.MULTILINE):
                file.unlink()
                return found
        return None


async def run(target, clock, args, dialect, kind, seed):
    """Return (CPU time or instructions, tokens, readings) of a round with the records of `kind`."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 2 * args.tokens - 1) for _ in range(args.streams)]
    query = "" if kind == KINDS[-1] else f"?{kind}"

    async def client(length):
        path, body = body_of(dialect, target.model, False, length)
        more = {"api_key": target.api_key, "on_body": Stream(kept=False).feed}
        response = await exchange(target.url, path + query, body, **more)
        if response.code != 200:
            sys.exit(f"{dialect}: HTTP {response.code}")

    tokens, before = await generated(target), await asyncio.to_thread(clock.read)
    begun = time.perf_counter()
    await asyncio.gather(*(client(each) for each in lengths))
    readings = (time.perf_counter() - begun) / SCRAPES_S
    await asyncio.sleep(WRITTEN_SLOWLY_S if args.instructions else WRITTEN_S)
    used = await asyncio.to_thread(clock.read) - before
    tokens = await generated(target) - tokens
    if tokens != sum(lengths):
        sys.exit(f"{dialect}: {tokens:.0f} tokens in place of {sum(lengths)}")
    if kind not in ("bare", "logged"):
        reading = await asyncio.to_thread(clock.read) - before - used  # by `generated`
        used += readings * reading
    return used, tokens, readings


async def rounds(server, args, dialect, clock):
    """Return (where, {kind: [(`clock` a token without records, with them)]}, readings)."""
    target = await first_model(server.url, server.key)
    found, readings = {kind: [] for kind in args.kinds}, []
    for kind in ("bare", *KINDS):  # what only the first requests need does not count
        await run(target, clock, args, dialect, kind, 0)
    for pair in range(args.pairs):
        for kind in args.kinds:
            took = {}
            for each in ("bare", kind) if pair % 2 else (kind, "bare"):
                used, tokens, each_readings = await run(target, clock, args, dialect, each, pair)
                took[each] = used / tokens
                readings.append(each_readings)
            found[kind].append((took["bare"], took[kind]))
    return await where(target), found, statistics.median(readings)


def interval(samples):
    """Return the bounds that have the median with a probability of 95 %, whatever scatters."""
    ordered, count = sorted(samples), len(samples)
    cut = max(0, math.floor((count - 1.96 * math.sqrt(count)) / 2))
    return ordered[cut], ordered[-1 - cut]


def measure(args, dialect, folder, endpoint):
    """Measure a dialect with a new server, and print the records."""
    flags = [args.model, f"--chat-template={HERE / 'thinking_tools.jinja'}"]
    flags += [f"--max-num-seqs={args.streams}", f"--itl-target-ms={round(1e3 / args.rate)}"]
    flags += ["--tool-call-parser=none", "--reasoning-parser=none", "--access-log=all"]
    flags += [f"--otlp-traces-endpoint={endpoint}", f"--audit={folder}/{dialect}"]
    under = ["env", f"OTEL_BSP_SCHEDULE_DELAY={TRACES_S * 1e3:.0f}"]
    under += Instructions.command(folder) if args.instructions else []
    with ServerProcess(flags, "scripted_server", under) as server:
        pid = server.process.pid
        clock = Instructions(pid, folder) if args.instructions else Clock(pid)
        here, found, readings = asyncio.run(rounds(server, args, dialect, clock))
    bare_name = "instructions_a_token" if args.instructions else "ns_a_token"
    for kind, pairs in found.items():
        shares = [with_records / bare for bare, with_records in pairs]
        low, high = interval(shares)
        facts = {
            "low": round(low, 4),
            "high": round(high, 4),
            bare_name: round(statistics.median(bare for bare, _ in pairs)),
            "readings": round(readings, 3),
        }
        shape = {"dialect": dialect, "streams": args.streams, "tokens": args.tokens}
        name = f"front_end_{kind}"
        print(
            record(
                name, "x bare", shares, here, better="less", parameters=shape, facts=facts
            ).to_json(),
            flush=True,
        )


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default=DEFAULT)
    parser.add_argument("--streams", type=number(int, 1), default=64)
    parser.add_argument("--rate", type=number(float, 0.1), default=200, help="of one stream")
    parser.add_argument("--tokens", type=number(int, 1), default=256, help="of a request")
    parser.add_argument("--pairs", type=number(int, 1), default=200)
    parser.add_argument("--instructions", action="store_true", help="in place of CPU time")
    parser.add_argument("--dialects", nargs="+", choices=DIALECTS, default=["completions", "chat"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    args = parser.parse_args(argv)
    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as collector:
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{collector.server_port}"
        with tempfile.TemporaryDirectory() as folder:
            for dialect in args.dialects:
                measure(args, dialect, folder, endpoint)
        collector.shutdown()
    if not Collector.requests:
        sys.exit("no traces have come to the collector")
    return 0


if __name__ == "__main__":
    sys.exit(main())
