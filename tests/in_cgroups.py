"""Serves a model inside memory control groups of 1 GiB, 600 MB and 256 MB, by hand and as root.

usage: python tests/in_cgroups.py [MODEL]     (default: smollm2:135m)

In the first two it must serve, with a KV cache that is filled several times over, and never be
killed; in the last it must end with 2 and one line. Works with v1 and v2, whichever has the memory
controller; needs a group it may write to, so it is no part of the test suite.
"""

from __future__ import annotations

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
V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class Group:
    """A control group of `mib`, and what happened in it."""

    def __init__(self, mib: int) -> None:
        self.v1 = (V1 / "memory.limit_in_bytes").exists()
        if not self.v1:
            control = V2 / "cgroup.subtree_control"
            control.write_text("+memory")
        self.path = (V1 if self.v1 else V2) / f"cpuserve-test-{os.getpid()}-{mib}"
        self.path.mkdir()
        name = "memory.limit_in_bytes" if self.v1 else "memory.max"
        (self.path / name).write_text(str(mib * MIB))

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

    def run(self, *command: str) -> subprocess.Popen[str]:
        """Start a command in the group."""
        enter = f'echo $$ > "{self.path}/cgroup.procs" && exec "$@"'
        full = ["sh", "-c", enter, "sh", *command]
        return subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

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
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit(f"ended with {process.returncode}: {process.communicate()[0]}")
        try:
            ask(f"{url}/health")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise SystemExit("not ready after a minute")


def load(url: str) -> tuple[int, int]:
    """Requests that fill the KV cache three times; (tokens of the cache, requests)."""
    model = ask(f"{url}/v1/models")["data"][0]
    longest = model["max_model_len"]
    metrics = urllib.request.urlopen(f"{url}/metrics", timeout=60).read().decode()
    size = int(re.search(r'num_gpu_blocks="(\d+)"', metrics)[1]) * 32
    prompt_tokens = min(longest - 40, 2000)
    count = max(4, 3 * size // prompt_tokens)

    def one(number: int) -> int:
        ids = [(number * 7919 + i * 31) % 20_000 + 100 for i in range(prompt_tokens)]
        body = {"model": model["id"], "prompt": ids, "max_tokens": 16, "ignore_eos": True}
        return ask(f"{url}/v1/completions", **body)["usage"]["completion_tokens"]

    with ThreadPoolExecutor(8) as pool:
        if list(pool.map(one, range(count))) != [16] * count:
            raise SystemExit("a request was cut short")
    return size, count


def serves(model: str, mib: int) -> None:
    """The model serves under load in `mib` and nobody is killed."""
    with group_of(mib) as group:
        port = free_port()
        process = group.run(*serve_command(model, port))
        try:
            url = f"http://127.0.0.1:{port}"
            wait_ready(url, process)
            loaded = group.peak
            size, count = load(url)
            peak, kills = group.peak, group.kills
            process.send_signal(signal.SIGTERM)
            output = process.communicate(timeout=20)[0]
        finally:
            if process.poll() is None:
                process.kill()
                process.communicate()
        if process.returncode != 0 or kills:
            raise SystemExit(f"{mib} MB: ended with {process.returncode}, {kills} kills: {output}")
        print(
            f"{mib} MB: served {count} requests over {size} tokens of KV cache; peak "
            f"{loaded // MIB} MB at ready, {peak // MIB} MB under load, page cache included"
        )


def refuses(model: str, mib: int) -> None:
    """The model cannot fit in `mib`: exit code 2, and one line."""
    with group_of(mib) as group:
        process = group.run(*serve_command(model, free_port()))
        output = process.communicate(timeout=60)[0]
        if process.returncode != 2 or output.count("\n") != 1 or group.kills:
            raise SystemExit(f"{mib} MB: ended with {process.returncode}: {output}")
        print(f"{mib} MB: {output.strip()}")


def main() -> None:
    """Run all."""
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2:135m"
    for mib in SERVES:
        serves(model, mib)
    refuses(model, REFUSES)


if __name__ == "__main__":
    main()
