"""The models on this machine: built-in ones and those of the hub's cache, their sizes, removal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.config.env import cache_dir
from cpuserve.config.nearest import nearest
from cpuserve.loader.builtin import BUILTIN
from cpuserve.loader.hub import files_of_models, find_stored, gguf_of, has_safetensors, parts_of


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on the disk.

    name: the name for `cpuserve serve`. format: "gguf" or "safetensors".
    modified: when its newest file was written, in seconds since 1970.
    files: the paths to remove: those in the cache, and the blobs that links there point to.
    """

    name: str
    bytes: int
    modified: float
    format: str
    files: tuple[Path, ...]


def stored_models() -> list[StoredModel]:
    """Return the models on this machine, the newest first; a directory of the user is none."""
    models = [*_builtin(), *(model for repo in _repositories() for model in _of_repository(repo))]
    return sorted(models, key=lambda model: -model.modified)


def stored_model(name: str) -> StoredModel:
    """Return the model `name`; of GGUF files, owner/model:TYPE or the only file of owner/model.

    Raises:
        ModelError: there is no such model on this machine.
    """
    models = stored_models()
    repo, _, variant = name.partition(":")
    models_of_repo = [model for model in models if model.name.partition(":")[0] == repo]
    exact = [model for model in models_of_repo if model.name == name]
    if not exact and variant and models_of_repo:
        files = [model.name.partition(":")[2] for model in models_of_repo if ":" in model.name]
        exact = [m for m in models_of_repo if m.name == f"{repo}:{gguf_of(repo, files, variant)}"]
    if not exact and not variant and len(models_of_repo) == 1:
        exact = models_of_repo
    if exact:
        return exact[0]
    names = [model.name for model in models_of_repo or models]
    nearest_name = nearest(name, names) if not models_of_repo else None
    some_names = ", ".join(names[:20]) or "none"
    msg = f"{name[:200]!r} is not on this machine{nearest_name or ';'} there are: {some_names}"
    raise ModelError(msg)


def path_of(name: str) -> Path:
    """Return the path of a model of the user, or of one on this machine; nothing is downloaded.

    Raises:
        ModelError: there is no such model here.
    """
    return find_stored(name)


def remove(model: StoredModel) -> None:
    """Remove the files of a model; other models and revisions keep theirs.

    Raises:
        OSError: a file cannot be removed.
    """
    for file in model.files:
        file.unlink(missing_ok=True)
    for folder in sorted({file.parent for file in model.files}, key=lambda f: -len(f.parts)):
        while folder.is_dir() and folder != cache_dir() and not any(folder.iterdir()):
            folder.rmdir()
            folder = folder.parent


def _builtin() -> Iterable[StoredModel]:
    for model in BUILTIN.values():
        path = cache_dir() / model.file_name
        if path.is_file():
            files = (path, *(path.with_suffix(end) for end in (".checked.json", ".lock")))
            stat = path.stat()
            yield StoredModel(model.name, stat.st_size, stat.st_mtime, "gguf", files)


def _repositories() -> Iterable[Any]:
    """Yield the model repositories in the hub's cache."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        found = scan_cache_dir()
    except CacheNotFound:
        return
    yield from (repo for repo in found.repos if repo.repo_type == "model")


def _of_repository(repo: Any) -> Iterable[StoredModel]:
    """Yield each GGUF model of a repository, and one for its safetensors."""
    newest: dict[str, Any] = {}
    files_by_name: dict[str, list[Path]] = {}
    for revision in sorted(repo.revisions, key=lambda revision: revision.last_modified):
        for file in revision.files:
            name = file.file_path.relative_to(revision.snapshot_path).as_posix()
            newest[name] = file
            files_by_name.setdefault(name, []).extend((file.file_path, file.blob_path))
    ggufs = [name for name in newest if name.endswith(".gguf")]
    models = {f"{repo.repo_id}:{first}": parts_of(first) for first in files_of_models(ggufs)}
    if has_safetensors(list(newest)):
        models[repo.repo_id] = [name for name in newest if name not in ggufs]
    for title, names in models.items():
        files = [newest[name] for name in names if name in newest]
        yield StoredModel(
            title,
            sum(file.size_on_disk for file in files),
            max(file.blob_last_modified for file in files),
            "gguf" if ":" in title else "safetensors",
            tuple(path for name in names for path in files_by_name.get(name, ())),
        )
