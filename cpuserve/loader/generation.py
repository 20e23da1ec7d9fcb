"""Default sampling parameters of a model, from generation_config.json or the built-in model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cpuserve.base.errors import ConfigError, InvalidRequest, ModelError
from cpuserve.config.generation import Number, merged, read_settings
from cpuserve.loader.builtin import BUILTIN
from cpuserve.loader.load import read_json
from cpuserve.sampling.params import SamplingParams

FILE = "generation_config.json"


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Default sampling parameters by name, and the reason for them."""

    values: Mapping[str, Number] = field(default_factory=dict)
    why: str = "the model has no generation_config.json"


def recommended(source: str, name: str, path: Path) -> GenerationDefaults:
    """Return the default sampling parameters of the model called `name` at `path`.

    source: "auto" (the model's defaults),
    "cpuserve" (not the model's defaults), or a directory or JSON file with defaults.

    Raises:
        ConfigError: `source` is a path without a generation_config.json.
        ModelError: the file is broken or a value is out of range.
    """
    if source == "cpuserve":
        return GenerationDefaults(why="as requested: OpenAI's defaults instead of the model's")
    if source != "auto":
        return _of_file(_asked_file(source), "as requested")
    builtin = BUILTIN.get(name)
    if builtin is not None and path.name == builtin.file_name:
        return GenerationDefaults(builtin.generation, builtin.generation_why)
    if path.is_dir() and (path / FILE).exists():
        return _of_file(path / FILE, "the model's")
    return GenerationDefaults()


def check_ranges(values: Mapping[str, Number | None]) -> None:
    """Raise InvalidRequest, with the name of the parameter, for a value out of range."""
    SamplingParams(**merged({}, values))  # type: ignore[arg-type]


def _asked_file(source: str) -> Path:
    try:
        path = Path(source).expanduser()
        file = path / FILE if path.is_dir() else path
        exists = file.exists()
    except (OSError, RuntimeError) as error:  # no permission, a long name, an unknown ~user
        msg = f"--generation-config {source[:100]} cannot be read: {error}"
        raise ConfigError(msg) from None
    if not exists:
        msg = (
            f"--generation-config {source}: there is no {file}; give the directory of a "
            f"{FILE}, or auto"
        )
        raise ConfigError(msg)
    return file


def _of_file(file: Path, whose: str) -> GenerationDefaults:
    try:
        values = merged({}, read_settings(read_json(file, "generation config")))
        check_ranges(values)
    except (ValueError, InvalidRequest) as error:
        msg = f"generation config {file}: {error}"
        raise ModelError(msg) from None
    return GenerationDefaults(
        values, f"{whose} {FILE}" if values else f"{whose} {FILE} has no settings"
    )
