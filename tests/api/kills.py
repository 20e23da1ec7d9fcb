"""Kill processes of a server under load, and watch its streams and how long it is gone.

python -m tests.api.kills [--kills 50] [--seed 1]    prints the figures

Victims are chosen by what they do: an engine or the grammar process at any time, the process that
forks for templates, and a fork only while it works, because an idle one is replaced at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.helpers.patience import wait_until
from tests.helpers.sane import ENGINE, GRAMMARS, TEMPLATES, assert_server_sane, watched_server
from tests.helpers.tiny import tiny_model

KINDS = (ENGINE, GRAMMARS, TEMPLATES, f"{GRAMMARS}/fork", f"{TEMPLATES}/fork")
PROMPTS = [[11 + number, *range(30, 60)] for number in range(8)]
STREAMS = 4  # streams of text at the same time, besides one chat and one grammar
KNOWN = (
    "is being started again",
    "serves again after",
    "did not start",
    "the process for grammars",
    r"completions: 500 ",
    "the connection to the front end failed",
)


@dataclass
class Sent:
    """A request: when it began and ended, its text or None, and whether the text is right."""

    kind: str
    began: float
    ended: float = 0.0
    text: str | None = None
    right: bool = True


@dataclass
class Kill:
    """A kill: when, and how long until the service was back."""

    kind: str
    at: float
    back_s: float = 0.0


@dataclass
class Found:
    """The requests and kills of a run."""

    sent: list[Sent] = field(default_factory=list)
    kills: list[Kill] = field(default_factory=list)

    def struck(self, one, *kinds):
        """The kills of these kinds with an outage that overlaps a request."""
        return [
            kill
            for kill in self.kills
            if kill.kind.partition("/")[0] in kinds
            and kill.at <= one.ended
            and one.began <= kill.at + kill.back_s
        ]

    @property
    def faults(self):
        """Requests with a wrong text, or without one although nothing that they need was killed."""
        needs = {"text": (ENGINE,), "chat": (ENGINE, TEMPLATES), "form": (ENGINE, GRAMMARS)}
        return [
            one
            for one in self.sent
            if not one.right or (one.text is None and not self.struck(one, *needs[one.kind]))
        ]

    def report(self):
        """Return the figures as lines."""
        lines = [f"{len(self.kills)} kills, {len(self.sent)} requests, {len(self.faults)} faults"]
        whole = sum(one.text is not None for one in self.sent)
        lines.append(f"{whole} whole responses, each equal bit for bit")
        lost = [one for one in self.sent if one.text is None]
        waits = [
            one.ended - self.struck(one, ENGINE)[-1].at for one in lost if self.struck(one, ENGINE)
        ]
        if waits:
            median, most = statistics.median(waits), max(waits)
            lines.append(
                f"{len(waits)} responses ended with an error, after a median of {median:.2f} s and "
                f"at most {most:.2f} s"
            )
        for kind in KINDS:
            times = [kill.back_s for kill in self.kills if kill.kind == kind]
            if times:
                median, most = statistics.median(times), max(times)
                back = f"back after {median:.2f} s, at most {most:.2f} s"
                lines.append(f"{kind}: {len(times)} kills, {back}")
        return "\n".join(lines)


class Load:
    """Requests of several kinds, one after another in each thread, until `stop`."""

    def __init__(self, server, found):
        self.server, self.found = server, found
        self.texts = [self._text(prompt) for prompt in PROMPTS]
        self.chat = self._chat()
        assert None not in (*self.texts, self.chat)
        self.going = True
        self.numbers = iter(range(1000, 10**6))
        doings = [self._text_again] * STREAMS + [self._chat_again, self._form]
        self.threads = [
            threading.Thread(target=self._run, args=(doing, seed))
            for seed, doing in enumerate(doings)
        ]
        for thread in self.threads:
            thread.start()

    def stop(self):
        """End after the requests that run."""
        self.going = False
        for thread in self.threads:
            thread.join()

    def _run(self, doing, seed):
        rng = random.Random(seed)
        while self.going:
            sent = doing(rng)
            sent.ended = time.monotonic()
            self.found.sent.append(sent)
            if sent.text is None:
                time.sleep(0.1)

    def _text_again(self, rng):
        sent, number = Sent("text", time.monotonic()), rng.randrange(len(PROMPTS))
        sent.text = self._text(PROMPTS[number])
        sent.right = sent.text in (None, self.texts[number])
        return sent

    def _chat_again(self, _rng):
        sent = Sent("chat", time.monotonic())
        sent.text = self._chat()
        sent.right = sent.text in (None, self.chat)
        return sent

    def _form(self, _rng):
        form = f"(ab|{next(self.numbers)}){{3}}"
        sent = Sent("form", time.monotonic())
        body = {"prompt": [11, 12], "max_tokens": 60, "structured_outputs": {"regex": form}}
        sent.text = self._streamed("/v1/completions", body, lambda choice: choice["text"])
        sent.right = sent.text is None or bool(re.fullmatch(form, sent.text))
        return sent

    def _text(self, prompt):
        body = {"prompt": prompt, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
        return self._streamed("/v1/completions", body, lambda choice: choice["text"])

    def _chat(self):
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
        body |= {"temperature": 0, "ignore_eos": True}
        return self._streamed(
            "/v1/chat/completions", body, lambda choice: choice["delta"].get("content") or ""
        )

    def _streamed(self, path, body, text_of):
        """Return the text of a stream; None if it ended with an error or a closed connection."""
        status, data = self.server.ask(path, {**body, "stream": True})
        assert status in (0, 200, 500, 503), data
        if status != 200 or not data.endswith(b"data: [DONE]\n\n"):
            return None
        events = [json.loads(line[6:]) for line in data.decode().split("\n\n") if line[6:7] == "{"]
        if "error" in events[-1]:
            return None
        return "".join(text_of(choice) for event in events for choice in event["choices"])


def victim(server, rng, kind):
    """Return (kind, process) of a process of this kind, or of its parent's if no fork works."""
    end = time.monotonic() + 2.0
    while "/" in kind and time.monotonic() < end:
        for found, process in server.processes():
            try:
                if found == kind and process.status() == psutil.STATUS_RUNNING:
                    return kind, process
            except psutil.NoSuchProcess:
                continue
    kind = kind.partition("/")[0]
    wait_until(lambda: any(found == kind for found, _ in server.processes()), f"there is no {kind}")
    return kind, rng.choice([process for found, process in server.processes() if found == kind])


