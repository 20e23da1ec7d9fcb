"""The adapters and prompts for tasks in a checkpoint (jina-embeddings v3 and v5)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.models.config import read_architectures

FOLDER = "adapters"  # the folder in a v5 checkpoint that has a folder for each task
OWN = "lora_adaptations"  # v3: the key with the tasks; the weight file has their adapters
# The prompts before a query and a document; the Python code of v5 has them.
PROMPTS = {"query": "Query: ", "document": "Document: "}


def has_tasks(config: Mapping[str, Any]) -> bool:
    """Whether checkpoints with this config have folders of adapters for tasks (v5)."""
    return "JinaEmbeddingsV5Model" in read_architectures(config)


def task_adapters(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the path of the adapter for each task; {} if the checkpoint has none.

    Raises:
        ModelError: the tasks in the config are not a list of texts.
    """
    if own := own_tasks(path, config):
        return dict.fromkeys(own, str(path))
    if not has_tasks(config) or not (path / FOLDER).is_dir():
        return {}
    names = _names(path, config, "task_names")
    if any(name == ".." or Path(name).name != name for name in names):
        msg = f"{path}: task_names is {str(names)[:60]}; it must be a list of names of folders"
        raise ModelError(msg)
    return {name: str(path / FOLDER / name) for name in names}


def own_tasks(path: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the tasks with adapters in the file of the weights (v3), or [].

    Each adapter tensor stacks the matrices of all tasks, in the order of this list.

    Raises:
        ModelError: the tasks in the config are not a list of texts, or the file is broken.
    """
    if config.get(OWN) is None or not path.is_dir():
        return []
    from cpuserve.loader.safetensors import SafetensorsStore

    stored = (tensor for file in SafetensorsStore(path).files for tensor in file.tensors)
    return _names(path, config, OWN) if any(name.endswith(".lora_A") for name in stored) else []


def task_prompts(path: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Return the prompts of tasks by name; "" is the name of the default prompt, if there is one.

    Raises:
        ModelError: task_instructions in the config is not an object of texts.
    """
    if has_tasks(config):
        return {"": PROMPTS["document"], **PROMPTS}
    found = config.get("task_instructions") or {}
    if config.get(OWN) is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(text, str) for text in found.values()):
        msg = f"{path}: task_instructions of config.json must be an object with texts"
        raise ModelError(msg)
    return {name: found.get(name, "") for name in _names(path, config, OWN)}


def _names(path: Path, config: Mapping[str, Any], key: str) -> list[str]:
    """Return the tasks in config[key]; ModelError unless it is a list of texts."""
    names = config.get(key) or []
    if not isinstance(names, list) or not all(isinstance(n, str) and n for n in names):
        msg = f"{path}: {key} is {str(names)[:60]}; it must be a list of names of {_WHAT[key]}"
        raise ModelError(msg)
    return names


_WHAT = {"task_names": "folders", OWN: "tasks"}
