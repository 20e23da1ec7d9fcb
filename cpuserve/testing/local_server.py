"""A server for tests: `cpuserve serve` with a real model, in its own process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import urllib.request
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cpuserve.base.children import python_command
from cpuserve.base.errors import StartupError
from cpuserve.loader.builtin import DEFAULT

_MAIN = """\
import sys
from cpuserve.testing.watched import stop_at_end_of_input
stop_at_end_of_input()
from cpuserve.__main__ import main
sys.exit(main())
"""
_READY = re.compile(r"is ready: (https?://[^\s\"]+)/v1(?:$|\")")
_GREEDY = json.dumps({"temperature": 0})
_LINES = 500  # keep this many lines of the server's output
_STOP_S = 30.0
NO_KEY = "none"  # clients need some text as an API key


class LocalServer:
    """A running server for tests.

    url: the base URL without a path. model: the name of its model. api_key: a key that it accepts.
    pid: its process id; 0 for a server that this process did not start.
    """

    def __init__(
        self,
        url: str,
        model: str,
        api_key: str,
        pid: int = 0,
        output: deque[str] | None = None,
    ) -> None:
        self.url = url
        self.model = model
        self.api_key = api_key
        self.pid = pid
        self._output = output if output is not None else deque()

    @property
    def openai_url(self) -> str:
        """The base URL for OpenAI clients."""
        return f"{self.url}/v1"

    @property
    def output(self) -> str:
        """The last lines that the server has printed, including its log."""
        return "".join(list(self._output))


class ServerStart:
    """A process of `cpuserve serve`, from its start to its end; the arguments are as in `serve`."""

    def __init__(
        self,
        model: str | Path = DEFAULT,
        *options: str,
        greedy: bool = True,
        api_key: str | None = None,
    ) -> None:
        given = [str(model), *options]
        if not any(option.partition("=")[0] in ("--port", "--uds") for option in options):
            given += ["--port", "0"]
        if greedy and not any(
            option.startswith("--override-generation-config") for option in options
        ):
            given += ["--override-generation-config", _GREEDY]
        if api_key is not None:
            given += ["--api-key", api_key]
        self._key = NO_KEY if api_key is None else api_key
        self._process = subprocess.Popen(
            python_command(_MAIN, "serve", *given),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
        self._output: deque[str] = deque(maxlen=_LINES)
        self._url = ""  # "" until the server has printed it
        self._is_ready = threading.Event()
        self._ending = False
        self._reader = threading.Thread(target=self._read, name="cpuserve-output", daemon=True)
        self._reader.start()

    def wait(self, timeout_s: float = 600.0) -> LocalServer:
        """Return the server when it is ready; StartupError if it is not ready in `timeout_s`."""
        url = self._wait_ready(timeout_s)
        model = first_model(url, self._key)
        return LocalServer(url, model, self._key, self._process.pid, self._output)

    def _read(self) -> None:
        """Store the output lines and the URL in them; set `_is_ready` at the URL or the exit."""
        assert self._process.stdout is not None
        for text in self._process.stdout:
            self._output.append(text)
            if not self._url and (match := _READY.search(text.rstrip())):
                self._url = match[1]
                self._is_ready.set()
        self._is_ready.set()

    def _wait_ready(self, timeout_s: float) -> str:
        """Return the URL of the server; StartupError with its output if it is not ready in time."""
        if not self._is_ready.wait(timeout_s):
            said = "".join(self._output)
            msg = f"the server was not ready after {timeout_s:g} s; it printed:\n{said}"
            raise StartupError(msg)
        if not self._url:
            code, said = self._process.wait(_STOP_S), "".join(self._output)
            msg = f"the server ended with exit code {code}; it printed:\n{said}"
            raise StartupError(msg)
        return self._url

    def end(self) -> None:
        """Ask the process to end, without waiting; running requests may finish within seconds."""
        if self._process.poll() is None and not self._ending:
            self._ending = True
            self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """Stop the process, and wait until it has ended."""
        self.end()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()


@contextmanager
def serve(
    model: str | Path = DEFAULT,
    *options: str,
    greedy: bool = True,
    api_key: str | None = None,
    timeout_s: float = 600.0,
) -> Iterator[LocalServer]:
    """Run `cpuserve serve MODEL` on a free port, and stop it at the end of the `with` block.

    Args:
        model: a model as on the command line;
            the default is a small built-in model, which is downloaded when it is first used.
        options: options of the command line, such as "--max-model-len", "4096".
        greedy: whether requests without a temperature use greedy sampling.
            A request with a temperature is repeatable if it has a `seed`.
        api_key: a key that clients must send; by default, the server accepts any key.
        timeout_s: the maximum seconds until the server is ready, including downloads.

    Raises:
        StartupError: the server cannot start, or is not ready in time.
    """
    start = ServerStart(model, *options, greedy=greedy, api_key=api_key)
    try:
        yield start.wait(timeout_s)
    finally:
        start.stop()


def first_model(url: str, api_key: str) -> str:
    """Return the name of the first model of a server; OSError if it cannot be reached."""
    headers = {"authorization": f"Bearer {api_key}"}
    request = urllib.request.Request(f"{url}/v1/models", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as response:
        listed: str = json.load(response)["data"][0]["id"]
    return listed