def is_back(server, kind, replicas):
    """Whether all engines serve, and a request that needs a process of this kind succeeds."""
    if server.ask("/health")[0] != 200:
        return False
    up = re.findall(
        r"^cpuserve:replica_up\{.*\} 1", server.ask("/metrics")[1].decode(), re.MULTILINE
    )
    if len(up) != replicas:
        return False
    path, body = "/v1/completions", {"prompt": [11], "max_tokens": 2}
    if kind.startswith(GRAMMARS):
        body |= {"structured_outputs": {"regex": "ab"}}
    if kind.startswith(TEMPLATES):
        path = "/v1/chat/completions"
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    return server.ask(path, body)[0] == 200


def kill(server, found, kind, process, replicas):
    """Kill a process, and wait until the service is back."""
    killed = Kill(kind, time.monotonic())
    found.kills.append(killed)
    try:
        os.kill(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # a fork that has just ended
        found.kills.remove(killed)
        return
    wait_until(
        lambda: is_back(server, kind, replicas) and not psutil.pid_exists(process.pid),
        server.log,
        poll_s=0.05,
    )
    killed.back_s = time.monotonic() - killed.at


def run(folder, kills, seed, replicas=2):
    """Kill `kills` processes at random moments under load; return what was found."""
    rng, found = random.Random(seed), Found()
    options = [
        *("--max-model-len", 512, "--kv-cache-memory", "1MiB", "--omp-threads-bind", "nobind"),
        *("--data-parallel-size", replicas, "--prefix-cache-dir", folder / "prefixes"),
    ]
    with watched_server(folder, tiny_model("llama"), *options) as server:
        for _ in range(2):
            for kind in KINDS:
                wait_until(lambda kind=kind: is_back(server, kind, replicas))
        server.settle()
        load = Load(server, found)
        try:
            kinds = [*KINDS, *rng.choices(KINDS, k=kills)][:kills]
            for kind in rng.sample(kinds, kills):
                time.sleep(rng.uniform(0.05, 0.8))
                kill(server, found, *victim(server, rng, kind), replicas)
        finally:
            load.stop()
        assert_server_sane(server, *KNOWN)
        server.stop()
    return found


def main():
    """Print the figures of a run; 1 if there are faults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), given.kills, given.seed)
    print(found.report())
    return bool(found.faults)


if __name__ == "__main__":
    sys.exit(main())
