"""A server in a child process, for as long as it is measured."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType

from cpuserve.errors import StartupError

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 15.0


def serve_command(arguments: Sequence[str]) -> list[str]:
    """`cpuserve serve` with the modules this process has, whatever directory it is started in."""
    code = (
        "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); "
        "from cpuserve.entrypoints.cli import main; sys.exit(main())"
    )
    return [sys.executable, "-c", code, json.dumps(sys.path), "serve", *arguments]


def private_flags(port: int, key: str) -> list[str]:
    """Flags that put a server where its driver looks, whatever environment and files say."""
    return ["--host=127.0.0.1", f"--port={port}", "--uds=none", f"--api-key={key}"]


def stop(process: subprocess.Popen[str]) -> None:
    """Stop it as a person would, and kill it if that does not help."""
    process.terminate()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Server:
    """`cpuserve serve` on a free port of 127.0.0.1; a context manager that stops it.

    key: the Bearer token it wants, its own. url is set, and ready_s measured (start of the process
    to the banner), once it serves; the banner's roofline has been probed then, so nothing of the
    start disturbs a measurement.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self.started = time.perf_counter()
        self.ready_s = 0.0
        self.url = ""
        self.key = secrets.token_hex(8)
        command = serve_command([*arguments, *private_flags(0, self.key)])
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Server:
        """Wait until it serves; StartupError if it ends instead (its line is on stderr)."""
        watchdog = threading.Timer(START_TIMEOUT_S, self.process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            self._wait()
        finally:
            watchdog.cancel()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop it."""
        stop(self.process)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _wait(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.match(r"\s*API\s+(http://\S+)/v1", line)
            if found:
                self.url = found[1]
                self.ready_s = time.perf_counter() - self.started
            if line.strip().startswith("roofline"):
                return
        code = self.process.wait()
        msg = f"the server to measure ended with exit code {code} before it was ready"
        raise StartupError(msg)
