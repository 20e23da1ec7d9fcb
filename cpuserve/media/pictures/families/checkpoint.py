"""Find the family of a checkpoint, with the numbers of its files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.base.fault_points import fault
from cpuserve.base.registry import imported
from cpuserve.media.pictures.families.base import Family
from cpuserve.media.pictures.families.preprocessing import PictureFiles
from cpuserve.models import media_reader

MAX_SETTINGS_BYTES = 10_000_000  # of a file with the settings of pictures
# Makes a family from what the files of a checkpoint say.
FamilyReader: TypeAlias = Callable[[PictureFiles], Family]


def reader_of(config: Mapping[str, Any]) -> FamilyReader | None:
    """Return what reads the family of the model with this config; None if it has no pictures."""
    place = media_reader(config)
    if place is None:
        return None
    reader: FamilyReader = imported(place)
    return reader


def family_with(config: Mapping[str, Any]) -> Family | None:
    """Return the family of a model in GGUF files; None if pictures are nothing to it.

    config: the config of its mmproj file (`mmproj_config`).

    Raises ModelError if numbers are missing.
    """
    reader = reader_of(config)
    if reader is None:
        return None
    return reader(PictureFiles(config, config["image_processor"], {}, {}))


def family_of(folder: Path) -> Family | None:
    """Return the family of a checkpoint in a folder; None if pictures are nothing to its model.

    Raises ModelError if files or numbers are missing.
    """
    config = _read(folder / "config.json")
    reader = reader_of(config)
    if reader is None:
        return None
    processor_config = _read(folder / "processor_config.json")
    processor = processor_config.get("image_processor")  # before the other file, as in transformers
    if not isinstance(processor, Mapping) or not processor:
        processor = _read(folder / "preprocessor_config.json")
    if not processor:
        msg = f"{folder} has no preprocessor_config.json"
        raise ModelError(msg)
    tokens = _tokens(_read(folder / "tokenizer_config.json"))
    return reader(PictureFiles(config, processor, processor_config, tokens))


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens, by their names in tokenizer_config.json."""
    tokens: dict[str, str] = {}
    for keys in (config.get("extra_special_tokens"), config):
        for name, token in keys.items() if isinstance(keys, Mapping) else ():
            text = token.get("content") if isinstance(token, Mapping) else token
            if name.endswith("_token") and isinstance(text, str):
                tokens[name] = text
    return tokens


def _read(path: Path) -> Mapping[str, Any]:
    """Return the object in a JSON file; {} if there is no such file. Raises ModelError."""
    from cpuserve.loader.mapped import read_small

    if not path.exists():
        return {}
    try:
        fault("processor_file.read")
        settings = msgspec.json.decode(read_small(path, "settings of pictures", MAX_SETTINGS_BYTES))
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        msg = f"{path} cannot be read: {error}"
        raise ModelError(msg) from None
    return settings if isinstance(settings, dict) else {}
