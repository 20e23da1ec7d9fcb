"""Keeps a real server busy for minutes, and measures whether its processes grow.

    python -m tests.soak.driver [MODEL] --seconds 1800 [--clients 6] [--seed 0] [-- OPTION...]

Clients do what clients.py has, at once, to a server on the loopback interface. Before and after,
the server is idle, and what its processes have is compared: descriptors, threads, processes, shared
memory. During the load, samples give slopes with their errors. The exit code is 1 if the server has
faults: a response of 500, a traceback in its log, or more of anything than its pools may hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.api.server_process import free_port
from tests.api.tools import TEMPLATE
from tests.fuzz.dialects import REFUSALS
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S
from tests.helpers.tiny import tiny_model
from tests.soak.clients import DOINGS, Client
from tests.soak.processes import NAMES, Held, Slope, held, slopes

SAMPLES = 120  # in a run
# Stores that are full before the first measurement, so that growth after it is a fault.
SMALL = ("--kv-cache-memory", "32M", "--stored-responses", "50")
# What pools of the server may have more of after the load than before: threads of the front end (of
# asyncio: CPUs + 4, and those that wait for templates) and processes that render (4), with their
# sockets. A leak grows with the requests.
MAY_GROW = Held(rss=400 << 20, fds=32, threads=32, processes=6, shm=4)
# The status of a request that ended without a response, and the share of them that may: a server
# that refuses a body early may close the connection while the client still sends.
LOST, MOST_LOST = -1, 0.01
FAULT = re.compile(r"Traceback|^\S+ \S+ (ERROR|CRITICAL) ", re.MULTILINE)


@dataclass(slots=True)
class Soaked:
    """What a run has found. statuses: of responses, by what the client did."""

    before: Held
    after: Held
    slopes: list[Slope]
    statuses: dict[str, Counter[int]]
    log: str
    seconds: float

    @property
    def requests(self) -> int:
        """The number of requests."""
        return sum(sum(each.values()) for each in self.statuses.values())

    @property
    def faults(self) -> list[str]:
        """What a server must not do."""
        found = [
            f"a fault in the log: {self.log[m.start() :][:2000]}" for m in FAULT.finditer(self.log)
        ]
        for doing, statuses in self.statuses.items():
            bad = [status for status in statuses if status >= 500 and status not in REFUSALS]
            found += [f"{statuses[status]} responses {status} to {doing}" for status in bad]
        lost = sum(each[LOST] for each in self.statuses.values())
        if lost > MOST_LOST * self.requests:
            found.append(f"{lost} of {self.requests} requests got no response")
        for name in NAMES:
            grown = getattr(self.after, name) - getattr(self.before, name)
            if grown > getattr(MAY_GROW, name):
                found.append(f"{name} grew by {grown}, from {getattr(self.before, name)}")
        return found[:20]


@dataclass(slots=True)
class Server:
    """A server process, and the file with what it has written."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    statuses: dict[str, Counter[int]] = field(default_factory=dict)

    async def idle(self, http: httpx.AsyncClient) -> Held:
        """Wait until nothing runs; return what the processes have then."""
        names = ("num_requests_running", "num_requests_waiting")

        async def quiet() -> bool:
            told = (await http.get(f"{self.url}/metrics")).text
            values = [re.search(rf"vllm:{name}\{{[^}}]*\}} (\S+)", told) for name in names]
            return all(each is not None and float(each[1]) == 0 for each in values)

        for _ in range(int(PATIENCE_S)):
            if await quiet():
                break
            await asyncio.sleep(1)
        else:
            msg = "requests run although no client is there"
            raise AssertionError(msg)
        # Connections and idle forks end by themselves: the smallest of some samples counts.
        samples = []
        for _ in range(4):
            await asyncio.sleep(0.5)
            samples.append(held(self.process.pid))
        return Held(*(min(getattr(each, name) for each in samples) for name in NAMES))


