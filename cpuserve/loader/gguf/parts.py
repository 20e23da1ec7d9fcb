"""Models in several GGUF files: NAME-00001-of-0000N.gguf, as llama-gguf-split writes them.

The first file has all metadata of the model. Each file has `split.no` (counted from 0),
`split.count` and `split.tensors.count`, the number of tensors in all files together.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

from cpuserve.errors import ModelError
from cpuserve.loader.gguf.file import GgufFile
from cpuserve.loader.mapped import regular_file

_PART = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")
# More files than any model has, but few enough to open all of them together.
MAX_PARTS = 999
# GGUF files with these words in their name are not models to serve: they are vision encoders,
# statistics of activations, or draft models for speculative decoding.
_OTHERS = ("mmproj", "imatrix", "mtp-", "eagle3-")


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


def open_gguf(path: Path) -> GgufFile:
    """Open a GGUF file and all other files of its model; ModelError reports the broken file."""
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
