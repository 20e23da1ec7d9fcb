"""Reads the adapters for tasks in the published checkpoint of jina-embeddings v3.

The file with the weights has the adapters as well. Each of their tensors stacks one matrix per
task, in the order of `lora_adaptations` in config.json. An adapter has the name of its task.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from cpuserve.loader.load import read_json
from cpuserve.loader.lora_files import Adapter, StoredMatrix, check_alpha, check_rank, fail
from cpuserve.loader.names import checkpoint_to_hf
from cpuserve.loader.safetensors import SafeTensor, SafetensorsFile
from cpuserve.loader.tasks import OWN, own_tasks
from cpuserve.quant.dense import SOURCES

FILE = "model.safetensors"
_TENSOR = re.compile(r"(?P<module>.+)\.parametrizations\.weight\.0\.lora_(?P<side>[AB])")
_UNREAD = "pooler.dense"  # computing embeddings does not need this linear


class TaskAdapters:
    """The task adapters of a checkpoint; each file is read once for all tasks."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """config: of the checkpoint at `path`; ModelError if its tasks or files are broken."""
        self._path = path
        self._config = config
        self._tasks = own_tasks(path, config)

    @cached_property
    def _file(self) -> SafetensorsFile:
        return SafetensorsFile(self._path / FILE)

    def open(self, name: str) -> Adapter:
        """Return the adapter for the task `name`.

        Raises:
            ModelError: the checkpoint has no such task, or its adapters are broken.
        """
        path, config, tasks = self._path, self._config, self._tasks
        if name not in tasks:
            known = ", ".join(tasks) or "no tasks"
            fail(name, f"{path} has adapters for {known}, and not for {name}")
        rank = check_rank(name, config.get("lora_rank", 4))
        alpha = check_alpha(name, "lora_alpha", config.get("lora_alpha", 1))
        matrices = {}
        for tensor in self._file.tensors.values():
            match = _TENSOR.fullmatch(tensor.name)
            if match is None:
                continue
            module = checkpoint_to_hf(f"{match['module']}.weight").removesuffix(".weight")
            if module != _UNREAD:
                flip = module.startswith("embeddings.") and match["side"] == "B"
                matrix = _matrix(name, tensor, len(tasks), tasks.index(name), flip=flip)
                matrices[module, match["side"]] = matrix
        return Adapter(name, path, rank, alpha / rank, self._file.file, matrices, task=name)


def find_tasks(path: Path) -> TaskAdapters | None:
    """Return the adapters for tasks that the checkpoint at `path` has in the file of its weights.

    None if `path` is no checkpoint with such adapters. ModelError if its tasks or files are broken.
    """
    file = path / "config.json"
    config = read_json(file, "config") if file.is_file() else {}
    return TaskAdapters(path, config) if OWN in config else None


def _matrix(name: str, tensor: SafeTensor, tasks: int, index: int, *, flip: bool) -> StoredMatrix:
    """Return the matrix of one task in a stack; flip: whether the stack has transposed matrices."""
    if tensor.dtype not in SOURCES or len(tensor.shape) != 3 or tensor.shape[0] != tasks:
        fail(name, f"tensor {tensor.name} is no stack of {tasks} matrices of F32, F16 or BF16")
    size = tensor.size // tasks
    shape = tensor.shape[:0:-1] if flip else tensor.shape[1:]
    source = SOURCES[tensor.dtype]
    offset = tensor.offset + index * size
    return StoredMatrix(tensor.name, shape, source, offset, size, transposed=flip)
