"""A `cpuserve serve` process for tests that need the whole program."""

from __future__ import annotations

import functools
import itertools
import json
import signal
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.children import child_options
from tests.helpers.downloads import tried
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.ports import reserve_port

DEFAULT_MODEL = "smollm2:135m"


@functools.cache
def _fetched() -> Path | str:
    """Return the path of the default model, downloaded if needed, or why it is not available."""
    from cpuserve.base.errors import ModelError
    from cpuserve.loader.hub import resolve_model

    try:
        return tried(lambda: resolve_model(DEFAULT_MODEL), ModelError)
    except ModelError as error:
        return str(error)


def default_model() -> Path:
    """The default model's file; skips the test where there is neither a copy nor an index."""
    found = _fetched()
    if isinstance(found, str):
        pytest.skip(found)
    return found


class Client:
    """Plain JSON requests to a server."""

    def __init__(self, url: str, pid: int = 0, certificate: str | None = None) -> None:
        """certificate: the file with the certificate of a server with https."""
        self.url = url
        self.pid = pid
        self.tls = None if certificate is None else ssl.create_default_context(cafile=certificate)

    def metric(self, name: str) -> float:
        """The value of `vllm:name` now."""
        lines = self.get("/metrics").decode().splitlines()
        line = next(line for line in lines if line.startswith(f"vllm:{name}{{"))
        return float(line.rsplit(" ", 1)[1])

    def get(self, path: str) -> bytes:
        """The body of GET `path`."""
        with urllib.request.urlopen(
            self.url + path, timeout=PATIENCE_S, context=self.tls
        ) as response:
            return response.read()

    def post(self, path: str, **body: Any) -> Any:
        """The JSON answer to `body`."""
        return json.loads(self.raw(path, **body))

    def raw(self, path: str, **body: Any) -> bytes:
        """The bytes of the answer to `body`."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S, context=self.tls) as response:
            return response.read()


@contextmanager
def running_server(
    model: str | Path, *options: str, prefix: Sequence[str] = ()
) -> Iterator[Client]:
    """`cpuserve serve MODEL OPTIONS` on a free port, ready; it must end with 0 on SIGTERM.

    prefix: a command that runs the rest of its arguments.
    """
    port, held = reserve_port()
    serve = [sys.executable, "-m", "cpuserve", "serve", str(model), "--port", str(port), *options]
    command = [*prefix, *serve]
    process = subprocess.Popen(
        command,
        **child_options(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        given = dict(itertools.pairwise(options)).get("--ssl-certfile")
        scheme = "http" if given is None else "https"
        client = Client(f"{scheme}://127.0.0.1:{port}", process.pid, given)
        _wait_ready(client, process)
        yield client
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, output
    finally:
        held.close()
        if process.poll() is None:
            process.kill()
        process.communicate()


def _wait_ready(client: Client, process: subprocess.Popen[str]) -> None:
    def is_ready() -> bool:
        try:
            client.get("/health")
        except (urllib.error.URLError, ConnectionError) as error:
            if isinstance(error, urllib.error.HTTPError):
                error.close()
            assert process.poll() is None, process.communicate()[0]
            return False
        return True

    wait_until(is_ready, "the server did not become ready", poll_s=0.05)
