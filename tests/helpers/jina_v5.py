"""Tiny models of jina-embeddings v5, with a random adapter for each task."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

from tests.helpers.adapter import adapter_of
from tests.helpers.tiny import copy_of, tiny_model

TASKS = ("retrieval", "text-matching", "clustering")
# The family of each size, and what its config has besides.
SIZES = {"small": ("qwen3", {}), "nano": ("eurobert", {"is_decoder": False})}


def base_of(size: str) -> Path:
    """The checkpoint of the family, with the same weights and no tasks."""
    return tiny_model(SIZES[size][0])


def task_adapter(size: str, task: str) -> Path:
    """The directory of a task's adapter."""
    return adapter_of(base_of(size), seed=1 + TASKS.index(task))


@functools.cache
def jina_v5(size: str) -> Path:
    """The directory of a model."""
    base = base_of(size)
    path = copy_of(base, "jina-v5-")
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["JinaEmbeddingsV5Model"], "task_names": [*TASKS], **SIZES[size][1]}
    (path / "config.json").write_text(json.dumps(config))
    for task in TASKS:
        shutil.copytree(task_adapter(size, task), path / "adapters" / task)
    return path
