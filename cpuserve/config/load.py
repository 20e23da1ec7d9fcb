"""Flags over environment over config file over defaults, merged once, each with its source."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from cpuserve.config.engine import EngineOptions, ServerOptions
from cpuserve.config.env import EnvValues, environment, read_env
from cpuserve.config.fields import (
    BY_NAME,
    FIELDS,
    Field,
    NoOp,
    argument_name,
    keywords,
    no_op_flags,
)
from cpuserve.errors import ConfigError

MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Given:
    """A value somebody gave: `name` is what they called it, `source` where (flag, env, file)."""

    name: str
    source: str
    value: object


@dataclass(frozen=True, slots=True)
class Asked:
    """Everything that was asked: options, where each came from ("flag --dtype"), lines to print."""

    options: EngineOptions
    server: ServerOptions
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()


def load_options(
    flags: Mapping[str, Given],
    *,
    config_file: str | None = None,
    environ: Mapping[str, str] | None = None,
    notes: Iterable[str] = (),
) -> Asked:
    """Merge what was given; later sources only fill what earlier ones left open.

    Raises:
        ConfigError: a value that is not of its field's type, naming flag, variable or file key.
    """
    env = read_env(environ)
    path = config_file or (environment() if environ is None else environ).get("CPUSERVE_CONFIG")
    file, file_notes = read_file(path) if path else ({}, [])
    given = {**file, **_from_env(env), **flags}
    values = {name: _parse(BY_NAME[name], g) for name, g in given.items()}
    return Asked(
        EngineOptions(**{n: v for n, v in values.items() if not BY_NAME[n].server}),
        ServerOptions(**{n: v for n, v in values.items() if BY_NAME[n].server}),
        {name: f"{g.source} {g.name}".strip() for name, g in given.items()},
        (*notes, *env.notes, *file_notes),
    )


def from_arguments(
    arguments: Mapping[str, object], *, environ: Mapping[str, str] | None = None
) -> Asked:
    """Options from keyword arguments (`LLM(...)`) over the environment; None means not given.

    Raises:
        ConfigError: an unknown keyword (with the nearest one) or a value of the wrong type.
    """
    given, notes = _from_keywords(arguments, "argument")
    return load_options(given, environ=environ, notes=notes)


def flag_given(field: Field, flag: str, value: object) -> Given:
    """A value from the command line; the texts of aliases are turned into the field's own.

    Raises:
        ConfigError: an alias that has no such value.
    """
    if isinstance(value, str):
        return _converted(field, flag, Given(flag, "flag", value))
    return Given(flag, "flag", value)


def read_file(path: str) -> tuple[dict[str, Given], list[str]]:
    """Options of a JSON, TOML or YAML file whose keys are option names, dashes or underscores.

    Raises:
        ConfigError: unreadable, not a mapping, or an unknown key (with the nearest one).
    """
    data = _parse_file(Path(path))
    if not isinstance(data, dict):
        msg = f"config file {path}: the top level must be a mapping of option names to values"
        raise ConfigError(msg)
    return _from_keywords(data, f"file {path}")


def no_op_note(name: str, no_op: NoOp, value: object = None) -> str:
    """The line to print for an accepted option without effect; ConfigError where it matters."""
    if no_op.only is not None and value is not None and str(value).strip() != no_op.only:
        msg = f"{name} {value}: not supported yet; use {no_op.only}"
        raise ConfigError(msg)
    return f"{name} is accepted and has no effect: {no_op.why}"


def _from_env(env: EnvValues) -> dict[str, Given]:
    return {
        name: _converted(BY_NAME[name], variable, Given(variable, "env", text))
        for name, (variable, text) in env.values.items()
    }


def _from_keywords(
    arguments: Mapping[str, object], source: str
) -> tuple[dict[str, Given], list[str]]:
    known = keywords()
    harmless = {argument_name(flag): n for flag, n in no_op_flags().items()}
    given: dict[str, Given] = {}
    notes: list[str] = []
    for key, value in arguments.items():
        name = str(key).replace("-", "_")
        if value is None:
            continue
        if name in known:
            field, flag = known[name]
            found = Given(str(key), source, value if flag == field.flag else str(value))
            given[field.name] = _converted(field, flag, found)
        elif name in harmless:
            notes.append(no_op_note(str(key), harmless[name], value))
        else:
            msg = f"{source}: unknown option {str(key)!r}{nearest(name, known)}"
            raise ConfigError(msg)
    return given, notes


def nearest(name: str, known: Iterable[str]) -> str:
    """ "; did you mean X?", or nothing where no name is close."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _converted(field: Field, alias: str, given: Given) -> Given:
    """`given` under the field's flag or `alias`, as the field's own flag would take it."""
    if not isinstance(given.value, str):
        return given
    try:
        return replace(given, value=field.convert(alias, given.value))
    except ValueError as e:
        raise _wrong(field, given, e) from None


def _parse(field: Field, given: Given) -> Any:
    try:
        _check_text(given.value)
        return field.parse(given.value)
    except ValueError as e:
        raise _wrong(field, given, e) from None


def _wrong(field: Field, given: Given, error: ValueError) -> ConfigError:
    shown = "***" if field.secret else given.value
    return ConfigError(f"{given.source} {given.name}={shown}: {error}")


def _check_text(value: object) -> None:
    """ValueError for bytes of the command line or environment that are no UTF-8 (as surrogates)."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                msg = "holds bytes that are not UTF-8; give it (or rename it) in UTF-8"
                raise ValueError(msg) from None


def _parse_file(path: Path) -> object:
    readers = {".json": _json, ".toml": _toml, ".yaml": _yaml, ".yml": _yaml}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        msg = f"config file {path}: its name must end in {', '.join(readers)}"
        raise ConfigError(msg)
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            msg = f"config file {path}: larger than 1 MiB"
            raise ConfigError(msg)
        return reader(path.read_text(encoding="utf-8"))
    except OSError as e:
        msg = f"config file {path}: {e.strerror or e}"
        raise ConfigError(msg) from None
    except ConfigError:
        raise
    except Exception as e:  # each parser has its own error class; all mean a broken file
        msg = f"config file {path}: {' '.join(str(e).split())}"
        raise ConfigError(msg) from None


def _json(text: str) -> object:
    return json.loads(text)


def _toml(text: str) -> object:
    try:
        toml = import_module("tomllib")
    except ModuleNotFoundError:
        msg = "TOML needs Python 3.11; write it as JSON or YAML"
        raise ConfigError(msg) from None
    return toml.loads(text)


def _yaml(text: str) -> object:
    return import_module("yaml").safe_load(text)


__all__ = [
    "FIELDS",
    "Asked",
    "Given",
    "flag_given",
    "from_arguments",
    "load_options",
    "nearest",
    "no_op_note",
    "read_file",
]
