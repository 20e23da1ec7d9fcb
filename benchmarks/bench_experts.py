"""Tokens per second of a random mixture with more experts than fit in memory.

    python benchmarks/bench_experts.py --model qwen3-moe-2gb --shares 0.1 0.2 0.4
    python benchmarks/make_gguf.py qwen3-235b-a22b FILE --layers 8 --vocab 32768 --topics
    python benchmarks/bench_experts.py --gguf FILE --cache FOLDER --topics

For each share of the weights: a pool of experts (--weights-on-disk SIZE) with and without guesses
of the next layer's experts, and a mapped file (--weights-on-disk always) in a memory cgroup of the
same size, which needs root and cgroup v1. Each run is a process of its own. Tokens are drawn by
Zipf's law (exponent 1, as words are) by a logit bias, and a random model routes equal tokens alike.
With --topics each request has tokens of another topic, and routing is as unequal and as local as
make_gguf.py says. "allowed" is the rate that the bytes read and the disk's rate allow, with the
compute time of the run that has all experts in memory: added, and as the larger of both.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

BESIDE = 1200 << 20  # memory that a start wants besides weights
SPARE = 48 << 20  # memory of page tables and stacks
CGROUP = Path("/sys/fs/cgroup/memory")
TOPIC = 512  # TOPIC of make_gguf.py
WARM = 2  # requests before the measured ones
PIECE = 4 << 20  # bytes of a read of the disk's probe


def requests(args: argparse.Namespace) -> list[tuple[list[int], dict[int, float]]]:
    """Return (prompt, logit bias) of each request."""
    found = []
    for i in range(WARM + args.requests):
        first = TOPIC * (i + 1) if args.topics else 100
        bias = {first + j: 60 - math.log(j + 1) for j in range(args.tokens)}
        found.append(([first + i, first + i + 1, first + i + 2], bias))
    return found


def limit_memory(args: argparse.Namespace) -> None:
    """Leave the page cache of the cgroup as much memory as the pool has."""
    status = Path("/proc/self/status").read_text()
    anonymous = int(status.split("RssAnon:")[1].split()[0]) << 10
    limit = CGROUP / args.cgroup / "memory.limit_in_bytes"
    limit.write_text(str(args.limit - BESIDE + anonymous + SPARE))


def measured(llm: Any, run: Callable[[], None], tokens: int) -> dict[str, float | None]:
    """Return the figures of `run`, which generates `tokens` tokens."""
    before, started = copy.copy(llm._client.stats), time.perf_counter()
    reads, cpu = disk_bytes(), time.process_time()
    run()
    seconds, after = time.perf_counter() - started, llm._client.stats

    def count(field: str) -> float:
        return getattr(after, field) - getattr(before, field)

    uses, guessed = count("expert_hits") + count("expert_misses"), count("expert_guesses")
    return {
        "tokens_per_s": tokens / seconds,
        "mb_per_token": (disk_bytes() - reads) / tokens / 1e6,
        "cpu_s_per_token": (time.process_time() - cpu) / tokens,
        "hits": count("expert_hits") / uses if uses else None,
        "guesses": guessed / tokens,
        "right": count("expert_right_guesses") / guessed if guessed else None,
        "wait_share": count("expert_wait_s") / seconds,
    }


def child(args: argparse.Namespace) -> None:
    """Decode in this process, and print the figures as JSON."""
    if args.limit:
        (CGROUP / args.cgroup / "cgroup.procs").write_text(str(os.getpid()))
    from cpuserve import LLM, SamplingParams
    from cpuserve.runtime import native

    if args.no_guesses:
        native.with_guesses = lambda program: program
    once = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    written: list[list[int]] = []
    drawn = requests(args)
    sizes: dict[str, Any] = {"weight_cache_size": "60", "max_model_len": 2048, "max_num_seqs": 4}
    with LLM(args.path, executor="native", weights_on_disk=args.place, **sizes) as llm:

        def decode(some: slice) -> None:
            for prompt, bias in drawn[some]:
                params = SamplingParams(
                    max_tokens=args.steps, temperature=1, seed=1, ignore_eos=True, logit_bias=bias
                )
                (done,) = llm.generate([prompt], params, use_tqdm=False)
                written.append(prompt + list(done.outputs[0].token_ids))

        if args.limit:
            limit_memory(args)
        decode(slice(WARM))  # warms the pool or the page cache
        figures = measured(llm, lambda: decode(slice(WARM, None)), args.steps * args.requests)
        first = drawn[0][0][0]
        prompt = [first + i * i % args.tokens for i in range(1024)]
        found = measured(llm, lambda: llm.generate([prompt], once, use_tqdm=False) and None, 1024)
        figures["prompt_s"] = 1024 / (found["tokens_per_s"] or 1)
        figures["prompt_gb"] = 1.024 * (found["mb_per_token"] or 0)
    if args.record:
        marks = "w" * WARM + "m" * args.requests
        lines = [f"{m} {' '.join(map(str, ids))}\n" for m, ids in zip(marks, written, strict=True)]
        Path(args.record).write_text("".join(lines))
    print(json.dumps(figures))


def disk_bytes() -> int:
    """Return the bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def disk_rate(file: Path, seconds: float = 0.5, rounds: int = 3) -> float:
    """Return the bytes/s of eight threads that read 4 MB at a time past the page cache.

    The pool reads experts so. The best of the rounds counts, because others use the machine.
    """
    fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
    pieces = max(1, file.stat().st_size // PIECE)

    def read(end: float, seed: int) -> int:
        done, into, random = 0, mmap.mmap(-1, PIECE), Random(seed)
        while time.perf_counter() < end:
            done += os.preadv(fd, [into], random.randrange(pieces) * PIECE)
        return done

    best = 0.0
    with ThreadPoolExecutor(8) as pool:
        for number in range(rounds):
            end = time.perf_counter() + seconds
            seeds = range(8 * number, 8 * number + 8)
            best = max(best, sum(pool.map(partial(read, end), seeds)) / seconds)
    os.close(fd)
    return best


def run(args: argparse.Namespace, place: str, limit: int = 0, *more: str) -> dict[str, float]:
    """Return the figures of a child; limit: the bytes of its cgroup, 0 = none."""
    for file in Path(args.cache).rglob("*.weights"):  # pages in memory belong to no cgroup yet
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for file in Path(args.cache).rglob("*.heat"):  # each run begins with an empty pool
        file.unlink()
    command = ["env", f"CPUSERVE_CACHE={args.cache}", sys.executable, __file__, "--child"]
    command += ["--path", args.path, "--place", place, "--requests", str(args.requests), *more]
    command += ["--steps", str(args.steps), "--tokens", str(args.tokens), "--limit", str(limit)]
    command += ["--topics"] if args.topics else []
    command += ["--record", args.record] if args.record else []
    name = f"experts-{os.getpid()}"
    if limit:
        (CGROUP / name).mkdir()
        (CGROUP / name / "memory.limit_in_bytes").write_text(str(limit))
        command += ["--cgroup", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        if limit:
            (CGROUP / name).rmdir()
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def allowed(figures: dict[str, float], compute_s: float, rate: float) -> dict[str, float]:
    """Return the tokens/s that the disk and the compute time allow: added, and the larger one."""
    disk_s = figures["mb_per_token"] * 1e6 / rate
    return {"added": 1 / (disk_s + compute_s), "larger": 1 / max(disk_s, compute_s)}


def measure(args: argparse.Namespace) -> None:
    """Print the figures of every share and place."""
    whole = run(args, "64")
    print("whole", json.dumps(whole), flush=True)
    file = max(Path(args.cache).rglob("*.weights"), key=lambda file: file.stat().st_size)
    size = file.stat().st_size
    args.record = None
    for share in args.shares:
        memory = int(size * share)
        rate = disk_rate(file)
        print(f"{share:.0%} of {size / 1e9:.1f} GB; the disk reads {rate / 1e9:.2f} GB/s")
        pool = f"{memory >> 20}MiB"
        for place, limit, more in (
            (pool, 0, ()),
            (pool, 0, ("--no-guesses",)),
            ("always", memory + BESIDE, ()),
        ):
            if limit and args.no_mapped:
                continue
            figures = run(args, place, limit, *more)
            bound = allowed(figures, 1 / whole["tokens_per_s"], rate)
            print(f"{share:.0%} {place} {' '.join(more)}", json.dumps(figures), bound, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-moe-2gb")
    parser.add_argument("--gguf", help="a file to measure instead of --model")
    parser.add_argument("--cache", help="the folder for packed weights, which is kept")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.2, 0.4])
    parser.add_argument("--steps", type=int, default=32, help="tokens of a request")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--topics", action="store_true", help="each request has another topic")
    parser.add_argument("--record", help="a file for the tokens, so that others can be fed them")
    parser.add_argument("--folder", default=None, help="a folder on the disk to measure")
    for flag in ("--path", "--place", "--cgroup"):
        parser.add_argument(flag)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--no-guesses", action="store_true")
    parser.add_argument("--no-mapped", action="store_true")
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        args.path, args.cache = args.gguf or f"{folder}/model", args.cache or f"{folder}/cache"
        if not args.gguf:
            maker = str(Path(__file__).with_name("make_model.py"))
            subprocess.run([sys.executable, maker, args.model, args.path], check=True)
        measure(args)


if __name__ == "__main__":
    main()
