"""Models in several GGUF files: NAME-00001-of-0000N.gguf, as llama-gguf-split writes them.

The first file has all metadata of the model. Each file has `split.no` (counted from 0),
`split.count` and `split.tensors.count`, the number of tensors in all files together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.file import GgufFile
from cpuserve.loader.gguf.joined import split_qkv
from cpuserve.loader.mapped import regular_file

_PART = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
# More files than any model has, but few enough to open all of them together.
MAX_PARTS = 999
# GGUF files with these words in their name are not models to serve: they are vision encoders,
# statistics of activations, or draft models for speculative decoding.
MMPROJ = "mmproj"
_OTHERS = (MMPROJ, "imatrix", "mtp-", "eagle3-")

# The types that are preferred if there are several files, and how a name shows them.
_TYPES = (r"(?<!b)f16", r"bf16", r"q8_0", r"f32")


def part_names(name: str) -> list[str]:
    """Return all files of the model that the file `name` belongs to, in order."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= MAX_PARTS:
        return [name]
    return [f"{match['stem']}-{n:05}-of-{count:05}.gguf" for n in range(1, count + 1)]


def first_part(path: Path) -> Path:
    """Return the file with the model's metadata: `path`, or the first file of several."""
    first = path.with_name(part_names(path.name)[0])
    # If the first file is missing, `path` itself is opened, and open_gguf reports the error.
    return first if first.exists() else path


def model_files(names: Iterable[str]) -> list[str]:
    """Return the GGUF files of models, sorted; of a model in several files only the first one."""
    return sorted(
        {
            part_names(name)[0]
            for name in names
            if name.endswith(".gguf") and not any(word in name.lower() for word in _OTHERS)
        }
    )


def mmproj_files(names: Iterable[str]) -> list[str]:
    """Return the mmproj files of a list, the preferred type (f16) first."""
    found = [n for n in names if n.endswith(".gguf") and MMPROJ in n.rpartition("/")[2].lower()]

    def place(name: str) -> tuple[int, str]:
        kinds = [i for i, kind in enumerate(_TYPES) if re.search(kind, name.lower())]
        return kinds[0] if kinds else len(_TYPES), name

    return sorted(found, key=place)


def find_mmproj(model: Path) -> Path | None:
    """Return the mmproj file next to a GGUF file, or in its repository; None if there is none.

    In a folder with several models, the file needs the name of this model, apart from types.
    """
    folders = [model.parent]
    if model.parent.parent.parent.name == "snapshots":  # a folder of a repository of the hub
        folders.append(model.parent.parent)
    for folder in folders:
        names = [file.name for file in folder.glob("*.gguf")]
        found = mmproj_files(names)
        models = {_stem(name) for name in model_files(names)}
        if len(models) > 1 or len({_stem(name) for name in found}) > 1:
            found = [name for name in found if _stem(name) == _stem(model.name)]
        if found:
            return folder / found[0]
    return None


def _stem(name: str) -> str:
    """Return the name of a GGUF file without the type of its weights and the word mmproj."""
    kinds = "|".join((*_TYPES, r"(?:ud-)?i?q\d\w*", r"-\d{5}-of-\d{5}", MMPROJ, r"\.gguf"))
    return re.sub(kinds, "", name.lower()).strip("-_.")


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file and all other files of its model; ModelError reports the broken file."""
    file = _open_files(path)
    split_qkv(file)
    return file


def _open_files(path: Path) -> GgufFile:
    path = first_part(path)
    file = GgufFile(path)
    count = _number(file, "split.count", 1)
    names = part_names(path.name)
    if count == 1:
        return file
    if not 1 <= count <= MAX_PARTS:
        _fail(path, f"split.count is {count}, not between 1 and {MAX_PARTS}")
    if len(names) == count:
        path = path.with_name(names[0])
        regular_file(path, f"part 1 of the GGUF model {file.path}")
    else:
        _fail(
            path,
            f"split.count is {count}, so it must be called NAME-00001-of-{count:05}.gguf, as "
            "llama-gguf-split names parts",
        )
    parts = [file]
    for index, name in enumerate(names):
        if index:
            parts.append(_open_part(path.with_name(name), index, file))
        _check_part(parts[-1], index, count)
    for part in parts[1:]:
        file.add_tensors(part)
    total = _number(file, "split.tensors.count", len(file.tensors))
    if total != len(file.tensors):
        _fail(path, f"split.tensors.count is {total}, but its parts have {len(file.tensors)}")
    return file


def _open_part(path: Path, index: int, first: GgufFile) -> GgufFile:
    regular_file(path, f"part {index + 1} of the GGUF model {first.path}")
    part = GgufFile(path)
    key = "general.architecture"
    if key in part and part.value(key) != first.value(key):
        _fail(path, f"{key} is {part.value(key)!r:.60}, but {first.value(key)!r:.60} in part 1")
    return part


def _check_part(part: GgufFile, index: int, count: int) -> None:
    for key, wanted in (("split.no", index), ("split.count", count)):
        found = part.value(key)
        if _number(part, key) != wanted:
            is_what = "is missing" if found is None else f"is {found}"
            _fail(part.path, f"{key} {is_what}; its name and part 1 say {wanted}")


def _number(file: GgufFile, key: str, absent: int = -1) -> int:
    value = file.value(key)
    if value is None:
        return absent
    if isinstance(value, bool) or not isinstance(value, int):
        _fail(file.path, f"{key} is {value!r:.60}, not an integer")
    return value


def _fail(path: Path, why: str) -> NoReturn:
    msg = f"GGUF {path}: {why}"
    raise ModelError(msg)
