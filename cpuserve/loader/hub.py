"""From the name a user gives to files: a path, a built-in name, or a Hugging Face id."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, TypeVar

from cpuserve.errors import ModelError
from cpuserve.loader.builtin import BUILTIN, BuiltinModel, Progress, fetch_builtin
from cpuserve.loader.conversion import find_conversion
from cpuserve.loader.load import find_model
from cpuserve.log import get_logger

log = get_logger("loader")
T = TypeVar("T")

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
_REVISION = re.compile(r"[\w][\w./-]{0,199}")
# Everything cpuserve reads, and nothing else: no pickles, no code.
_PATTERNS = ("*.safetensors", "*.json", "merges.txt", "chat_template.jinja", "tokenizer.model")
# The library tries twice, and a name server can be silent for longer than any timeout it is given.
PROBE_TIMEOUT_S = 2.0
PROBE_DEADLINE_S = 4.5
CONVERTED = "%s has only pickles, which are never read; using its safetensors conversion, %s"


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    cache: Path | None = None,
) -> Path:
    """A model directory or .gguf file for `name`, downloading it if need be.

    name: a path, a built-in name, "owner/model" on the Hugging Face hub, or "owner/model:FILE.gguf"
    ("owner/model:Q4_0" picks the GGUF of that type). cache: where built-in models are kept.
    ModelError, one line, if there is no such model or it cannot be fetched.
    """
    _refuse_traps(name)
    local = _local(name)
    if local is not None:
        return local
    if name in BUILTIN:
        return fetch_builtin(BUILTIN[name], cache or cache_dir(), progress)
    repo, _, file = name.partition(":")
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo:
        raise _unknown(name)
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        msg = f"{revision[:100]!r} is not a revision of a model"
        raise ModelError(msg)
    return _from_hub(repo, file, revision, progress)


def pull(name: str, progress: Progress | None = None) -> Path:
    """Make sure the model is on this machine; returns where."""
    return resolve_model(name, progress=progress)


def list_builtin() -> list[BuiltinModel]:
    """The models that have a short name."""
    return list(BUILTIN.values())


def cache_dir() -> Path:
    """Where downloaded models are kept: CPUSERVE_CACHE, else cpuserve/ in the user's cache."""
    from cpuserve.config.env import environment

    env = environment()
    if env.get("CPUSERVE_CACHE"):
        return Path(env["CPUSERVE_CACHE"]).expanduser()
    base = env.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "cpuserve"


def _refuse_traps(name: str) -> None:
    if not name or len(name) > 4096 or any(ord(c) < 32 or ord(c) == 127 for c in name):
        msg = f"{name[:100]!r} is not a model name or path"
        raise ModelError(msg)


def _local(name: str) -> Path | None:
    """The path if `name` is one; None if it can only be a name."""
    path = Path(name).expanduser()
    looks_like_path = name.startswith(("/", "./", "../", "~")) or name in (".", "..")
    try:
        exists = path.exists() or path.is_symlink()
    except OSError:
        exists = False
    if exists:
        return _model_directory(path, name)
    weights = name.endswith((".gguf", ".safetensors", ".bin", ".pt")) and ":" not in name
    if looks_like_path or weights:
        msg = f"model path {name} does not exist"
        raise ModelError(msg)
    return None


def _unknown(name: str) -> ModelError:
    builtin = ", ".join(BUILTIN)
    return ModelError(
        f"{name[:200]!r} is not a model: give a path, a Hugging Face id (owner/model) or a "
        f"built-in name ({builtin})"
    )


def _from_hub(repo: str, file: str, revision: str | None, progress: Progress | None) -> Path:
    if file and (not re.fullmatch(r"[\w.-]{1,200}", file) or file.startswith(".")):
        msg = f"{file[:100]!r} is not a file or quantization of {repo}"
        raise ModelError(msg)
    # huggingface_hub takes 0.3 s to import; local models never need it.
    from huggingface_hub import snapshot_download

    try:
        wanted = _files_to_fetch(repo, file, revision)
        if wanted is None:
            return _pick(_cached_snapshot(repo, revision), repo, file)
        folder = snapshot_download(
            repo,
            revision=wanted.revision,
            allow_patterns=wanted.names,
            max_workers=4,
            tqdm_class=_bar_class(repo, progress),
        )
    except ModelError:
        raise
    except Exception as error:
        raise _explained(repo, revision, error) from error
    return _pick(Path(folder), repo, file)


def _cached_snapshot(repo: str, revision: str | None) -> Path:
    """What an earlier download left: models--OWNER--NAME/{refs/REVISION, snapshots/COMMIT}.

    snapshot_download(local_files_only=True) refuses it, because files that are never fetched here
    (pickles) are missing; missing weights are found when the checkpoint is opened.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    home = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    found = [folder for folder in [_snapshot(home, revision or "main")] if folder.is_dir()]
    if revision is None and not any(_has_weights(folder) for folder in found):
        # a conversion that an earlier start fetched instead of main (find_conversion)
        for pull in sorted((home / "refs" / "refs" / "pr").glob("*")):
            folder = _snapshot(home, f"refs/pr/{pull.name}")
            if _has_weights(folder):
                log.warning(CONVERTED, repo, f"refs/pr/{pull.name}, from the local cache")
                return folder
    if not found:
        msg = (
            f"model {repo} cannot be fetched: the hub cannot be reached, and there is neither "
            "a path of that name nor a copy in the local cache"
        )
        raise ModelError(msg)
    return found[0]


def _snapshot(home: Path, revision: str) -> Path:
    """Where the cache keeps a revision; it need not be there."""
    reference = home / "refs" / revision
    return home / "snapshots" / (reference.read_text().strip() if reference.is_file() else revision)


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf"))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What to fetch: names of files, and the revision that has them (None: main)."""

    names: list[str]
    revision: str | None


