#!/usr/bin/env python3
"""Replays the tokens of bench_experts.py --record in llama_replay, in limited memory.

    python benchmarks/peers/replay.py FILE.gguf RECORD --gb 8 --program ./llama_replay

The page cache has --gb of memory: the process is in a memory cgroup, and its limit is set when the
model has been loaded, as bench_experts.py does for mapped files. Needs root and cgroup v1.
Page faults read as much as the disk's read-ahead allows. Where it is larger than Linux's 128 KB,
set /sys/block/DISK/queue/read_ahead_kb first: with 8 MB the peers read experts that nothing uses.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench_experts import BESIDE, CGROUP, SPARE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("record", type=Path)
    parser.add_argument("--gb", type=float, required=True, help="memory for weights")
    parser.add_argument("--program", default="./llama_replay")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=1024)
    args = parser.parse_args()
    with args.file.open("rb") as stream:  # pages in memory belong to no cgroup yet
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    budget, group = int(args.gb * 1e9), CGROUP / f"replay-{os.getpid()}"
    group.mkdir()
    limit = group / "memory.limit_in_bytes"
    limit.write_text(str(budget + BESIDE))
    enter = f"echo $$ > {group}/cgroup.procs; exec "
    command = f"{enter} {args.program} {args.file} {args.threads} {args.prompt}"
    process = subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != "loaded\n":
            sys.exit("the model cannot be loaded")
        status = Path(f"/proc/{process.pid}/status").read_text()
        anonymous = int(status.split("RssAnon:")[1].split()[0]) << 10
        limit.write_text(str(budget + anonymous + SPARE))
        process.stdin.write(args.record.read_text())
        process.stdin.close()
        for line in process.stdout:
            print(line, end="", flush=True)
        process.wait()
    finally:
        process.kill()
        process.wait()
        group.rmdir()


if __name__ == "__main__":
    main()
