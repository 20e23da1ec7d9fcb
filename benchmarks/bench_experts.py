"""Tokens per second of a random mixture with more experts than fit in memory.

    python benchmarks/bench_experts.py --model qwen3-moe-2gb --shares 0.1 0.2 0.4
    python benchmarks/make_gguf.py qwen3-235b-a22b FILE --layers 28 --vocab 32768 --topics
    python benchmarks/bench_experts.py --gguf FILE --cache FOLDER --topics --larger

For each share of the weights: a pool of experts (--weights-on-disk SIZE) with and without guesses
of the next layer's experts, and a mapped file (--weights-on-disk always) in a memory cgroup of the
same size, which needs root and cgroup v1. Each run is a process of its own. Tokens are drawn by
Zipf's law (exponent 1, as words are) by a logit bias, and a random model routes equal tokens alike.
With --topics each request has tokens of another topic, and routing is as unequal and as local as
make_gguf.py says. "allowed" is the rate that the bytes read and the disk's rate allow, with the
compute time of the run that has all experts in memory: added, and as the larger of both.
"digest" is the SHA-256 of all tokens and their log-probabilities, which is equal in all places.

With --larger the model is larger than the memory: the compute time is measured with a request of
equal tokens, so that the largest pool has all their experts. With --consume, the space of
FILE on the disk is freed while it is packed. Its first bytes stay, and its name must be the SHA-256
of its content in a folder `blobs`, as in the cache of the Hugging Face hub (any 64 digits do).
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import hashlib
import itertools
import json
import math
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

BESIDE = 1400 << 20  # memory that a start wants besides weights
SPARE = 48 << 20  # memory of page tables and stacks
CGROUP = Path("/sys/fs/cgroup/memory")
TOPIC = 512  # TOPIC of make_gguf.py
WARM = 2  # requests, or groups of streams, before the measured ones
PIECE = 1 << 20  # bytes of a read of the disk's probe, and of the pool


def requests(args: argparse.Namespace) -> list[tuple[list[int], dict[int, float]]]:
    """Return (prompt, logit bias) of each request."""
    found = []
    for number in range(args.streams * (WARM + args.requests)):
        i = 0 if args.tokens == 1 else number  # then to use the same experts again
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


def measured(llm: Any, run: Callable[[], None], tokens: int) -> dict[str, Any]:
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


def sampling(args: argparse.Namespace, bias: dict[int, float]) -> Any:
    """Return the SamplingParams of a request."""
    from cpuserve import SamplingParams

    return SamplingParams(
        max_tokens=args.steps,
        temperature=1,
        seed=1,
        ignore_eos=True,
        logit_bias=bias,
        logprobs=1,
    )


def bits(done: Sequence[Any]) -> bytes:
    """Return the tokens of RequestOutputs with their log-probabilities, exactly."""
    outputs = [one.outputs[0] for one in done]
    return b"".join(
        f"{token} {found[token].logprob.hex()}\n".encode()
        for output in outputs
        for token, found in zip(output.token_ids, output.logprobs, strict=True)
    )


def child(args: argparse.Namespace) -> None:
    """Decode in this process, and print the figures as JSON."""
    if args.limit:
        (CGROUP / args.cgroup / "cgroup.procs").write_text(str(os.getpid()))
    from cpuserve import LLM, SamplingParams
    from cpuserve.runtime import native

    if args.no_guesses:
        native.with_guesses = lambda program: program
    if args.no_parking:  # as with explicit draft tokens
        create = native._C.Executor
        native._C.Executor = lambda *a, **named: create(*a, **{**named, "rows_per_seq": 2})
    if args.consume:
        consume_source()
    once = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    written: list[list[int]] = []
    values = hashlib.sha256()
    drawn = requests(args)
    sizes: dict[str, Any] = {"weight_cache_size": "60", "max_model_len": 2048, "max_num_seqs": 4}
    sizes["speculate"] = "off"  # equal tokens are guessed, and then a step is not a token
    with LLM(args.path, executor="native", weights_on_disk=args.place, **sizes) as llm:
        if args.consume:  # the weights are packed
            print("{}")
            return

        def decode(first: int, end: int) -> None:
            for i in range(first, end, args.streams):
                group = drawn[i : i + args.streams]
                params = [sampling(args, bias) for _, bias in group]
                prompts = [prompt for prompt, _ in group]
                done = llm.generate(prompts, params, use_tqdm=False)
                written.extend(
                    prompt + list(one.outputs[0].token_ids)
                    for prompt, one in zip(prompts, done, strict=True)
                )
                values.update(bits(done))

        if args.limit:
            limit_memory(args)
        warm = WARM * args.streams
        decode(0, warm)  # warms the pool or the page cache
        tokens = args.steps * args.requests * args.streams
        figures = measured(llm, lambda: decode(warm, len(drawn)), tokens)
        figures["digest"] = values.hexdigest()[:16]
        if args.prompt:
            prompt = [7919 * i % 30000 for i in range(args.prompt)]  # of all topics
            kilo = args.prompt / 1000
            found = measured(
                llm, lambda: llm.generate([prompt], once, use_tqdm=False) and None, args.prompt
            )
            figures["prompt_s"] = args.prompt / (found["tokens_per_s"] or 1)
            figures["prompt_gb"] = kilo * (found["mb_per_token"] or 0)
    if args.record:
        marks = "w" * warm + "m" * (len(drawn) - warm)
        lines = [f"{m} {' '.join(map(str, ids))}\n" for m, ids in zip(marks, written, strict=True)]
        Path(args.record).write_text("".join(lines))
    print(json.dumps(figures))


def consume_source() -> None:
    """Free the space of the model's file on the disk when its tensors have been packed.

    A stack of experts is released after each batch of them, so its space is freed some calls later.
    """
    from cpuserve.loader import mapped, packed_files
    from cpuserve.loader.source_digest import SourceDigest

    libc, pending = ctypes.CDLL(None, use_errno=True), dict[tuple[int, int], int]()
    numbers = itertools.count()

    def release(file: Any, offset: int, size: int) -> None:
        now = next(numbers)
        pending[offset, size] = now
        for (start, length), last in list(pending.items()):
            if now - last < 24 or length < 64 << 20:
                continue
            del pending[start, length]
            file.map.madvise(mmap.MADV_DONTNEED, start & -4096, length)
            fd = os.open(file.path, os.O_RDWR)
            known = os.fstat(fd)
            first, end = start + 4095 & -4096, start + length & -4096
            keep_size_and_punch = ctypes.c_int(3)
            whole = ctypes.c_longlong(first), ctypes.c_longlong(end - first)
            if libc.fallocate(fd, keep_size_and_punch, *whole):
                raise OSError(ctypes.get_errno(), "the space of the file cannot be freed")
            os.utime(fd, ns=(known.st_atime_ns, known.st_mtime_ns))  # a start compares it
            os.close(fd)

    mapped.MappedFile.release = release
    mapped.MappedFile.check_unchanged = lambda _: None
    SourceDigest.check_unchanged = lambda _: None
    packed_files.PackedFiles._make_room = lambda _: None
    del os.posix_fallocate  # the file grows as it is written


def disk_bytes() -> int:
    """Return the bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def disk_rate(file: Path) -> float:
    """Return the bytes/s of the disk as cpuserve measures them, the best of 8 rounds.

    The best round counts, because others use the machine.
    """
    from cpuserve.runtime import packed_cache

    return max(packed_cache.disk_rate(file, PIECE) for _ in range(8))


