"""The identity of a model's files: whether a path still has the file of the first start.

An engine that is started again reads its model from the same paths. If another file has one of
these paths meanwhile, the engine would serve another model under the old name, with the tokenizer
that the front end has loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from cpuserve.config.engine import SourceFile
from cpuserve.errors import SourceChanged
from cpuserve.loader.source_digest import weight_files

# Engines read these files of a directory: weights, configurations and tokenizers, and the same in
# the folders of Dense modules and of the adapters of tasks.
_PATTERNS = ("*.safetensors", "*.json", "merges.txt", "*/*.safetensors", "*/*.json")


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
