#!/usr/bin/env python3
"""CPU time of the front end with records of requests, as a multiple of that without; JSON lines.

usage: bench_records.py [MODEL] [--streams 64] [--rate 200] [--tokens 256] [--pairs 40]
                        [--dialects completions chat] [--kinds logged observed audited]

One server has requests with and without records, in rounds that take turns. Its engine computes
nothing (scripted_server.py). `logged` = the access log of all requests; `observed` = also traces,
which go to a collector, and a monitor that reads /metrics once in a round; `audited` = also the
audit log. In a round, --streams clients each send a request, for --tokens tokens on average.
A sample is the CPU time of a round of the front end's process (all threads, until the records are
written), divided by that of the round without records beside it. Facts have the mean of the
samples, its standard error, and the CPU time of a token without records.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import psutil
from bench_front_end import DIALECTS, HERE, Clock, Stream, body_of, generated

from cpuserve.bench.driver import fetch, first_model
from cpuserve.bench.http import exchange
from cpuserve.bench.observe import where
from cpuserve.bench.schema import record
from cpuserve.bench.server import ServerProcess
from cpuserve.cli.bench_flags import number
from cpuserve.loader.builtin import DEFAULT

WRITTEN_S = 2.0  # all records have been written after this time; traces take longest
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


async def run(target, process, args, dialect, kind, seed):
    """Return (CPU seconds, tokens) of a round with the records of `kind`."""
    rng, clock = random.Random(seed), Clock(process.pid)
    lengths = [rng.randint(1, 2 * args.tokens - 1) for _ in range(args.streams)]
    query = "" if kind == KINDS[-1] else f"?{kind}"

    async def client(length):
        path, body = body_of(dialect, target.model, False, length)
        more = {"api_key": target.api_key, "on_body": Stream(kept=False).feed}
        response = await exchange(target.url, path + query, body, **more)
        if response.code != 200:
            sys.exit(f"{dialect}: HTTP {response.code}")

    tokens, cpu = await generated(target), clock.read()
    clients = asyncio.gather(*(client(each) for each in lengths))
    if kind not in ("bare", "logged"):
        await fetch(target, "/metrics")
    await clients
    await asyncio.sleep(WRITTEN_S)
    cpu, tokens = clock.read() - cpu, await generated(target) - tokens
    if tokens != sum(lengths):
        sys.exit(f"{dialect}: {tokens:.0f} tokens in place of {sum(lengths)}")
    return cpu / 1e9, tokens


async def rounds(server, args, dialect):
    """Return (where, {kind: [(CPU time a token without records, with them)]})."""
    target, process = await first_model(server.url, server.key), psutil.Process(server.process.pid)
    found = {kind: [] for kind in args.kinds}
    for kind in ("bare", *KINDS):  # what only the first requests need does not count
        await run(target, process, args, dialect, kind, 0)
    for pair in range(args.pairs):
        for kind in args.kinds:
            took = {}
            for each in ("bare", kind) if pair % 2 else (kind, "bare"):
                cpu, tokens = await run(target, process, args, dialect, each, pair)
                took[each] = cpu / tokens
            found[kind].append((took["bare"], took[kind]))
    return await where(target), found


def measure(args, dialect, folder, endpoint):
    """Measure a dialect with a new server, and print the records."""
    flags = [args.model, f"--chat-template={HERE / 'thinking_tools.jinja'}"]
    flags += [f"--max-num-seqs={args.streams}", f"--itl-target-ms={round(1e3 / args.rate)}"]
    flags += ["--tool-call-parser=none", "--reasoning-parser=none", "--access-log=all"]
    flags += [f"--otlp-traces-endpoint={endpoint}", f"--audit={folder}/{dialect}"]
    with ServerProcess(flags, "scripted_server") as server:
        here, found = asyncio.run(rounds(server, args, dialect))
    for kind, pairs in found.items():
        shares = [with_records / bare for bare, with_records in pairs]
        error = statistics.stdev(shares) / len(shares) ** 0.5 if len(shares) > 1 else 0.0
        facts = {
            "mean": round(statistics.mean(shares), 4),
            "error": round(error, 4),
            "us_a_token": round(1e6 * statistics.median(bare for bare, _ in pairs), 2),
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
    parser.add_argument("--pairs", type=number(int, 1), default=40)
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
