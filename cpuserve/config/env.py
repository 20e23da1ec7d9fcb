"""The only module that reads the process environment.

This module reads the environment once, at the first use,
so that each setting has one value and a known source. No code of cpuserve changes the environment,
except `for_library`, which changes it back, and `settle`, for a library that reads it again.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType

from cpuserve.base.errors import ConfigError
from cpuserve.base.fault_points import VARIABLE as FAULT
from cpuserve.base.fault_points import installed
from cpuserve.config.field import PREFIX, Field
from cpuserve.config.fields import FIELDS, no_op_variables
from cpuserve.config.missing import why_unread
from cpuserve.config.nearest import nearest

# Variables of other servers with these prefixes get a note at the start. Clients of Ollama read its
# variables as well, so its prefix is not listed here, and only some of its variables get a note.
OF_SERVERS = ("VLLM_", "LLAMA_ARG_")
# Kubernetes sets these variables in every pod of a namespace with a Service called "cpuserve".
KUBERNETES = re.compile(r"CPUSERVE_(SERVICE_(HOST|PORT)(_.*)?|PORT(_\d+_.*)?)$")
# Other modules of cpuserve read these variables with `environment()`; they are not engine options.
OTHERS = ("CPUSERVE_CONFIG", "CPUSERVE_CACHE")
# The build reads these variables (pyproject.toml), and a shell may keep them.
OF_THE_BUILD = ("CPUSERVE_LEVELS", "CPUSERVE_COMMIT")


@dataclass(frozen=True, slots=True)
class EnvValues:
    """The options in the environment: field name -> (variable, text); and notes to print."""

    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@cache
def environment() -> Mapping[str, str]:
    """Return the environment at the time of the first call, without empty variables."""
    return MappingProxyType({k: v for k, v in os.environ.items() if v.strip()})


@contextmanager
def for_library(name: str, value: str) -> Iterator[None]:
    """Set a variable within the block, for a library that has no other way; a user's stays."""
    if name in environment():
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def settle(name: str, value: str) -> str | None:
    """Set a variable until the process ends, and return the value that the user gave it."""
    given = environment().get(name)
    os.environ[name] = value
    return given


def cache_dir() -> Path:
    """Return the directory of built-in models, packed weights and tuned sizes.

    The directory is CPUSERVE_CACHE, else `cpuserve` in the user's cache directory.

    Raises:
        ConfigError: a variable has a home directory that this system does not know.
    """
    env = environment()
    own, users = env.get("CPUSERVE_CACHE"), env.get("XDG_CACHE_HOME")
    given = own or users
    try:
        found = Path(given or "~/.cache").expanduser()
    except RuntimeError:
        if given:
            name = "CPUSERVE_CACHE" if own else "XDG_CACHE_HOME"
            msg = f"env {name}={given}: this system knows no such home directory"
            raise ConfigError(msg) from None
        # A container that runs as a user without a name and HOME: as the runtimes do, which set /.
        found = Path("/.cache")
    return found if own else found / "cpuserve"


def read_env(environ: Mapping[str, str] | None = None) -> EnvValues:
    """Return the options in `environ`, and notes about ignored variables.

    environ: the variables to read; None = the environment of the process.
    """
    env = environment() if environ is None else {k: v for k, v in environ.items() if v.strip()}
    values: dict[str, tuple[str, str]] = {}
    notes: list[str] = []
    for f in FIELDS:
        found = _lookup(f, env, notes)
        if found is not None:
            values[f.name] = found
    for name, no_op in no_op_variables().items():
        if name in env:
            notes.append(f"env {name} is accepted and has no effect: {no_op.why}")
    notes.extend(_unknown(env))
    return EnvValues(values, tuple(notes))


def _lookup(f: Field, env: Mapping[str, str], notes: list[str]) -> tuple[str, str] | None:
    if f.env and f.env in env:
        if f.env.startswith(PREFIX) or _acceptable(f, env[f.env]):
            return f.env, env[f.env]
        notes.append(f"env {f.env}={env[f.env]!r} is ignored: cpuserve cannot use this value")
    for alias in f.env_aliases:
        if alias.name in env:
            differs = f", {alias.differs}" if alias.differs else ""
            notes.append(f"env {alias.name} is read as {f.env}{differs}")
            return alias.name, env[alias.name]
    return None


def _acceptable(f: Field, text: str) -> bool:
    """Return whether `f` accepts `text`: OMP_NUM_THREADS may be meant for other programs."""
    try:
        f.parse(text)
    except ValueError:
        return False
    return True


def _unknown(env: Mapping[str, str]) -> list[str]:
    known = [f.env for f in FIELDS if f.env] + list(OTHERS)
    tails = [k.removeprefix(PREFIX) for k in known if k.startswith(PREFIX)]
    silent = {*known, *OF_THE_BUILD, *no_op_variables()}
    notes = []
    aliases = {alias.name for f in FIELDS for alias in f.env_aliases}
    for name in sorted(env):
        if name == FAULT:
            notes.append(_fault_note())
            continue
        if (why := why_unread(name)) is not None:
            notes.append(f"env {name} is ignored: {why}")
        elif name.startswith(OF_SERVERS) and name not in silent | aliases:
            notes.append(f"env {name} has no counterpart in cpuserve and is ignored")
        if not name.startswith(PREFIX) or name in silent or KUBERNETES.match(name):
            continue
        # Compare without the prefix, which would make any two variables look similar.
        hint = nearest(name.removeprefix(PREFIX), tails, PREFIX)
        notes.append(f"env {name} is unknown and is ignored{hint}")
    return notes


def _fault_note() -> str:
    if installed():
        return f"env {FAULT} makes calls of the system fail, because this process runs a test"
    return f"env {FAULT} is ignored: only the tests of cpuserve can make calls fail"
