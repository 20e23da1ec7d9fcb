"""Parses a `docker run` command with the options that the documents use."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "docs/serving.md", "Dockerfile.cpu")
# Flags that vLLM's image needs and this image does not: no line may have them.
UNNEEDED = ("--cap-add", "--security-opt", "--shm-size", "--privileged", "--ipc")

BARE = ("--rm", "--read-only")
WITH_VALUE = ("-e", "-v", "-p", "--user", "--tmpfs", "--cap-drop", "--cpuset-cpus", "--memory")


@dataclass(frozen=True)
class DockerRun:
    """A line's variables, volumes, user (None: the image's) and arguments of the entry point."""

    environment: dict[str, str]
    volumes: tuple[str, ...]
    user: str | None
    arguments: tuple[str, ...]


def documented_lines() -> list[str]:
    """Return the complete `docker run` lines of the documents, with continued lines joined."""
    lines = []
    for name in DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8").replace("\\\n", " ")
        found = re.findall(r"docker run [^`\n#]*\bcpuserve\b[^`\n#]*", text)
        lines += [line.split("[MODEL]")[0].strip() for line in found]
    return list(dict.fromkeys(lines))


def parse(line: str) -> DockerRun:
    """Return the parts of a line; ValueError for a flag that no document needs."""
    words = shlex.split(line.removeprefix("docker run"))
    given: dict[str, list[str]] = {flag: [] for flag in WITH_VALUE}
    while words and words[0].startswith("-"):
        flag = words.pop(0)
        if flag in given:
            given[flag].append(words.pop(0))
        elif flag not in BARE:
            msg = f"unknown flag {flag}: {line}"
            raise ValueError(msg)
    if words[:1] != ["cpuserve"]:
        msg = f"no line of the image cpuserve: {line}"
        raise ValueError(msg)
    environment = dict(word.split("=", 1) for word in given["-e"])
    user = given["--user"][-1] if given["--user"] else None
    return DockerRun(environment, tuple(given["-v"]), user, tuple(words[1:]))
