"""Settings of the preprocessing that the options of a server have."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import ConfigError, InvalidRequest
from cpuserve.media.pictures.families.base import Family
from cpuserve.media.pictures.families.checkpoint import family_of, family_with
from cpuserve.media.pictures.families.preprocessing import MOST_NUMBER, refuse_setting

if TYPE_CHECKING:
    from cpuserve.config.server import ServerOptions

# The options with a setting of their own.
_OPTIONS = {"max_tokens": "--image-max-tokens", "min_tokens": "--image-min-tokens"}


def family_at(path: Path, mmproj: str | None) -> Family | None:
    """Return the family of a model; None if pictures are nothing to it.

    path, mmproj: the files of the model (EngineConfig.model_path and mmproj).

    Raises ModelError if its files say too little about pictures.
    """
    if mmproj:
        from cpuserve.loader.gguf.mmproj import mmproj_config
        from cpuserve.loader.gguf.parts import open_gguf

        return family_with(mmproj_config(open_gguf(Path(mmproj))))
    return family_of(path) if path.is_dir() else None


def server_settings(options: ServerOptions, most_tokens: int) -> dict[str, Any]:
    """Return the settings for all pictures; most_tokens: EngineConfig.media_tokens."""
    settings = dict(options.mm_processor_kwargs or {})
    if most_tokens:
        settings["max_tokens"] = most_tokens
    if options.image_min_tokens:
        settings["min_tokens"] = options.image_min_tokens
    return settings


def changed(family: Family, settings: Mapping[str, Any]) -> Family:
    """Return the family with settings of a request.

    Raises InvalidRequest if the family cannot follow one, or a number has more than 63 bits.
    """
    for name, value in settings.items():
        for number in value.values() if isinstance(value, Mapping) else [value]:
            if isinstance(number, int) and abs(number) > MOST_NUMBER:
                refuse_setting(name, f"has a number of more than {MOST_NUMBER}")
    return family.changed(settings)


def configured(family: Family, settings: Mapping[str, Any]) -> Family:
    """Return the family with the settings of the server.

    Raises ConfigError, with the options, if the family cannot follow one.
    """
    try:
        return changed(family, settings)
    except InvalidRequest as error:
        options = {
            f"{_OPTIONS[name]} {value}" if name in _OPTIONS else "--mm-processor-kwargs": None
            for name, value in settings.items()
        }
        msg = f"{' and '.join(options)}: {error.message}"
        raise ConfigError(msg) from None


def check_options(options: ServerOptions, most_tokens: int, path: str, mmproj: str | None) -> None:
    """Raise ConfigError if options of the server have a setting that a model cannot follow.

    For the other parameters see `server_settings` and `family_at`.
    """
    settings = server_settings(options, most_tokens)
    family = family_at(Path(path), mmproj) if settings else None
    if family is not None:
        configured(family, settings)
