"""Keeps a real server busy for minutes, and measures whether its processes grow.

    python -m tests.soak.driver [MODEL] --seconds 1800 [--warm-up 6000] [--clients 6] [--seed 0]
        [-- OPTION...]

Clients do what clients.py has, at once, to a server on the loopback interface. Before and after,
the server is idle, and what its processes have is compared: descriptors, threads, processes, shared
memory. During the load, samples give slopes with their errors. The exit code is 1 if the server has
faults: a response of 500, a traceback in its log, more of anything than its pools may hold, a
thread of the front end that nothing explains, or a figure that grows.

A figure grows if its slope is more than SURE of its errors above zero. A run must be able to tell:
an error above that of FINEST is a fault too, so that neither noise nor a short run passes.

What is bounded is full before the first measurement: requests at the same time start the threads of
all pools, stores have small bounds, and clients do each thing as often as its store needs.
Then --warm-up random things follow, however long they take, because heaps grow until each thread
has held its longest jobs: what is left of this growth depends on requests, and not on time.
malloc keeps no caches for threads (WITHOUT_CACHES): they fill for hours, and hid such growth.
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
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
import psutil

from tests.api.server_process import free_port
from tests.api.tools import TEMPLATE
from tests.fuzz.dialects import REFUSALS
from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.tiny import tiny_model
from tests.soak.clients import DOINGS, FILLS, LARGE, Client, Doing
from tests.soak.inside import Inside
from tests.soak.processes import (
    FRONT_END,
    NAMES,
    ROLES,
    Held,
    Slope,
    held,
    resident,
    slope,
    slopes,
    slopes_of_roles,
)

SAMPLES = 120  # in a run
# The library of tokenizers remembers the tokens of so many words, with about 180 bytes for each.
KNOWN_WORDS = 10_000
# What clients do before the first measurement, each with one to ten requests. The front end and the
# engine of a tiny model have their size after 2,000 (81.7 and 50.1 MiB; 45,000 requests later, 81.9
# and 50.2), and jobs that come once in 1,000 need more.
WARM_UP = 6_000
# Stores that are full before the first measurement, so that growth after it is a fault: the server
# remembers at most as many batches as files, and evicted blocks at most as many as the cache has.
SMALL = ("--kv-cache-memory", "8M", "--stored-responses", "50", "--files-count", "50")
# malloc of the GNU C library keeps freed blocks for each thread, and counts them as in use: up to 7
# blocks of each of 64 sizes, in chunks of 32 to 1,040 bytes. These are 234 KiB a thread, and
# 5.5 MiB for the 24 threads of a front end. They fill for hours, with 70 bytes a request at first,
# so that a leak could not be told from them. So the server has none of them.
WITHOUT_CACHES = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
# The pools of threads are full when so many rounds of requests have started no thread.
STEADY_ROUNDS, MOST_ROUNDS = 3, 30
# What the server may have more of after the load than before: processes that render (4), with their
# sockets, and threads of pools that the rounds have not started. A leak grows with the requests.
MAY_GROW = Held(rss=128 << 20, fds=32, threads=32, processes=6, shm=4)
# A figure grows if its slope is so many errors above zero: noise does that once in 700 slopes.
SURE = 3.0
# The most error of a slope, in an hour, of a run that can tell whether its figure grows. At 60
# requests a second, a MiB is 5 bytes a request. What malloc has in use tells more than the memory
# of the front end, which gives freed pages back now and then; the sum has the noise of all of them.
FINEST: Mapping[str, float] = {
    "rss": 20 << 20, "fds": 20.0, "threads": 10.0, "processes": 10.0, "shm": 5.0,
    FRONT_END: 8 << 20, **dict.fromkeys(ROLES.values(), 8 << 20), "engine": 1 << 20,
    "blocks": 20_000.0, "malloc": 1 << 20,
}  # fmt: skip
# The status of a request that ended without a response, and the share of them that may: a server
# that refuses a body early may close the connection while the client still sends.
LOST, MOST_LOST = -1, 0.01
FAULT = re.compile(r"Traceback|^\S+ \S+ (ERROR|CRITICAL) ", re.MULTILINE)


@dataclass(slots=True)
class Soaked:
    """What a run has found. statuses: of responses, by what the client did.

    slopes: also of the memory of each kind of process, and of what the front end tells of itself.
    judges: whether a slope is a fault if it is above zero, or if nobody can tell that.
    inside: what the front end tells at the end.
    """

    before: Held
    after: Held
    slopes: list[Slope]
    statuses: dict[str, Counter[int]]
    log: str
    seconds: float
    judges: bool = False
    inside: Inside = field(default_factory=lambda: Inside([], 0, 0))

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
        found += self.inside.strange_threads
        if self.judges:
            found += [fault for each in self.slopes for fault in _faults_of(each)]
        return found[:20]


def _faults_of(slope: Slope) -> list[str]:
    """Return why a slope is a fault: it is above zero, or its error is too large to tell that."""
    told = f"{slope.name} grows by {slope.an_hour:.4g} an hour, with an error of {slope.error:.4g}"
    if slope.an_hour > SURE * slope.error:
        return [told]
    if slope.error > FINEST[slope.name]:
        return [f"nobody can tell whether {told}: more than {FINEST[slope.name]:.4g}"]
    return []


@dataclass(slots=True)
class Server:
    """A server process, and the file with what it has written."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    told: Path  # what the front end tells of itself (inside.py)
    statuses: dict[str, Counter[int]] = field(default_factory=dict)

    def inside(self) -> Inside:
        """Return what the front end tells of itself now."""
        known = self._told()
        self.process.send_signal(signal.SIGUSR1)
        wait_until(lambda: len(self._told()) > len(known), "the front end told nothing of itself")
        return msgspec.json.decode(self._told()[-1], type=Inside)

    def _told(self) -> list[bytes]:
        """Return all whole lines."""
        found = self.told.read_bytes() if self.told.exists() else b""
        return found[: found.rfind(b"\n") + 1].splitlines()

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
        told = home / "told"
        (home / "template.jinja").write_text(TEMPLATE)
        command = [sys.executable, "-m", "tests.soak.inside", str(told), "serve", model]
        command += ["--port", str(port), "--files-dir", str(home / "files")]
        command += ["--chat-template", str(home / "template.jinja")]
        log = home / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [*command, *options],
                **child_options(**WITHOUT_CACHES),
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        server = Server(f"http://127.0.0.1:{port}", process, log, told)
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


