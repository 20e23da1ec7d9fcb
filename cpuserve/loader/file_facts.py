"""The facts in the files of a model: metadata, and the type and shape of each tensor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpuserve.loader.gguf.file import GgufFile


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """A tensor in a file; shape: the innermost dimension comes first, as in GGUF."""

    name: str
    type: str
    shape: list[int]


@dataclass(frozen=True, slots=True)
class FileFacts:
    """metadata: keys of a GGUF file, or of config.json; lists are None if they were not read."""

    metadata: dict[str, Any]
    tensors: list[TensorFacts]


def file_facts(path: Path, *, whole: bool) -> FileFacts:
    """Return the facts in the files at `path`; whole: whether to read tensors and long lists.

    Raises:
      ModelError: the files do not exist any more or are broken.
    """
    if path.is_dir():
        from cpuserve.loader.load import read_config
        from cpuserve.loader.safetensors import SafetensorsStore

        config = {key: value for key, value in read_config(path).items() if _is_plain(value)}
        if not whole:
            return FileFacts(config, [])
        files = SafetensorsStore(path).files
        found = [tensor for file in files for tensor in file.tensors.values()]
        return FileFacts(config, [TensorFacts(t.name, t.dtype, [*t.shape][::-1]) for t in found])
    from cpuserve.loader.gguf.parts import open_gguf

    file = open_gguf(path)
    metadata = {key: _value(file, key, whole=whole) for key in file.keys()}  # noqa: SIM118
    if not whole:
        return FileFacts(metadata, [])
    tensors = [TensorFacts(t.name, t.dtype, [*t.shape][::-1]) for t in file.tensors.values()]
    return FileFacts(metadata, tensors)


def _is_plain(value: object) -> bool:
    return value is None or isinstance(value, int | float | str)


def _value(file: GgufFile, key: str, *, whole: bool) -> Any:
    if not whole and file.count(key) > 1:
        return None
    value = file.value(key)
    return value if whole or not isinstance(value, list) else None
