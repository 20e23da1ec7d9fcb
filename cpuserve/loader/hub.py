"""Finds or downloads the files of a model by its path, built-in name, or Hugging Face id."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, TypeVar

from cpuserve.base.errors import ModelError
from cpuserve.base.log import get_logger
from cpuserve.config.env import cache_dir
from cpuserve.config.nearest import nearest
from cpuserve.loader.builtin import BUILTIN, BuiltinModel, ProgressFn, fetch_builtin
from cpuserve.loader.gguf.parts import mmproj_files, model_files, part_names
from cpuserve.loader.load import find_model, no_model
from cpuserve.loader.mapped import not_permitted
from cpuserve.loader.pooling import MODULE_FILE
from cpuserve.models import FAMILIES

log = get_logger("loader")
T = TypeVar("T")

_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}")
# A text that may precede a repository's id: a host as in Ollama, or an address from a browser.
_HOSTS = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")
_FILE = re.compile(r"(?=.{1,300}$)\w[\w.-]*(/\w[\w.-]*)*")
_REVISION = re.compile(r"[\w][\w./-]{0,199}")
# All files that cpuserve reads, besides those that only tokenizers of some families have
# (TokenizerTables.files); pickles and code are never downloaded.
_PATTERNS = (
    "*.safetensors",
    "*.json",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "tokenizer.model",
)
# The hub library tries twice, and its timeout does not include name resolution.
# Each query therefore also has a deadline.
PROBE_TIMEOUT_S = 2.0
PROBE_DEADLINE_S = 4.5
CONVERTED = "%s has only pickles, which cpuserve never reads; using its safetensors conversion, %s"


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    progress: ProgressFn | None = None,
    cache: Path | None = None,
    paths: bool = True,
    local: bool = True,
) -> Path:
    """Return the model directory or .gguf file for `name`; download the model if it is missing.

    name: a path, a built-in name, "owner/model" or "hf.co/owner/model" on the Hugging Face hub,
      or "owner/model:FILE.gguf" ("owner/model:Q4_0" selects the GGUF file of that type).
    cache: directory of built-in models.
    paths: whether error messages may advise to pass a path.
    local: whether the name may be a path.

    Raises:
        ModelError: there is no such model, or it cannot be downloaded.
    """
    _refuse_traps(name)
    if local and (path := _local(name)) is not None:
        return path
    if name in BUILTIN:
        return fetch_builtin(BUILTIN[name], cache or cache_dir(), progress)
    repo, file = _repo_and_file(name)
    if not _is_id(repo):
        raise _unknown(name, paths=paths and local)
    _check_revision(revision)
    return _from_hub(repo, file, revision, progress)


def resolve_config(name: str, revision: str | None = None) -> Path:
    """Return a path where `read_config` finds the configuration of `name` (see resolve_model).

    If the model is on the hub, only its config.json is downloaded.

    Raises:
        ModelError: there is no such model, or its config.json cannot be downloaded.
    """
    _refuse_traps(name)
    repo, file = _repo_and_file(name)
    if not _is_id(repo) or name in BUILTIN or _local(name) is not None:
        return resolve_model(name, revision=revision)
    _check_revision(revision)
    if file:
        msg = f"{name}: GGUF files have no config.json: give the id of the original model"
        raise ModelError(msg)
    from huggingface_hub import hf_hub_download

    try:
        names = _within_deadline(lambda: _file_names(repo, revision))
        if "config.json" not in names:
            msg = f"{repo} has no config.json: give the id of the original model"
            raise ModelError(msg)
        found = hf_hub_download(repo, "config.json", revision=revision)
    except ModelError:
        raise
    except Exception as error:
        if _kinds(error) & _NO_CONNECTION:
            return _cached_snapshot(repo, revision)
        raise _explained(repo, revision, error) from error
    return Path(found).parent


def find_stored(name: str) -> Path:
    """Return the path of a model that is on this machine, as resolve_model does.

    Raises:
        ModelError: there is no such model here.
    """
    _refuse_traps(name)
    if (path := _local(name)) is not None:
        return path
    if name in BUILTIN and (file_path := cache_dir() / BUILTIN[name].file_name).is_file():
        return file_path
    repo, file = _repo_and_file(name)
    if name in BUILTIN or not _is_id(repo):
        advice = f"cpuserve pull {name}" if name in BUILTIN else "cpuserve list"
        msg = f"{name[:200]!r} is no model on this machine: see `{advice}`"
        raise ModelError(msg)
    try:
        return _pick(_cached_snapshot(repo, None), repo, file)
    except ModelError:
        msg = f"{name} is not on this machine: `cpuserve pull {name}` downloads it"
        raise ModelError(msg) from None


def may_be_model(name: str) -> bool:
    """Whether `name` looks like a model: a path, a built-in name, or an id on the hub."""
    try:
        if _local(name) is not None:
            return True
    except ModelError:  # the path exists but is not a model
        return True
    return has_model_form(name)


def has_model_form(name: str) -> bool:
    """Whether `name` is a built-in name, or looks like an id on the hub."""
    return name in BUILTIN or _REPO.fullmatch(_repo_and_file(name)[0]) is not None


def list_builtin() -> list[BuiltinModel]:
    """The built-in models."""
    return list(BUILTIN.values())


def _refuse_traps(name: str) -> None:
    if not name or len(name) > 4096 or any(ord(c) < 32 or ord(c) == 127 for c in name):
        msg = f"{name[:100]!r} is not a model name or path"
        raise ModelError(msg)


def _is_id(repo: str) -> bool:
    """Whether `repo` can be "owner/model" on the hub, which also names a directory of the cache."""
    return _REPO.fullmatch(repo) is not None and ".." not in repo and "--" not in repo


def _check_revision(revision: str | None) -> None:
    """Raise ModelError unless `revision` can be one: it becomes a part of a path of the cache."""
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        msg = f"{revision[:100]!r} is not a valid revision; give a branch, a tag or a commit"
        raise ModelError(msg)


def _local(name: str) -> Path | None:
    """Return the path if `name` is an existing path; None if it can only be a model name."""
    why_not = "does not exist"
    try:
        path = Path(name).expanduser()
        path.lstat()
    except PermissionError:
        why_not = not_permitted()
    except (OSError, ValueError, RuntimeError):  # the name is too long, or ~user does not exist
        pass
    else:
        return _model_directory(path, name)
    looks_like_path = name.startswith(("/", "./", "../", "~")) or name in (".", "..")
    weights = name.endswith((".gguf", ".safetensors", ".bin", ".pt")) and ":" not in name
    if looks_like_path or weights:
        msg = f"model path {name} {why_not}"
        raise ModelError(msg)
    return None


def _repo_and_file(name: str) -> tuple[str, str]:
    """Split the name of a model on the hub into ("owner/model", the text after a colon)."""
    host = next((host for host in _HOSTS if name.startswith(host)), "")
    repo, _, file = name.removeprefix(host).partition(":")
    return repo, file


def _unknown(name: str, *, paths: bool) -> ModelError:
    builtin = ", ".join(BUILTIN)
    near = nearest(name, BUILTIN)
    path = ", a path" if paths else ""
    return ModelError(
        f"{name[:200]!r} is not a model{near or ':'} give a Hugging Face id (owner/model, for GGUF "
        f"files owner/model:Q4_K_M){path} or a built-in name ({builtin})"
        + ("" if near else "; Ollama's names are not known here")
    )


def _from_hub(repo: str, file: str, revision: str | None, progress: ProgressFn | None) -> Path:
    if file and not _FILE.fullmatch(file):
        msg = f"{file[:100]!r} is not a file or quantization of {repo}"
        raise ModelError(msg)
    # Importing huggingface_hub takes 0.3 s, and local models do not need it.
    from huggingface_hub import snapshot_download

    try:
        wanted = _files_to_fetch(repo, file, revision)
        if wanted is None:
            return _pick(_cached_snapshot(repo, revision), repo, file)
        if "config.json" in wanted.names:
            _check_architecture(repo, wanted.revision)
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
    """Return the copy of an earlier download.

    The copy is in models--OWNER--NAME: snapshots/COMMIT, where the file refs/REVISION has COMMIT.
    snapshot_download(local_files_only=True) refuses such a copy, because it lacks files
    that cpuserve never downloads (pickles). Opening the checkpoint reports missing weights.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    home = Path(HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"
    found = [folder for folder in [_snapshot(home, revision or "main")] if folder.is_dir()]
    if revision is None and not any(_has_weights(folder) for folder in found):
        # Look for a conversion that an earlier start has downloaded (find_conversion).
        for pull in sorted((home / "refs" / "refs" / "pr").glob("*")):
            folder = _snapshot(home, f"refs/pr/{pull.name}")
            if _has_weights(folder):
                log.warning(CONVERTED, repo, f"refs/pr/{pull.name}, from the local cache")
                return folder
    if not found:
        msg = (
            f"model {repo} cannot be downloaded: the hub cannot be reached, and there is neither "
            "a path of that name nor a copy in the local cache"
        )
        raise ModelError(msg)
    return found[0]


def _snapshot(home: Path, revision: str) -> Path:
    """Return the directory of a revision in the cache; it may not exist."""
    reference = home / "refs" / revision
    return home / "snapshots" / (reference.read_text().strip() if reference.is_file() else revision)


def _has_weights(folder: Path) -> bool:
    return any(folder.glob("*.safetensors")) or any(folder.rglob("*.gguf"))


@dataclass(frozen=True, slots=True)
class _Download:
    """The files to download, and the revision that they belong to (None: main)."""

    names: list[str]
    revision: str | None


def _check_architecture(repo: str, revision: str | None) -> None:
    """Raise ModelError, before weights are downloaded, for a model that cannot be served.

    Heads pass, because they are served with another model.
    """
    from huggingface_hub import snapshot_download

    from cpuserve.loader.load import read_json
    from cpuserve.models.generic import head_kind, runs_through_transformers

    folder = snapshot_download(
        repo,
        revision=revision,
        allow_patterns=["config.json"],
        tqdm_class=_bar_class(repo, None),
    )
    config = read_json(Path(folder) / "config.json", "config")
    if config.get("architectures") and head_kind(config) is None:
        runs_through_transformers(config)


def _files_to_fetch(repo: str, file: str, revision: str | None) -> _Download | None:
    """Return the files of a repository that cpuserve reads; None without a connection.

    The query has a deadline, because snapshot_download has none and could wait forever.
    """
    try:
        names = _within_deadline(lambda: _file_names(repo, revision))
    except Exception as error:
        if _kinds(error) & _NO_CONNECTION:
            return None
        raise
    if file:
        return _Download(_with_mmproj(gguf_of(repo, names, file), names), revision)
    if not has_safetensors(names) and (default := default_gguf(names)):
        log.info("%s has only GGUF files: using %s", repo, default)
        return _Download(_with_mmproj(default, names), revision)
    if revision is None and _only_pickles(names):
        revision, names = _converted(repo, names)
    if not has_safetensors(names):
        msg = f"{repo} has no safetensors weights"
        if any(n.endswith((".bin", ".pt")) for n in names):
            msg += " (only pickles, which are never read); use a revision that has safetensors"
        raise ModelError(msg)
    # Mistral repositories have the same weights a second time, in consolidated*.safetensors.
    patterns = (*_PATTERNS, *FAMILIES.tokenizer.files)
    kept = [n for n in names if any(fnmatch(n, p) for p in patterns)]
    others = [n for n in kept if not n.startswith("consolidated")]
    return _Download(others if has_safetensors(others) else kept, revision)


def _with_mmproj(model: str, names: list[str]) -> list[str]:
    """Return the files of the GGUF model `model`, and the mmproj file next to it or at the top."""
    own, top = model.rpartition("/")[0], ""
    for folder in (own, top):
        if found := mmproj_files(n for n in names if n.rpartition("/")[0] == folder):
            return [*parts_of(model), found[0]]
    return parts_of(model)


def _only_pickles(names: list[str]) -> bool:
    readable = has_safetensors(names) or any(n.endswith(".gguf") for n in names)
    return not readable and any(n.endswith((".bin", ".pt")) for n in names)


def _converted(repo: str, names: list[str]) -> tuple[str | None, list[str]]:
    """Return (revision, files) of a safetensors conversion on the hub, or (None, `names`)."""
    try:
        found = _within_deadline(
            lambda: find_conversion(repo, lambda revision: _file_names(repo, revision))
        )
    except Exception as error:
        # Pull requests may be disabled; the caller then reports that there are no safetensors.
        log.debug("no conversion of %s: %s", repo, error)
        return None, names
    if found is None:
        return None, names
    log.warning(CONVERTED, repo, found[0])
    return found


def _file_names(repo: str, revision: str | None) -> list[str]:
    """Return the files in the top folder, all GGUF files, and sentence-transformers modules."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision, timeout=PROBE_TIMEOUT_S)
    found = [s.rfilename for s in info.siblings or []]
    return [n for n in found if "/" not in n or n.endswith(".gguf") or MODULE_FILE.fullmatch(n)]


def _within_deadline(ask: Callable[[], T]) -> T:
    """Return the result of ask(), which runs in a thread; TimeoutError after PROBE_DEADLINE_S.

    After a timeout, the thread continues in the background, because it cannot be stopped.
    """
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


def _pick(folder: Path, repo: str, file: str) -> Path:
    ggufs = [path.relative_to(folder).as_posix() for path in folder.rglob("*.gguf")]
    if file:
        return folder / gguf_of(repo, ggufs, file)
    if ggufs and not any(folder.glob("*.safetensors")):
        return folder / (default_gguf(ggufs) or ggufs[0])
    return _model_directory(folder, repo)


def _model_directory(path: Path, name: str) -> Path:
    """Return find_model(path); ModelError if the path contains no model."""
    found = find_model(path)
    if found.is_dir() and not (found / "config.json").exists():
        raise no_model(found, name)
    return found


_NO_CONNECTION = frozenset(
    {"OfflineModeIsEnabled", "ConnectionError", "TransportError", "TimeoutError", "ProxyError"}
)


def _kinds(error: Exception) -> set[str]:
    """Return the class names of an error; they are the same in all versions of the hub library."""
    return {c.__name__ for c in type(error).__mro__}


def _explained(repo: str, revision: str | None, error: Exception) -> ModelError:
    """Return a ModelError of one line for an error of the hub library, by its classes."""
    kinds = _kinds(error)
    where = f"{repo} at revision {revision}" if revision else repo
    if "GatedRepoError" in kinds:
        why = "access is restricted: accept its terms on the hub, then log in (hf auth login)"
    elif "RepositoryNotFoundError" in kinds:
        why = "there is no such model on the hub (or it is private: hf auth login)"
    elif "RevisionNotFoundError" in kinds:
        why = "there is no such revision; check --revision"
    elif kinds & {*_NO_CONNECTION, "LocalEntryNotFoundError"}:
        why = "the hub cannot be reached, and neither a path nor the local cache has it"
    else:
        why = " ".join(str(error).split())[:300] or type(error).__name__
    return ModelError(f"model {where} cannot be downloaded: {why}")


def _bar_class(repo: str, progress: ProgressFn | None) -> Any:
    """Return a tqdm class that reports bytes to `progress` and draws nothing."""
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
    """A text file that discards all text that is written to it."""

    def write(self, _text: str) -> int:
        return 0

    def flush(self) -> None:
        return None


# The preferred types; llama.cpp and Ollama take the first one by default as well.
DEFAULT_TYPES = ("Q4_K_M", "Q4_0")
# The last part of a name: a type such as Q4_K_M, IQ3_XXS, UD-Q5_K_XL, PTQ1_0, BF16 or MXFP4_MOE.
_TYPE = re.compile(
    r"(?:.*?[-._/])??((?:UD-)?(?:P?T?I?Q[0-9]\w*|B?F(?:16|32)|(?:MX|NV)FP4\w*|FP?8\w*))",
    re.IGNORECASE,
)
_END = re.compile(r"(-[0-9]{5}-of-[0-9]{5})?\.gguf$")


def gguf_of(repo: str, names: Iterable[str], wanted: str) -> str:
    """Return the GGUF file of `repo` with the name or the type `wanted`; case does not matter.

    Of a model in several files, the first file is returned.
    Raises a ModelError that lists the candidates unless exactly one file fits.
    """
    files = files_of_models(names)
    named = [name for name in files if wanted in parts_of(name)]
    if named:
        return named[0]
    found = [name for name in files if _type_of(name).lower() == wanted.lower()]
    found = found or [name for name in files if _ends_with(name, wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        msg = f"{repo} has several GGUF files for {wanted!r}; name one: {', '.join(found)[:500]}"
        raise ModelError(msg)
    listed = ", ".join(dict.fromkeys(_type_of(name) or name for name in files)) or "none"
    msg = f"{repo} has no GGUF file called or of type {wanted!r}; it has {listed[:500]}"
    raise ModelError(msg)


def default_gguf(names: Iterable[str]) -> str | None:
    """Return a GGUF file with a type in DEFAULT_TYPES, or else the first one; None if none."""
    files = files_of_models(names)
    for kind in DEFAULT_TYPES:
        found = [name for name in files if _type_of(name).upper() == kind]
        if found:
            return found[0]
    return files[0] if files else None


def parts_of(name: str) -> list[str]:
    """Return all files of the GGUF model that has `name` as its first file."""
    folder, slash, last = name.rpartition("/")
    return [f"{folder}{slash}{part}" for part in part_names(last)]


def files_of_models(names: Iterable[str]) -> list[str]:
    """Return the first (or only) file of each GGUF model in a repository, sorted."""
    by_folder: dict[str, list[str]] = {}
    for name in names:
        folder, slash, last = name.rpartition("/")
        by_folder.setdefault(folder + slash, []).append(last)
    return sorted(f + last for f, files in by_folder.items() for last in model_files(files))


def _type_of(name: str) -> str:
    """Return the type in the name of a file, or else in the name of its folder; "" without one."""
    folder, _, last = _END.sub("", name).rpartition("/")
    match = _TYPE.fullmatch(last) or _TYPE.fullmatch(folder)
    return match[1] if match else ""


def _ends_with(name: str, wanted: str) -> bool:
    stem = _END.sub("", name).lower()
    return f"/{stem}".endswith(tuple(f"{mark}{wanted.lower()}" for mark in "-./"))


# Anyone may open a pull request with arbitrary weights.
# Only the conversions by this account of the hub have the same weights as the repository.
BOT = "SFconvertbot"
CONVERSIONS_TRIED = 5


def has_safetensors(names: list[str]) -> bool:
    """Whether a repository with these files has safetensors of the model itself.

    Only files outside of folders count: folders contain modules of sentence-transformers.
    """
    return any(n.endswith(".safetensors") and "/" not in n for n in names)


def find_conversion(
    repo: str, names_at: Callable[[str], list[str]]
) -> tuple[str, list[str]] | None:
    """Return (revision "refs/pr/N", its files) of an open conversion pull request, or None.

    names_at: a function that returns the files of a revision.
    Exceptions of this function and of the hub library are passed on.
    """
    from huggingface_hub import HfApi

    requests = HfApi().get_repo_discussions(
        repo, author=BOT, discussion_type="pull_request", discussion_status="open"
    )
    for request in islice(requests, CONVERSIONS_TRIED):
        # The query already filters by author, type and status. They are checked again for safety,
        # because anyone could have written the weights of another pull request.
        if request.author != BOT or not request.is_pull_request or request.status != "open":
            continue
        revision = f"refs/pr/{request.num}"
        names = names_at(revision)
        if has_safetensors(names):
            return revision, names
    return None
