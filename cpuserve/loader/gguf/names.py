"""Chooses a GGUF file of a repository by the type in its name (model-Q4_K_M.gguf)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from cpuserve.errors import ModelError
from cpuserve.loader.gguf.parts import model_files, part_names

# The preferred types; llama.cpp and Ollama take the first one by default as well.
DEFAULT_TYPES = ("Q4_K_M", "Q4_0")
# The last part of a name: a type such as Q4_K_M, IQ3_XXS, UD-Q5_K_XL, BF16 or MXFP4_MOE.
_TYPE = re.compile(
    r"(?:.*?[-._/])??((?:UD-)?(?:T?I?Q[0-9]\w*|B?F(?:16|32)|(?:MX|NV)FP4\w*|FP?8\w*))",
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
