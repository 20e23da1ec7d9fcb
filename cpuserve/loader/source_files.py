"""The files of a model: whether a path still has the file of the first start, and their content.

An engine that is started again reads its model from the same paths. If another file has one of
these paths meanwhile, the engine would serve another model under the old name, with the tokenizer
that the front end has loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpuserve.base.errors import SourceChanged
from cpuserve.config.engine import SourceFile
from cpuserve.loader.source_digest import weight_files
from cpuserve.models import FAMILIES

if TYPE_CHECKING:
    from cpuserve.loader.gguf.file import GgufFile


# Engines read these files of a directory: weights, configurations and tokenizers, and the same in
# the folders of Dense modules and of the adapters of tasks. Some families have further tokenizers.
_PATTERNS = (
    *("*.safetensors", "*.json", "merges.txt", "tokenizer.model", "*/*.safetensors", "*/*.json"),
    *FAMILIES.tokenizer.files,
)


def source_files(paths: Iterable[Path]) -> list[SourceFile]:
    """Return the files at `paths` that engines read, which are model files or directories.

    Files that cannot be read are left out, because opening them reports a better error.
    """
    files = dict.fromkeys(file for path in paths for file in _read_at(path))
    return [known for file in files if (known := _identity(file)) is not None]


def check_same(sources: Sequence[SourceFile]) -> None:
    """Raise SourceChanged if a path has no file any more, or another one."""
    for known in sources:
        now = _identity(Path(known.path))
        if now == known:
            continue
        what = "has been removed" if now is None else "has been replaced or changed"
        file = Path(known.path)
        msg = (
            f"the file {file.name} (in {file.parent}) {what} since the model was first loaded, so "
            "the model is not loaded again: put the file back, or start again to load the new one"
        )
        raise SourceChanged(msg)


def _read_at(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            return sorted(file for pattern in _PATTERNS for file in path.glob(pattern))
    except OSError:  # the name is too long, or the directory cannot be read
        return []
    return weight_files(path)


def _identity(file: Path) -> SourceFile | None:
    try:
        found = file.stat()
    except (OSError, ValueError):
        return None
    return SourceFile(str(file), found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


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