def _files_to_fetch(repo: str, file: str, revision: str | None) -> _Wanted | None:
    """The files cpuserve reads; None without a connection.

    Asked with a timeout of our own: snapshot_download waits for ever for a hub that is silent.
    """
    try:
        names = _within_deadline(lambda: _file_names(repo, revision))
    except Exception as error:
        if _kinds(error) & _NO_CONNECTION:
            return None
        raise
    if file:
        return _Wanted([_gguf_of(repo, names, file)], revision)
    if revision is None and _only_pickles(names):
        revision, names = _converted(repo, names)
    ggufs = sorted(n for n in names if n.endswith(".gguf"))
    if not any(n.endswith(".safetensors") for n in names):
        msg = f"{repo} has no safetensors weights"
        if ggufs:
            msg += f"; name one of its GGUF files, e.g. {repo}:{ggufs[0]}"
        elif any(n.endswith((".bin", ".pt")) for n in names):
            msg += " (only pickles, which are never read); look for a revision that has them"
        raise ModelError(msg)
    # Mistral repositories hold the same weights twice, once as consolidated*.safetensors.
    kept = [n for n in names if any(fnmatch(n, p) for p in _PATTERNS)]
    return _Wanted([n for n in kept if not n.startswith("consolidated")] or kept, revision)


def _only_pickles(names: list[str]) -> bool:
    readable = any(n.endswith((".safetensors", ".gguf")) for n in names)
    return not readable and any(n.endswith((".bin", ".pt")) for n in names)


def _converted(repo: str, names: list[str]) -> tuple[str | None, list[str]]:
    """(revision, files) of the hub's conversion to safetensors; (None, names) if there is none."""
    try:
        found = _within_deadline(
            lambda: find_conversion(repo, lambda revision: _file_names(repo, revision))
        )
    except Exception as error:
        # A repository may have its pull requests turned off; the refusal that follows is clear.
        log.debug("no conversion of %s: %s", repo, error)
        return None, names
    if found is None:
        return None, names
    log.warning(CONVERTED, repo, found[0])
    return found


def _file_names(repo: str, revision: str | None) -> list[str]:
    """Files at the top of the repository."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision, timeout=PROBE_TIMEOUT_S)
    return [s.rfilename for s in info.siblings or [] if "/" not in s.rfilename]


def _within_deadline(ask: Callable[[], T]) -> T:
    """ask() in a thread that is left behind when the deadline passes; TimeoutError then."""
    answers: Queue[T | Exception] = Queue()

    def run() -> None:
        try:
            answers.put(ask())
        except Exception as error:
            answers.put(error)

    Thread(target=run, daemon=True).start()
    try:
        answer = answers.get(timeout=PROBE_DEADLINE_S)
    except Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _gguf_of(repo: str, names: list[str], file: str) -> str:
    """The file called `file`, or the one GGUF whose name ends in that type (model-Q4_0.gguf)."""
    ggufs = sorted(n for n in names if n.endswith(".gguf"))
    if file in ggufs:
        return file
    tails = tuple(f"{mark}{file.lower()}.gguf" for mark in "-._")
    found = [n for n in ggufs if n.lower().endswith(tails)]
    if len(found) != 1:
        listed = ", ".join(found or ggufs) or "none"
        msg = f"{repo} must have exactly one GGUF file for {file!r}; it has {listed[:500]}"
        raise ModelError(msg)
    return found[0]


def _pick(folder: Path, repo: str, file: str) -> Path:
    if file:
        return folder / _gguf_of(repo, [p.name for p in folder.iterdir()], file)
    return _model_directory(folder, repo)


def _model_directory(path: Path, name: str) -> Path:
    """find_model(path), refused if it holds no model."""
    found = find_model(path)
    if found.is_dir() and not (found / "config.json").exists():
        msg = f"{name} holds no config.json and no .gguf file, so it is not a model"
        raise ModelError(msg)
    return found


_NO_CONNECTION = frozenset(
    {"OfflineModeIsEnabled", "ConnectionError", "TransportError", "TimeoutError", "ProxyError"}
)


def _kinds(error: Exception) -> set[str]:
    """Names of the error's classes: which HTTP library raises them changes between versions."""
    return {c.__name__ for c in type(error).__mro__}


def _explained(repo: str, revision: str | None, error: Exception) -> ModelError:
    """One line for what the hub library raises, by the names of its error classes."""
    kinds = _kinds(error)
    where = f"{repo} at revision {revision}" if revision else repo
    if "GatedRepoError" in kinds:
        why = "access is restricted: accept its terms on the hub, then log in (hf auth login)"
    elif "RepositoryNotFoundError" in kinds:
        why = "there is no such model on the hub (or it is private: hf auth login)"
    elif "RevisionNotFoundError" in kinds:
        why = "there is no such revision"
    elif kinds & {*_NO_CONNECTION, "LocalEntryNotFoundError"}:
        why = "the hub cannot be reached, and neither a path nor the local cache has it"
    else:
        why = " ".join(str(error).split())[:300] or type(error).__name__
    return ModelError(f"model {where} cannot be fetched: {why}")


def _bar_class(repo: str, progress: Progress | None) -> Any:
    """A tqdm class that reports bytes to `progress` and draws nothing."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> Any:
            shown = super().update(n)
            if progress is not None and self._counts_bytes:
                progress(f"download {repo}", int(self.n), int(self.total or 0))
            return shown

    return Bar


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, _text: str) -> int:
        return 0

    def flush(self) -> None:
        return None
