"""Merges flags, environment and config file, and records the source of each value.

Flags take precedence over the environment, and the environment over the config file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from cpuserve.base.errors import ConfigError
from cpuserve.base.fault_points import fault
from cpuserve.config.env import EnvValues, environment, read_env
from cpuserve.config.field import Field
from cpuserve.config.fields import (
    BY_NAME,
    FIELDS,
    argument_name,
    keywords,
    no_op_flags,
)
from cpuserve.config.missing import why_missing
from cpuserve.config.nearest import nearest
from cpuserve.config.no_op import NoOp
from cpuserve.config.options import EngineOptions
from cpuserve.config.server import ServerOptions

MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Given:
    """A value that the user has set: under which name, and where ("flag", "env", "file PATH")."""

    name: str
    source: str
    value: object


@dataclass(frozen=True, slots=True)
class Asked:
    """All requested options, the source of each one ("flag --dtype"), and notes to print."""

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
    """Merge the flags with the environment and the config file.

    Raises:
        ConfigError: a value does not have the type of its option; the message has the flag, the
            variable or the key in the file.
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
    """Merge keyword arguments (of `LLM(...)`) with the environment; None = the option is not set.

    Raises:
        ConfigError: an unknown keyword (the nearest one is suggested), or a value of a wrong type.
    """
    given, notes = _from_keywords(arguments, "argument")
    return load_options(given, environ=environ, notes=notes)


def flag_given(field: Field, flag: str, value: object, before: Given | None = None) -> Given:
    """Return a value from the command line; translate a text that was passed with an alias.

    before: the value from earlier on the command line.
    The new value is added to a value of the kind "list" or "names", and replaces any other value.

    Raises:
        ConfigError: the alias does not accept this text, or an item of a list is wrong.
    """
    given = Given(flag, "flag", value)
    if isinstance(value, str):
        given = _converted(field, flag, given)
    if before is None or field.kind not in ("list", "names"):
        return given
    return replace(given, value=[*_parse(field, before), *_parse(field, given)])


def read_file(path: str) -> tuple[dict[str, Given], list[str]]:
    """Read a JSON, TOML or YAML file; its keys are option names with dashes or underscores.

    Returns the options, and notes to print.

    Raises:
        ConfigError: the file cannot be read, is not a mapping, or has an unknown key (the message
            suggests the nearest one).
    """
    data = parse_file(path)
    if not isinstance(data, dict):
        msg = f"config file {path}: the top level must be a mapping of option names to values"
        raise ConfigError(msg)
    return _from_keywords(data, f"file {path}")


def options_of(arguments: Mapping[str, object], source: str) -> tuple[dict[str, object], list[str]]:
    """Return the values of options, by their keys in config files, and notes to print.

    Raises:
        ConfigError: an unknown option, or a value of the wrong type.
    """
    given, notes = _from_keywords(arguments, source)
    return {name: _parse(BY_NAME[name], found) for name, found in given.items()}, notes


def no_op_note(name: str, no_op: NoOp, value: object = None) -> str:
    """Return the note on an option without effect; ConfigError if its value would have one."""
    if no_op.only and value is not None and str(value).strip() not in no_op.only:
        msg = f"{name} {value} is not supported yet; use {' or '.join(no_op.only)}"
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
            msg = f"{source}: {_unknown(str(key), known)}"
            raise ConfigError(msg)
    return given, notes


def _unknown(key: str, known: Iterable[str]) -> str:
    why = why_missing(key)
    if why is not None:
        return f"option {key!r} is not supported: {why}"
    return f"unknown option {key!r}{nearest(key.replace('-', '_'), known)}"


def _converted(field: Field, alias: str, given: Given) -> Given:
    """Translate a value that was set with `alias` to the text that the main flag accepts."""
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
    """Raise a ValueError for surrogates, which Python makes of bytes that are not UTF-8."""
    for text in value if isinstance(value, list) else [value]:
        if isinstance(text, str) and not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError:
                msg = "contains bytes that are not UTF-8; write it (or rename the file) in UTF-8"
                raise ValueError(msg) from None


def parse_file(name: str, what: str = "config file") -> object:
    """Return the content of a JSON, TOML or YAML file; ConfigError if it cannot be read."""
    path = Path(name)
    readers = {".json": _json, ".toml": _toml, ".yaml": _yaml, ".yml": _yaml}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        msg = f"{what} {path}: its name must end in one of {', '.join(readers)}"
        raise ConfigError(msg)
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            msg = f"{what} {path}: the file is larger than 1 MiB, the limit for config files"
            raise ConfigError(msg)
        fault("options.read")
        return reader(path.read_text(encoding="utf-8"))
    except OSError as e:
        msg = f"{what} {path}: cannot be read: {e.strerror or e}"
        raise ConfigError(msg) from None
    except ConfigError:
        raise
    except Exception as e:  # each kind of parser raises its own error class
        msg = f"{what} {path}: {' '.join(str(e).split())}"
        raise ConfigError(msg) from None


def _json(text: str) -> object:
    return json.loads(text)


def _toml(text: str) -> object:
    try:
        toml = import_module("tomllib")
    except ModuleNotFoundError:
        msg = "TOML files need Python 3.11 or newer; write the file as JSON or YAML"
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
    "no_op_note",
    "options_of",
    "parse_file",
    "read_file",
]
