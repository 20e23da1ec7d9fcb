"""The adapters and prompts that a checkpoint has for tasks (jina-embeddings v5)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpuserve.errors import ModelError
from cpuserve.models.config import read_architectures

FOLDER = "adapters"  # of a checkpoint: it has a folder for each task
# Prompts before a query and a document; the code of the checkpoint has them.
PROMPTS = {"query": "Query: ", "document": "Document: "}


def has_tasks(config: Mapping[str, Any]) -> bool:
    """Whether checkpoints with this config have adapters for tasks."""
    return "JinaEmbeddingsV5Model" in read_architectures(config)


def task_adapters(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The path of the adapter for each task; empty if the checkpoint has none.

    Raises:
        ModelError: task_names is no list of names.
    """
    if not has_tasks(config) or not (path / FOLDER).is_dir():
        return {}
    names = config.get("task_names") or []
    fits = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not fits or any(name in ("", "..") or Path(name).name != name for name in names):
        msg = f"{path}: task_names is {str(names)[:60]}; it must be a list of names of folders"
        raise ModelError(msg)
    return {name: str(path / FOLDER / name) for name in names}