@contextlib.asynccontextmanager
async def running(model: str, *options: str) -> AsyncIterator[Server]:
    """Run `cpuserve serve MODEL` until the block ends; it must end with 0 at SIGTERM."""
    with tempfile.TemporaryDirectory(prefix="cpuserve-soak-") as place:
        home, port = Path(place), free_port()
        (home / "template.jinja").write_text(TEMPLATE)
        command = [sys.executable, "-m", "cpuserve", "serve", model, "--port", str(port)]
        command += [
            "--files-dir",
            str(home / "files"),
            "--chat-template",
            str(home / "template.jinja"),
        ]
        log = home / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *options], **child_options(), stdout=file, stderr=subprocess.STDOUT
            )
        server = Server(f"http://127.0.0.1:{port}", process, log)
        try:
            async with httpx.AsyncClient() as http:
                await _ready(server, http)
            yield server
            process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(process.wait, PATIENCE_S)
            assert code == 0, f"exit code {code}: {log.read_text()[-2000:]}"
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


async def _ready(server: Server, http: httpx.AsyncClient) -> None:
    while True:
        assert server.process.poll() is None, server.log.read_text()
        with contextlib.suppress(httpx.TransportError):
            if (await http.get(f"{server.url}/health")).status_code == 200:
                return
        await asyncio.sleep(0.1)


async def load(server: Server, model: str, clients: int, seconds: float, seed: int) -> None:
    """Let clients do random things for a time, and count the statuses of their responses."""
    end = time.monotonic() + seconds

    async def act(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        # An idle connection ends here long before it does in the server: none is lost in between.
        limits = httpx.Limits(max_keepalive_connections=2, keepalive_expiry=1)
        async with httpx.AsyncClient(
            base_url=server.url, limits=limits, timeout=PATIENCE_S
        ) as http:
            client = Client(http, rng, model)
            while time.monotonic() < end:
                (doing,) = rng.choices([*DOINGS], [*DOINGS.values()])
                counts = server.statuses.setdefault(doing.__name__.strip("_"), Counter())
                try:
                    counts.update(await doing(client))
                except httpx.TransportError:
                    counts.update([LOST])

    await asyncio.gather(*(act(number) for number in range(clients)))


async def soak(
    model: str, seconds: float, *, clients: int = 6, seed: int = 0, options: tuple[str, ...] = SMALL
) -> Soaked:
    """Run a server under load for `seconds`, after a tenth of this time to warm up."""
    async with running(model, *options) as server:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            name = (await http.get(f"{server.url}/v1/models")).json()["data"][0]["id"]
            await load(server, name, clients, max(10.0, seconds / 10), seed + 1)
            before = await server.idle(http)
        server.statuses.clear()
        samples: list[tuple[float, Held]] = []
        begun = time.monotonic()

        async def sample() -> None:
            while True:
                samples.append(
                    (time.monotonic() - begun, await asyncio.to_thread(held, server.process.pid))
                )
                await asyncio.sleep(seconds / SAMPLES)

        sampling = asyncio.create_task(sample())
        await load(server, name, clients, seconds, seed)
        sampling.cancel()
        took = time.monotonic() - begun
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            after = await server.idle(http)
        log = server.log.read_text(errors="replace")
    return Soaked(before, after, slopes(samples), server.statuses, log, took)


def report(found: Soaked) -> str:
    """Return the figures of a run as lines."""
    lines = [f"{found.requests} requests in {found.seconds:.0f} s"]
    for doing, statuses in sorted(found.statuses.items()):
        lines.append(f"  {doing:<12} {dict(sorted(statuses.items()))}")
    lines.append(f"{'':<12}{'idle before':>14}{'idle after':>14}{'slope an hour':>18}{'error':>14}")
    for slope in found.slopes:
        before, after = (getattr(each, slope.name) for each in (found.before, found.after))
        lines.append(
            f"  {slope.name:<10}{before:>14}{after:>14}{slope.an_hour:>18.1f}{slope.error:>14.1f}"
        )
    return "\n".join([*lines, *(f"FAULT: {each}" for each in found.faults)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="default: a tiny model")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="of the server, after --")
    parser.add_argument("--log", type=Path, help="where the log of the server goes")
    args = parser.parse_args()
    model = args.model or str(tiny_model("llama", max_position_embeddings=4096))
    options = (*SMALL, *args.options)
    run = soak(model, args.seconds, clients=args.clients, seed=args.seed, options=options)
    found = asyncio.run(run)
    if args.log:
        args.log.write_text(found.log)
    print(report(found))
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
