"""Serve the models that clients created, from the directory in --models-dir."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cpuserve.api.ollama.created.directory import ModelDirectory
from cpuserve.api.ollama.created.store import CreatedModels

if TYPE_CHECKING:
    from cpuserve.api.callers.known_callers import KnownCallers
    from cpuserve.api.ollama.created.store import MakeLoader
    from cpuserve.config.server import ServerOptions
    from cpuserve.serving.models.registry import ModelRegistry


@dataclass(frozen=True, slots=True)
class Creation:
    """How the server starts engines for models that clients create.

    sources: the value of --model for each model of the command line, by its served name.
    """

    make_loader: MakeLoader
    sources: Mapping[str, str]


def stored_models(
    models: ModelRegistry, options: ServerOptions, creation: Creation, callers: KnownCallers
) -> CreatedModels:
    """Return the models in --models-dir, which `models` serves from now on.

    callers: who may own them.

    Raises:
      ConfigError: the directory cannot be used.
    """
    assert options.models_dir is not None
    directory = ModelDirectory(
        options.models_dir, options.models_bytes, options.models_count, callers
    )
    return CreatedModels(directory, models, creation.make_loader, creation.sources)