def run(args: argparse.Namespace, place: str, limit: int = 0, *more: str) -> dict[str, Any]:
    """Return the figures of a child; limit: the bytes of its cgroup, 0 = none."""
    for file in Path(args.cache).rglob("*.weights"):  # pages in memory belong to no cgroup yet
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for file in Path(args.cache).rglob("*.heat"):  # each run begins with an empty pool
        file.unlink()
    command = ["env", f"CPUSERVE_CACHE={args.cache}", sys.executable, __file__, "--child"]
    command += ["--path", args.path, "--place", place, "--requests", str(args.requests)]
    command += ["--steps", str(args.steps), "--tokens", str(args.tokens), "--limit", str(limit)]
    command += ["--streams", str(args.streams), "--prompt", str(args.prompt)]
    command += ["--topics", *more] if args.topics else more
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
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def allowed(figures: dict[str, Any], compute_s: float, rate: float) -> dict[str, float]:
    """Return the tokens/s that the disk and the compute time allow: added, and the larger one."""
    disk_s = figures["mb_per_token"] * 1e6 / rate
    return {"added": 1 / (disk_s + compute_s), "larger": 1 / max(disk_s, compute_s)}


def measure(args: argparse.Namespace) -> None:
    """Print the figures of every share and place."""
    if args.consume:
        run(args, "always", 0, "--consume")
    if not args.larger:
        whole = run(args, "64")
    file = max(Path(args.cache).rglob("*.weights"), key=lambda file: file.stat().st_size)
    size = file.stat().st_size
    if args.larger:
        whole = run(args, f"{int(size * max(args.shares)) >> 20}MiB", 0, "--tokens", "1")
    print("whole", json.dumps(whole), flush=True)
    for share in args.shares:
        memory = int(size * share)
        rate = disk_rate(file)
        print(f"{share:.0%} of {size / 1e9:.1f} GB; the disk reads {rate / 1e9:.2f} GB/s")
        pool = f"{memory >> 20}MiB"
        places: dict[str, tuple[str, int, tuple[str, ...]]] = {
            "pool": (pool, 0, ()),
            "blind": (pool, 0, ("--no-guesses",)),
            "waits": (pool, 0, ("--no-parking",)),
            "mapped": ("always", memory + BESIDE, ()),
        }
        for name in args.places:
            place, limit, more = places[name]
            figures = run(args, place, limit, *more)
            bound = allowed(figures, 1 / whole["tokens_per_s"], rate)
            print(f"{share:.0%} {name}", json.dumps(figures), bound, flush=True)


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
    parser.add_argument(
        "--places",
        nargs="+",
        default=["pool", "blind", "mapped"],
        choices=["pool", "blind", "waits", "mapped"],
        help="pool: as a server has it; blind: without guesses; waits: no request is parked",
    )
    parser.add_argument("--streams", type=int, default=1, help="requests at a time")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the prompt; 0 = none")
    for flag in ("--larger", "--consume", "--no-guesses", "--no-parking", "--child"):
        parser.add_argument(flag, action="store_true")
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
