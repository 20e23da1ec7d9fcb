"""An agent that a user installs, and the tasks that it runs against the scripted server.

Each agent has a file with its packages, its settings, and the items that make its tools read, edit
and run. The tasks here are the same for all agents; each checks that the agent went through its
whole script, and that the server refused nothing that the task did not want to be refused.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from cpuserve.testing.recorder import Exchange
from cpuserve.testing.scripted_server import ScriptedServer
from tests.clients.script import DONE
from tests.clients.scripted import scripted_server

TIMEOUT_S = 240.0
CONTEXT = 131_072
SUMMARY = "This is left:"
# A port on which nothing listens, so that no request leaves the machine.
_NO_PROXY = "http://127.0.0.1:9"


@dataclass(frozen=True, slots=True)
class Place:
    """The folders of one agent: where its packages are, and a home and a project for a task."""

    root: Path
    packages: Path
    task: str = ""

    @property
    def home(self) -> Path:
        """The agent's HOME."""
        return self.root / self.task / "home"

    @property
    def project(self) -> Path:
        """The directory in which the agent works."""
        return self.root / self.task / "project"


class Agent(ABC):
    """A coding agent for the terminal.

    packages: what npm or pip installs, with versions. program: its file below Place.packages.
    shares: the agent that has the same packages. context: the size of the context when it has to
    compact.
    """

    name: str
    packages: tuple[str, ...]
    program: str
    installer = "npm"
    shares = ""
    model = "scripted"
    context = 40_000
    parts = 8  # how many parts of a file fill the context

    def __init__(self, root: Path) -> None:
        self.place = Place(root / self.name, root / (self.shares or self.name) / "packages")

    @property
    def installed(self) -> bool:
        """Whether the program is there, in the version of `packages`."""
        stamp = self.place.packages / "installed"
        return stamp.exists() and stamp.read_text() == "\n".join(self.packages)

    def install(self) -> None:
        """Install the packages with npm or pip, outside of the checkout."""
        folder = self.place.packages
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if self.installer == "npm":
            (folder / "package.json").write_text('{"private": true, "type": "module"}')
            commands = [["npm", "install", "--no-audit", "--no-fund", *self.packages]]
        else:
            python = str(folder / "venv" / "bin" / "python")
            commands = [
                [sys.executable, "-m", "venv", "venv"],
                [python, "-m", "pip", "install", "-q", "--no-compile", *self.packages],
            ]
        for command in commands:
            subprocess.run(command, cwd=folder, check=True)
        (folder / "installed").write_text("\n".join(self.packages))

    @abstractmethod
    def environment(self, url: str) -> Mapping[str, str]:
        """Return the variables that point the agent to the server, and switch off telemetry."""

    @abstractmethod
    def arguments(self, text: str, image: Path | None) -> list[str]:
        """Return the arguments that run one task without questions.

        image: a picture that the user attaches, if the agent has no tool that reads one.
        """

    def settings(self, url: str, context: int) -> Mapping[str, str]:
        """Return {path below HOME: text} of the agent's settings."""
        return {}

    @abstractmethod
    def edit(self, path: Path, old: str, new: str) -> str:
        """Return the items that replace a text in a file, which the agent may have to read."""

    @abstractmethod
    def run(self, command: str) -> str:
        """Return the item that runs a command of the shell."""

    def read_image(self, path: Path) -> str:
        """Return the item that reads a picture; "" if the user has to attach it."""
        return ""

    def has_compacted(self, prompts: list[str]) -> bool:
        """Return whether it went on after a summary of its history."""
        return any(SUMMARY in prompt for prompt in prompts)

    def start(
        self, place: Place, server: ScriptedServer, text: str, image: Path | None = None
    ) -> Ran:
        """Run the agent with a task until it ends, at most TIMEOUT_S."""
        url = server.url
        for name, content in self.settings(url, server.context.max_model_len).items():
            file = place.home / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8")
        command = [str(place.packages / self.program), *self.arguments(text, image)]
        process = subprocess.Popen(
            command,
            cwd=place.project,
            env={**_clean_environment(place), **self.environment(url)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # no terminal
        )
        try:
            output = process.communicate(timeout=TIMEOUT_S)[0]
        except subprocess.TimeoutExpired:
            _end_all(place)
            output = process.communicate()[0] + b"\n(it was stopped after a while)"
        finally:
            _end_all(place)
        return Ran(process.returncode, output.decode("utf-8", "replace"), list(server.exchanges))


@dataclass(frozen=True, slots=True)
class Ran:
    """How an agent ended, what it printed, and its requests."""

    code: int
    output: str
    exchanges: list[Exchange]

    def statuses(self) -> dict[str, int]:
        """Return how many requests had each path and status."""
        found: dict[str, int] = {}
        for exchange in self.exchanges:
            key = f"{exchange.method} {exchange.path} {exchange.status}"
            found[key] = found.get(key, 0) + 1
        return found


@dataclass(slots=True)
class Report:
    """What a task showed. problems: what was not as it should be."""

    agent: str
    task: str
    ran: Ran
    problems: list[str] = field(default_factory=list)

    def check(self, is_right: bool, problem: str) -> None:
        """Note a problem unless `is_right`."""
        if not is_right:
            self.problems.append(problem)


def call(name: str, **arguments: Any) -> str:
    """Return the item of a call."""
    return f"[[call {name} {json.dumps(arguments)}]]"


def run_task(agent: Agent, task: str) -> Report:
    """Run one of TASKS in empty folders, and return what it showed."""
    place = replace(agent.place, task=task)
    shutil.rmtree(place.root / task, ignore_errors=True)
    place.home.mkdir(parents=True)
    place.project.mkdir(parents=True)
    size = agent.context if task == "compaction" else CONTEXT
    record = place.root / task / "requests"
    with scripted_server(names=(agent.model,), max_model_len=size, record=record) as server:
        report = TASKS[task](agent, place, server)
    ran = report.ran
    (place.root / task / "output.txt").write_text(ran.output, encoding="utf-8")
    report.check(ran.code == 0, f"it ended with {ran.code}")
    report.check(DONE in ran.output, "it did not print the last response")
    for number, exchange in enumerate(ran.exchanges):
        report.check(not _is_refused(exchange, task), f"request {number}: {_shown(exchange)}")
    return report


def _is_refused(exchange: Exchange, task: str) -> bool:
    """Return whether the server refused a request, or failed in its stream, for no good reason."""
    response = exchange.response
    if exchange.status < 400:
        return any(words in response for words in (b'"error":{', b"response.failed"))
    is_long = any(words in response for words in (b"too long", b"maximum context length"))
    return not (is_long and task == "compaction")


def _shown(exchange: Exchange) -> str:
    text = exchange.response.decode("utf-8", "replace")
    return f"{exchange.method} {exchange.path} {exchange.status}: {text[-300:]}"


def _loop(agent: Agent, place: Place, server: ScriptedServer) -> Report:
    """Edit a file, run a command, finish."""
    notes, copy = place.project / "notes.txt", place.project / "copy.txt"
    notes.write_text("one\ntwo\n")
    items = [agent.edit(notes, "two", "three"), agent.run(f"cp {notes} {copy}")]
    text = f"Change the notes. [[think Where are they?]] {' '.join(items)}"
    report = Report(agent.name, "loop", agent.start(place, server, text))
    report.check(notes.read_text() == "one\nthree\n", f"notes.txt has {notes.read_text()!r}")
    copied = copy.read_text() if copy.exists() else None
    report.check(copied == "one\nthree\n", f"copy.txt has {copied!r}")
    return report


def _image(agent: Agent, place: Place, server: ScriptedServer) -> Report:
    """Read a picture, which the model cannot see, and go on."""
    picture = place.project / "picture.png"
    picture.write_bytes(png())
    item = agent.read_image(picture)
    text = f"Look at picture.png. {item or f'[[say {DONE}]]'}"
    return Report(agent.name, "image", agent.start(place, server, text, None if item else picture))


def _compaction(agent: Agent, place: Place, server: ScriptedServer) -> Report:
    """Fill the context until the agent compacts its history, and go on."""
    big = place.project / "big.txt"
    line = "The engine reads every weight once for each step, so a step costs memory bandwidth."
    big.write_text("".join(f"{number}: {line}\n" for number in range(250 * agent.parts)))
    parts = [agent.run(f"sed -n {1 + 250 * n},{250 + 250 * n}p {big}") for n in range(agent.parts)]
    text = f"Read all parts. {' '.join(parts)}"
    report = Report(agent.name, "compaction", agent.start(place, server, text))
    report.check(agent.has_compacted(server.prompts), "it did not compact")
    return report


TASKS = {"loop": _loop, "image": _image, "compaction": _compaction}


def png() -> bytes:
    """Return a picture of 8 x 8 red pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)

    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    rows = (b"\0" + b"\xff\0\0" * 8) * 8
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def _clean_environment(place: Place) -> dict[str, str]:
    """Return an environment without the user's settings and without a way to the internet."""
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), _NO_PROXY)
    local = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost")
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "TMPDIR") if name in os.environ}
    home = str(place.home)
    folders = {
        "HOME": home,
        "XDG_CONFIG_HOME": f"{home}/.config",
        "XDG_DATA_HOME": f"{home}/.local",
    }
    return {**kept, **proxies, **local, **folders, "TERM": "dumb", "CI": "1", "NO_COLOR": "1"}


def _end_all(place: Place) -> None:
    """Stop the processes that an agent has left running, daemons included: they have its HOME."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("HOME") == str(place.home):
                process.kill()
