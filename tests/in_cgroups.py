"""Serves a model inside memory control groups of 1 GiB, 600 MB and 256 MB, by hand and as root.

usage: python tests/in_cgroups.py [--requests N] [MODEL]     (default: smollm2:135m)

In the first two it must serve, with a KV cache that is filled several times over, and never be
killed; in the last it must end with 2 and one line. Works with v1 and v2, whichever has the memory
controller; needs a group it may write to, so it is no part of the test suite. With --requests there
are N short ones instead, for machines that are emulated (tests/in_vm.py).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20
SERVES, REFUSES = (1024, 600), 256
START_S = 300  # of an emulated machine; others take a second
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Memory:
    """The memory of a control group below the root, whoever made it."""

    def __init__(self, name: str) -> None:
        self.v1 = (V1 / "memory.limit_in_bytes").exists()
        self.path = (V1 if self.v1 else V2) / name

    @property
    def version(self) -> str:
        """Which kind of control group this is."""
        return "v1" if self.v1 else "v2"

    @property
    def peak(self) -> int:
        """Most bytes used so far, page cache included."""
        name = "memory.max_usage_in_bytes" if self.v1 else "memory.peak"
        return int((self.path / name).read_text())

    @property
    def kills(self) -> int:
        """How often the kernel killed someone for memory."""
        events = (self.path / ("memory.oom_control" if self.v1 else "memory.events")).read_text()
        found = re.search(r"^oom_kill (\d+)$", events, re.MULTILINE)
        return int(found[1]) if found else 0


class Group(Memory):
    """A control group of `mib`."""

    def __init__(self, mib: int) -> None:
        super().__init__(f"cpuserve-test-{os.getpid()}-{mib}")
        if not self.v1:
            control = V2 / "cgroup.subtree_control"
            control.write_text("+memory")
        self.path.mkdir()
        name = "memory.limit_in_bytes" if self.v1 else "memory.max"
        (self.path / name).write_text(str(mib * MIB))

    def run(self, *command: str) -> subprocess.Popen[str]:
        """Start a command in the group."""
        procs = self.path / "cgroup.procs"
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: procs.write_text("0"),  # 0: who writes
        )

    def remove(self) -> None:
        """Remove the group once the kernel has let go of its processes."""
        for _ in range(50):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.1)
        raise SystemExit(f"{self.path} cannot be removed")


@contextmanager
def group_of(mib: int) -> Iterator[Group]:
    """A group that is removed afterwards."""
    group = Group(mib)
    try:
        yield group
    finally:
        group.remove()


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def serve_command(model: str, port: int) -> list[str]:
    """What is tested."""
    return [sys.executable, "-m", "cpuserve", "serve", model, "--port", str(port)]


def ask(url: str, **body: object) -> dict[str, object]:
    """The JSON of GET, or of POST with a body."""
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        content = response.read()
    return json.loads(content) if content else {}


def wait_ready(url: str, process: subprocess.Popen[str]) -> None:
    """Return when the server is ready."""
    for _ in range(10 * START_S):
        if process.poll() is not None:
            raise SystemExit(f"ended with {process.returncode}: {process.communicate()[0]}")
        try:
            ask(f"{url}/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit(f"not ready after {START_S} s")


def load(url: str, requests: int | None) -> tuple[int, int]:
    """Fill the KV cache three times, or send short requests; (tokens of the cache, requests)."""
    model = ask(f"{url}/v1/models")["data"][0]
    longest = model["max_model_len"]
    metrics = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    size = int(re.search(r'num_gpu_blocks="(\d+)"', metrics)[1]) * 32
    prompt_tokens, answer = (min(longest - 40, 2000), 16) if requests is None else (40, 3)
    count = max(4, 3 * size // prompt_tokens) if requests is None else requests

    def one(number: int) -> int:
        ids = [(number * 7919 + i * 31) % 20_000 + 100 for i in range(prompt_tokens)]
        body = {"model": model["id"], "prompt": ids, "max_tokens": answer, "ignore_eos": True}
        return ask(f"{url}/v1/completions", **body)["usage"]["completion_tokens"]

    with ThreadPoolExecutor(8) as pool:
        if list(pool.map(one, range(count))) != [answer] * count:
            raise SystemExit("a request was cut short")
    return size, count


def serves(model: str, mib: int, requests: int | None) -> None:
    """The model serves under load in `mib` and nobody is killed."""
    with group_of(mib) as group:
        port = free_port()
        process = group.run(*serve_command(model, port))
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, process)
            loaded = group.peak
            size, count = load(url, requests)
            peak, kills = group.peak, group.kills
            process.send_signal(signal.SIGTERM)
            output = process.communicate(timeout=60)[0]
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode != 0 or kills:
            raise SystemExit(f"{mib} MB: ended with {process.returncode}, {kills} kills: {output}")
        print(
            f"{mib} MB (cgroup {group.version}): served {count} requests over {size} tokens of KV "
            f"cache; peak "
            f"{loaded // MIB} MB at ready, {peak // MIB} MB under load, page cache included"
        )


def refuses(model: str, mib: int) -> None:
    """The model cannot fit in `mib`: exit code 2, and one line."""
    with group_of(mib) as group:
        process = group.run(*serve_command(model, free_port()))
        output = process.communicate(timeout=START_S)[0]
        if process.returncode != 2 or output.count("\n") != 1 or group.kills:
            raise SystemExit(f"{mib} MB: ended with {process.returncode}: {output}")
        print(f"{mib} MB (cgroup {group.version}): exit code 2: {output.strip()}")


def main() -> None:
    """Run all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, help="this many short ones, no load")
    parser.add_argument("model", nargs="?", default="smollm2:135m")
    asked = parser.parse_args()
    for mib in SERVES:
        serves(asked.model, mib, asked.requests)
    refuses(asked.model, REFUSES)


if __name__ == "__main__":
    main()
