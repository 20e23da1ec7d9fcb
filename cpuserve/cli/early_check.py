"""Refuses a model that cannot be served before the server opens its port."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.prepare import find, model_name

if TYPE_CHECKING:
    from cpuserve.config.options import EngineOptions


def check_architecture(options: EngineOptions) -> None:
    """Raise ModelError if `options` name a directory with a model that cannot be served.

    Only config.json is read. Other models are checked when they are prepared:
    GGUF files are large, and models of the hub may have to be downloaded first.
    """
    from cpuserve.loader.load import read_config
    from cpuserve.models.generic import runs_through_transformers

    try:
        path = Path(model_name(options)).expanduser()
        is_model = any((path / name).is_file() for name in ("config.json", "model_index.json"))
    except (OSError, ValueError, RuntimeError):  # it can only be the name of a model
        return
    if is_model and (found := find(options)).is_dir():
        runs_through_transformers(read_config(found))
