"""A server whose processes, files, memory and log are watched: what was bad leaves no trace.

with watched_server(folder, tiny_model("llama")) as server:
    ...                          # send requests of every kind once
    server.settle()
    ...                          # something bad
    assert_server_sane(server)
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from tests.helpers.children import child_options
from tests.helpers.patience import PATIENCE_S, wait_until

GROWTH_BYTES = 64 << 20  # what a process may have more than when it settled
# Lines that tell of nothing bad, or of a request that got an error that blames the server.
_TIME = r"^\d{4}(-\d\d){2} \d\d(:\d\d){2}"
QUIET = (
    rf"{_TIME} (DEBUG|INFO) |{_TIME} WARNING (request \w+ from 127.0.0.1: .*: 50[37] |"
    r"\d+ further lines like those before were left out)"
    r"|^  roofline +\S|^ {12}"  # the banner's last line, once the engine is idle
)
CANARY = {"prompt": [11, 12, 13], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
ENGINE, GRAMMARS, TEMPLATES, PICTURES = "engine", "grammars", "templates", "pictures"
TOKENIZERS = "tokenizers"
FORKING = (TEMPLATES, PICTURES, TOKENIZERS)
_MODULES = {
    "cpuserve.engine.child": ENGINE,
    "cpuserve.engine.grammars.worker": GRAMMARS,
    "cpuserve.tokenizer.rendering.process": TEMPLATES,
    "cpuserve.media.decoding.process": PICTURES,
    "cpuserve.tokenizer.limited.process": TOKENIZERS,
}


class WatchedServer:
    """A server in a process of its own, with all of its files in `folder`."""

    def __init__(self, folder, model, *options, **environment):
        self.folder = Path(folder)
        for name in ("tmp", "cache", "files", "models", "prefixes"):
            (self.folder / name).mkdir(exist_ok=True)
        self.log_file = self.folder / f"log-{len(list(self.folder.glob('log-*')))}"
        places = {"TMPDIR": self.folder / "tmp", "CPUSERVE_CACHE": self.folder / "cache"}
        started = child_options(**{name: str(path) for name, path in places.items()})
        path = started["env"]["PYTHONPATH"]
        started["env"] |= environment
        if "PYTHONPATH" in environment:
            started["env"]["PYTHONPATH"] += os.pathsep + path
        command = [sys.executable, "-m", "tests.helpers.serve_steady", "serve", str(model)]
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0", *map(str, options)], **started, stdout=log, stderr=log
            )
        self.port = 0
        self._read = 0
        self._settled = {}
        self._shared = shared_memory()
        self._pids = {self.process.pid}  # of all processes of the server that were seen

    # --- its life -----------------------------------------------------------------------------

    def ready(self):
        """Return the server when it serves."""

        def serves():
            assert self.process.poll() is None, self.log()
            # The last line of the banner before the roofline.
            found = re.search(r"^  API +http://[\d.]+:(\d+)/v1\n", self.log(), re.MULTILINE)
            self.port = int(found[1]) if found else 0
            return bool(self.port)

        wait_until(serves, self.log)
        return self

    def stop(self):
        """Stop the server; it must end with 0 and leave no process, shared memory or file."""
        left = [process.pid for process in self.everything()]
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0, self.log()
        wait_until(lambda: not any(map(psutil.pid_exists, left)), f"{left} did not all end")
        assert not self.shared_left()
        assert not self.unfinished()
        assert "Traceback" not in self.log(), self.log()

    def close(self):
        """Kill what still runs."""
        for process in self.everything():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait(PATIENCE_S)

    def log(self):
        """Return all that the server and its processes have written."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    # --- requests -----------------------------------------------------------------------------

    def ask(self, path, body=None, method=None, headers=None):
        """Return (status, body) of a request; status 0 = the server closed the connection."""
        connection = self.connect()
        try:
            data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
            headers = {"content-type": "application/json", **(headers or {})}
            connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (http.client.HTTPException, ConnectionError) as error:
            return 0, str(error).encode()
        finally:
            connection.close()

    def connect(self):
        """Return a new connection, which the caller closes."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def canary(self):
        """Return (status, the choices of a fixed request, with the logprobs of their tokens)."""
        status, body = self.ask("/v1/completions", {**CANARY, "logprobs": 3})
        return status, json.loads(body).get("choices") if status == 200 else body

    def whole_cache(self):
        """Return (status, text) of a request that needs every KV block."""
        length = json.loads(self.ask("/v1/models")[1])["data"][0]["max_model_len"]
        prompt = [11 + number % 300 for number in range(length - 2)]
        status, body = self.ask("/v1/completions", {**CANARY, "prompt": prompt, "max_tokens": 2})
        return status, json.loads(body)["choices"][0]["text"] if status == 200 else body

    def gauges(self):
        """Return the number of running and of waiting requests of all engines."""
        status, body = self.ask("/metrics")
        assert status == 200
        found = re.findall(r"^vllm:num_requests_(\w+)\{.*\} (\S+)$", body.decode(), re.MULTILINE)
        return {name: sum(float(v) for n, v in found if n == name) for name, _ in found}

    # --- what it has --------------------------------------------------------------------------

    def everything(self):
        """Return all processes of the server that run now."""
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            found = [own, *own.children(recursive=True)]
            self._pids |= {process.pid for process in found}
            return found
        return []

    def processes(self):
        """Return (kind, process) for each; a fork has the kind of its parent and "/fork"."""
        found = []
        kinds = {}
        for process in self.everything():
            with suppress(psutil.NoSuchProcess):
                if process.status() == psutil.STATUS_ZOMBIE:
                    found.append(("zombie", process))
                    continue
                above, line = kinds.get(process.ppid(), ""), " ".join(process.cmdline())
                kind = next((k for module, k in _MODULES.items() if module in line), "front end")
                kinds[process.pid] = kind = f"{kind}/fork" if above == kind else kind
                found.append((kind, process))
        return found

    def facts(self):
        """Return the number of processes of each kind; and descriptors, threads and bytes."""
        found = self.processes()
        counts = Counter(kind for kind, _ in found)
        facts = dict(counts)
        for kind, process in found:
            if kind in ("front end", *_MODULES.values()):
                with suppress(psutil.NoSuchProcess):
                    # Each idle fork has a socket, and of each kind there may be up to four.
                    forks = sum(counts[f"{of}/fork"] for of in FORKING)
                    forks = forks if kind == "front end" else 0
                    facts[kind, "files"] = max(
                        facts.get((kind, "files"), 0), process.num_fds() - forks
                    )
                    facts[kind, "threads"] = max(
                        facts.get((kind, "threads"), 0), process.num_threads()
                    )
                    rss = process.memory_info().rss
                    facts[kind, "bytes"] = max(facts.get((kind, "bytes"), 0), rss)
        return facts

    def settle(self):
        """Note what the server has now, and its answers, for `assert_server_sane`."""
        self.new_log()
        self._settled = self._steady_facts()
        self.answers = self.canary(), self.whole_cache()
        assert [status for status, _ in self.answers] == [200, 200], self.answers

    def settled_as(self, other):
        """Note for `assert_server_sane` what another server of the same model and options has."""
        self._settled, self.answers = other._settled, other.answers

    def _steady_facts(self):
        """Return the facts once processes and files have been the same ten times, for two seconds.

        A process of a pool may exist before its socket does, and would count as one file less.
        """
        seen = [self.facts()]

        def steady():
            seen.append(self.facts())
            kept = [
                {what: n for what, n in facts.items() if what[-1] not in ("bytes", "threads")}
                for facts in seen[-10:]
            ]
            return len(kept) == 10 and all(facts == kept[0] for facts in kept)

        wait_until(steady, lambda: seen[-3:], poll_s=0.2)
        return seen[-1]

    def more_than_settled(self):
        """Return what the server has more of than when it settled."""
        more = {}
        for what, number in self.facts().items():
            allowed = self._settled.get(what, 0)
            if what in {f"{of}/fork" for of in FORKING}:
                allowed = 4
            elif what == ("front end", "threads"):
                allowed += 8  # pools of threads grow with requests at the same time, up to a limit
            elif isinstance(what, tuple) and what[1] == "bytes":
                allowed += GROWTH_BYTES
            if number > allowed:
                more[what] = number, allowed
        return more

    def unfinished(self):
        """Return the files that are being written."""
        names = ("*.part", ".*.tmp", "*.tmp")
        found = [path for name in names for path in self.folder.rglob(name)]
        return found + list((self.folder / "tmp").iterdir())

    def shared_left(self):
        """Return the names of shared memory since the start, without those of other servers.

        A name such as cpuserve-kv-123-... has the number of a process.
        """
        self.everything()

        def is_own(name):
            numbers = [int(number) for number in re.findall(r"-(\d+)-", name)]
            return not numbers or not self._pids.isdisjoint(numbers)

        return {name for name in shared_memory() - self._shared if is_own(name)}

    def new_log(self):
        """Return the lines of the log since the last call."""
        text = self.log()
        text, self._read = text[self._read :], len(text)
        return text.splitlines()


def shared_memory():
    """Return the names of cpuserve in /dev/shm."""
    place = Path("/dev/shm")
    return {path.name for path in place.glob("*cpuserve*")} if place.is_dir() else set()


@contextmanager
def watched_server(folder, model, *options, **environment):
    """Start a WatchedServer, and kill what is left of it in the end."""
    server = WatchedServer(folder, model, *options, **environment)
    try:
        yield server.ready()
    finally:
        server.close()


def first_answer(server):
    """Return the canary's answer; a process that a fault has killed may die while it is computed.

    /health knows of the death only when the process has ended.
    """
    found = []

    def is_served():
        found.append(server.canary())
        return found[-1][0] not in (0, 503)

    wait_until(is_served, lambda: server.log()[-4000:])
    return found[-1]


def assert_server_sane(server, *known):
    """The server serves as when it settled, and has nothing more than it had then.

    known: regular expressions; the log may have warnings and errors that match one of them.
    """
    wait_until(lambda: server.ask("/health")[0] == 200, lambda: server.log()[-4000:])
    assert first_answer(server) == server.answers[0]
    assert server.whole_cache() == server.answers[1]
    wait_until(lambda: not any(server.gauges().values()), lambda: server.gauges())
    wait_until(lambda: not server.more_than_settled(), lambda: server.more_than_settled())
    wait_until(lambda: not server.unfinished(), lambda: server.unfinished())
    assert not server.shared_left()
    expected = re.compile("|".join((QUIET, *known)))
    lines = [line for line in server.new_log() if not expected.search(line)]
    assert not lines, "\n".join(lines)
