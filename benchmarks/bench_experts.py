"""Tokens per second of a random mixture whose experts do not fit in memory.

    python benchmarks/bench_experts.py --model qwen3-moe-2gb --shares 0.1 0.2 0.4

For each share of the weights: a pool of experts (--weights-on-disk SIZE), and a mapped file
(--weights-on-disk always) in a memory cgroup of the same size, which needs root and cgroup v1.
Each run is a process of its own. Tokens are drawn by Zipf's law (exponent 1, as words are) from
`--tokens` ids by a logit bias, and a random model routes equal tokens alike. Real models choose
experts in another way, so only the ratio of two rows means something, not the share of hits.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BESIDE = 1200 << 20  # memory that a start wants besides weights
SPARE = 48 << 20  # memory of page tables and stacks
CGROUP = Path("/sys/fs/cgroup/memory")


def child(args: argparse.Namespace) -> None:
    """Decode in this process, and print the figures as JSON."""
    if args.limit:
        (CGROUP / args.cgroup / "cgroup.procs").write_text(str(os.getpid()))
    from cpuserve import LLM, SamplingParams

    bias = {100 + i: 60 - math.log(i + 1) for i in range(args.tokens)}
    once = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    params = SamplingParams(
        max_tokens=args.steps, temperature=1, seed=1, ignore_eos=True, logit_bias=bias
    )
    with LLM(
        args.path,
        executor="native",
        weights_on_disk=args.place,
        weight_cache_size="40",
        max_model_len=2048,
        max_num_seqs=4,
    ) as llm:
        if args.limit:  # leave the page cache as much memory as the pool has
            status = Path("/proc/self/status").read_text()
            anonymous = int(status.split("RssAnon:")[1].split()[0]) << 10
            limit = CGROUP / args.cgroup / "memory.limit_in_bytes"
            limit.write_text(str(args.limit - BESIDE + anonymous + SPARE))
        llm.generate([[100, 101, 102]], params, use_tqdm=False)  # warms the pool or the page cache
        before, started = copy.copy(llm._client.stats), time.perf_counter()
        reads = disk_bytes()
        llm.generate([[103, 104, 105]], params, use_tqdm=False)
        seconds, after = time.perf_counter() - started, llm._client.stats
        reads = disk_bytes() - reads
        uses = after.expert_hits + after.expert_misses - before.expert_hits - before.expert_misses
        missed = after.expert_misses - before.expert_misses
        started, before_prompt = time.perf_counter(), disk_bytes()
        llm.generate([[100 + i * i % args.tokens for i in range(1024)]], once, use_tqdm=False)
        prompt_s, prompt_reads = time.perf_counter() - started, disk_bytes() - before_prompt
    figures = {
        "tokens_per_s": args.steps / seconds,
        "mb_per_token": reads / args.steps / 1e6,
        "hits": 1 - missed / uses if uses else None,
        "wait_share": (after.expert_wait_s - before.expert_wait_s) / seconds,
        "prompt_s": prompt_s,
        "prompt_gb": prompt_reads / 1e9,
    }
    print(json.dumps(figures))


def disk_bytes() -> int:
    """Return the bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


def run(args: argparse.Namespace, place: str, limit: int) -> dict[str, float]:
    """Return the figures of a child; limit: the bytes of its cgroup, 0 = none."""
    for file in Path(args.cache).rglob("*.weights"):  # pages in memory belong to no cgroup yet
        with file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    command = ["env", f"CPUSERVE_CACHE={args.cache}", sys.executable, __file__, "--child"]
    command += ["--path", args.path, "--place", place]
    command += ["--steps", str(args.steps), "--tokens", str(args.tokens), "--limit", str(limit)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-moe-2gb")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.1, 0.2, 0.4])
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--folder", default=None, help="a folder on the disk to measure")
    for flag in ("--path", "--place", "--cgroup"):
        parser.add_argument(flag)
    parser.add_argument("--limit", type=int, default=0)
    parser.add_argument("--child", action="store_true")
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        args.path, args.cache = f"{folder}/model", f"{folder}/cache"
        maker = str(Path(__file__).with_name("make_model.py"))
        subprocess.run([sys.executable, maker, args.model, args.path], check=True)
        print("whole", run(args, "64", 0), flush=True)
        size = max(file.stat().st_size for file in Path(args.cache).rglob("*.weights"))
        for share in args.shares:
            memory = int(size * share)
            for place, limit in ((f"{memory >> 20}MiB", 0), ("always", memory + BESIDE)):
                figures = run(args, place, limit)
                print(f"{share:.0%} {place}", json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
