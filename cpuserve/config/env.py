"""The one reader of the process environment.

It is read once, at the first use, so that a setting has one value and a known source; nothing in
cpuserve writes it.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType

from cpuserve.config.fields import FIELDS, Field, no_op_variables

PREFIX = "CPUSERVE_"
VLLM = "VLLM_"
# Kubernetes adds these to every pod beside a Service that is called "cpuserve".
KUBERNETES = re.compile(r"CPUSERVE_(SERVICE_(HOST|PORT)(_.*)?|PORT(_\d+_.*)?)$")
# Read by other rooms through `environment()`; not options of the engine.
OTHERS = ("CPUSERVE_CONFIG", "CPUSERVE_CACHE")


@dataclass(frozen=True, slots=True)
class EnvValues:
    """Field name -> (variable, text in the field's own terms), and lines to print."""

    values: dict[str, tuple[str, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@cache
def environment() -> Mapping[str, str]:
    """The environment as it was at the first call, without empty variables."""
    return MappingProxyType({k: v for k, v in os.environ.items() if v.strip()})


def read_env(environ: Mapping[str, str] | None = None) -> EnvValues:
    """The options in `environ` (the process environment if None), and notes about the rest."""
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
        notes.append(f"env {f.env}={env[f.env]!r} is ignored: not a number cpuserve can use")
    for alias in f.env_aliases:
        if alias.name in env:
            differs = f", {alias.differs}" if alias.differs else ""
            notes.append(f"env {alias.name} is read as {f.env}{differs}")
            return alias.name, env[alias.name]
    return None


def _acceptable(f: Field, text: str) -> bool:
    """Whether a variable that is not ours, and set for others too, has a value for us."""
    try:
        f.parse(text)
    except ValueError:
        return False
    return True


def _unknown(env: Mapping[str, str]) -> list[str]:
    known = [f.env for f in FIELDS if f.env] + list(OTHERS)
    tails = [k.removeprefix(PREFIX) for k in known if k.startswith(PREFIX)]
    silent = {*known, *no_op_variables()}
    notes = []
    aliases = {alias.name for f in FIELDS for alias in f.env_aliases}
    for name in sorted(env):
        if name.startswith(VLLM) and name not in silent | aliases:
            notes.append(f"env {name} has no counterpart here and is ignored")
        if not name.startswith(PREFIX) or name in silent or KUBERNETES.match(name):
            continue
        # without the prefix, which would make any two names look alike
        near = difflib.get_close_matches(name.removeprefix(PREFIX), tails, n=1)
        hint = f"; did you mean {PREFIX}{near[0]}?" if near else ""
        notes.append(f"env {name} is not known and is ignored{hint}")
    return notes