Choice = Callable[[random.Random], Doing | None]  # what a client does next; None = it ends


def for_seconds(seconds: float) -> Choice:
    """Clients do random things for a time."""
    end = time.monotonic() + seconds

    def choose(rng: random.Random) -> Doing | None:
        if time.monotonic() >= end:
            return None
        (doing,) = rng.choices([*DOINGS], [*DOINGS.values()])
        return doing

    return choose


def for_count(count: int) -> Choice:
    """Clients do so many random things, all of them together."""
    left = iter(range(count))

    def choose(rng: random.Random) -> Doing | None:
        if next(left, None) is None:
            return None
        (doing,) = rng.choices([*DOINGS], [*DOINGS.values()])
        return doing

    return choose


def filling(counts: Mapping[Doing, int]) -> Choice:
    """Clients do each thing so often, in any order."""
    left = Counter(counts)

    def choose(rng: random.Random) -> Doing | None:
        kinds = [doing for doing, count in left.items() if count > 0]
        if not kinds:
            return None
        doing = rng.choice(kinds)
        left[doing] -= 1
        return doing

    return choose


async def load(server: Server, model: str, clients: int, seed: int, choose: Choice) -> None:
    """Let clients do what `choose` says until they end, and count the statuses of responses."""

    async def act(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        # An idle connection ends here long before it does in the server: none is lost in between.
        limits = httpx.Limits(max_keepalive_connections=2, keepalive_expiry=1)
        async with httpx.AsyncClient(
            base_url=server.url, limits=limits, timeout=PATIENCE_S
        ) as http:
            client = Client(http, rng, model)
            while (doing := choose(rng)) is not None:
                counts = server.statuses.setdefault(doing.__name__.strip("_"), Counter())
                try:
                    counts.update(await doing(client))
                except httpx.TransportError:
                    counts.update([LOST])

    await asyncio.gather(*(act(number) for number in range(clients)))


async def fill_words(server: Server, model: str) -> None:
    """Let the tokenizer of the front end see as many words as it remembers."""
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
        for begin in range(0, KNOWN_WORDS + 2000, 500):
            prompt = " ".join(f"known{number}" for number in range(begin, begin + 500))
            response = await http.post("/tokenize", json={"model": model, "prompt": prompt})
            assert response.status_code == 200, response.text


async def fill_pools(server: Server, model: str) -> None:
    """Send requests at the same time until no new thread comes."""
    front_end = psutil.Process(server.process.pid)
    long, longer = "word " * 1000, "word " * 14_000
    posts = [
        *[("/tokenize", {"prompt": long})] * 24,
        *[("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})] * 8,
        *[("/v1/chat/completions", {"messages": [{"role": "user", "content": longer}]})] * 3,
    ]
    most, steady = 0, 0
    async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
        for _ in range(MOST_ROUNDS):
            bodies = [(path, {"model": model, "max_tokens": 1, **body}) for path, body in posts]
            asked = [http.post(path, json=body) for path, body in bodies]
            asked += [http.get(path) for path in ("/metrics", "/v1/cpu") * 6]
            await asyncio.gather(*asked)
            now = front_end.num_threads()
            most, steady = max(most, now), 0 if now > most else steady + 1
            if steady == STEADY_ROUNDS:
                break


async def soak(
    model: str,
    seconds: float,
    *,
    warm_up: int = WARM_UP,
    clients: int = 6,
    seed: int = 0,
    options: tuple[str, ...] = SMALL,
    judges: bool = True,
) -> Soaked:
    """Run a server under load for `seconds`, after its stores are full and `warm_up` things.

    judges: see Soaked.
    """
    async with running(model, *options) as server:
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            name = (await http.get(f"{server.url}/v1/models")).json()["data"][0]["id"]
            await fill_words(server, name)
            # Each thread has its own stack, and caches for the jobs that it has seen.
            await fill_pools(server, name)
            await load(server, name, clients, seed + 2, filling(FILLS))
            if judges:
                await load(server, name, clients, seed + 3, filling(LARGE))
            await load(server, name, clients, seed + 1, for_count(warm_up))
            before = await server.idle(http)
        server.statuses.clear()
        samples: list[Sample] = []
        begun = time.monotonic()

        async def sample() -> None:
            while True:
                samples.append(await asyncio.to_thread(Sample.of, server, begun))
                await asyncio.sleep(seconds / SAMPLES)

        sampling = asyncio.create_task(sample())
        await load(server, name, clients, seed, for_seconds(seconds))
        sampling.cancel()
        took = time.monotonic() - begun
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            after = await server.idle(http)
        inside = await asyncio.to_thread(server.inside)
        log = server.log.read_text(errors="replace")
    return Soaked(
        before, after, slopes_of(samples), server.statuses, log, took, judges=judges, inside=inside
    )


@dataclass(frozen=True, slots=True)
class Sample:
    """What a server has `at` so many seconds."""

    at: float
    held: Held
    resident: Counter[str]
    inside: Inside

    @classmethod
    def of(cls, server: Server, begun: float) -> Sample:
        """Return what the server has now."""
        pid = server.process.pid
        return cls(time.monotonic() - begun, held(pid), resident(pid), server.inside())


def slopes_of(samples: Sequence[Sample]) -> list[Slope]:
    """Return the slopes of all figures of a server."""
    times = [each.at for each in samples]
    blocks, malloc = ([getattr(each.inside, n) for each in samples] for n in ("blocks", "malloc"))
    return [
        *slopes([(each.at, each.held) for each in samples]),
        *slopes_of_roles(times, [each.resident for each in samples]),
        slope("blocks", times, blocks),
        slope("malloc", times, malloc),
    ]


def report(found: Soaked) -> str:
    """Return the figures of a run as lines."""
    lines = [f"{found.requests} requests in {found.seconds:.0f} s"]
    for doing, statuses in sorted(found.statuses.items()):
        lines.append(f"  {doing:<12} {dict(sorted(statuses.items()))}")
    lines.append(f"{'':<10}{'idle before':>14}{'idle after':>14}")
    for name in NAMES:
        before, after = (getattr(each, name) for each in (found.before, found.after))
        lines.append(f"{name:<10}{before:>14}{after:>14}")
    columns = ("first", "last", "slope an hour", "error", "a request", "error")
    lines.append(" " * 10 + "".join(f"{name:>14}" for name in columns))
    hours = found.seconds / 3600 / max(found.requests, 1)
    for of in found.slopes:
        parts = f"{of.an_hour:>14.1f}{of.error:>14.1f}{of.an_hour * hours:>14.3f}"
        parts += f"{of.error * hours:>14.3f}"
        lines.append(f"{of.name:<10}{of.first:>14.0f}{of.last:>14.0f}{parts}")
    lines.append(f"threads of the front end: {dict(sorted(Counter(found.inside.threads).items()))}")
    return "\n".join([*lines, *(f"FAULT: {each}" for each in found.faults)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", help="default: a tiny model")
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="of the server, after --")
    parser.add_argument("--log", type=Path, help="where the log of the server goes")
    args = parser.parse_args()
    model = args.model or str(tiny_model("llama", max_position_embeddings=4096))
    options = (*SMALL, *args.options)
    fields = {"warm_up": args.warm_up, "clients": args.clients, "seed": args.seed}
    found = asyncio.run(soak(model, args.seconds, **fields, options=options))
    if args.log:
        args.log.write_text(found.log)
    print(report(found))
    return 1 if found.faults else 0


if __name__ == "__main__":
    sys.exit(main())
