"""Reader of safetensors checkpoints (one file or shards): checks headers and maps the data.

The layout is: u64 header size, JSON header {name: {dtype, shape, data_offsets}}, then the data.
In addition to the checks of the reference library,
this reader refuses duplicate keys, and links that lead out of a downloaded model.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from cpuserve.base.errors import ModelError
from cpuserve.loader.mapped import AnyFile, MappedFile, most_values, read_small, regular_file
from cpuserve.loader.names import is_ignored, program_name
from cpuserve.models.stored_names import AS_PROGRAM, StoredNames
from cpuserve.quant.stored import StoredTensor

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

INDEX = "model.safetensors.index.json"
# The files of the extra heads of BGE-M3 (loader/token_heads.py);
# the model itself does not use them.
TOKEN_HEADS = frozenset({"sparse_linear.safetensors", "colbert_linear.safetensors"})
MAX_HEADER_BYTES = 100_000_000
MAX_INDEX_BYTES = 100_000_000
# A tensor takes 25 us at each start. The largest known checkpoint has 210,000 in its files, and
# the largest file 20,000.
MAX_FILE_TENSORS = 1 << 17
MAX_TENSORS = 1 << 19
MAX_DIMS = 8
MAX_VALUES = 1 << 21  # of a header or an index: a tensor has some 10
_OFFSETS = b'"data_offsets"'  # each tensor has this key, without escapes
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "U16": 2, "U32": 4, "U64": 8, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
}  # fmt: skip
# Tables of experts by token id (DeepSeek V4). They are used as floats, which have small integers.
ID_TABLES = (".gate.tid2eid",)
_INTEGERS = {"I64": "<i8", "I32": "<i4"}
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<total>\d{5})\.safetensors")


@dataclass(frozen=True, slots=True)
class SafeTensor:
    """An entry of the header; its offset is counted from the start of the file."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    size: int


class SafetensorsFile:
    """An open .safetensors file with a completely checked header."""

    def __init__(self, path: Path, copy: AnyFile | None = None) -> None:
        """Open and check `path`, or `copy` if passed; ModelError reports the invalid entry."""
        self.path = path
        self.file = copy or MappedFile(path, "safetensors file")
        if self.file.size < 8:
            self._fail(f"it has {self.file.size} bytes, too few for a header (truncated?)")
        (size,) = struct.unpack_from("<Q", self.file.map)
        if size > MAX_HEADER_BYTES:
            self._fail(f"header size {size} is more than {MAX_HEADER_BYTES}")
        if size > self.file.size - 8:
            self._fail(f"header size {size} is beyond the end of the file (truncated?)")
        self._start = 8 + size
        self.tensors = self._read(bytes(self.file.map[8 : self._start]))

    def _fail(self, why: str) -> NoReturn:
        msg = f"broken safetensors {self.path}: {why}"
        raise ModelError(msg)

    def _read(self, header: bytes) -> dict[str, SafeTensor]:
        if not header.startswith(b"{"):
            self._fail("the header is not a JSON object")
        if (count := header.count(_OFFSETS)) > MAX_FILE_TENSORS:
            self._fail(f"its header has {count} tensors; at most {MAX_FILE_TENSORS} are accepted")
        if (count := most_values(header)) > MAX_VALUES:
            self._fail(f"its header has {count} values; at most {MAX_VALUES} are accepted")
        try:
            entries = json.loads(header, object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            self._fail(f"header: {str(error)[:300]}")
        if len(entries) > MAX_FILE_TENSORS + 1:
            self._fail(f"its header has {len(entries)} entries, more than {MAX_FILE_TENSORS}")
        metadata = entries.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            self._fail("__metadata__ is not a map of strings")
        self.metadata: dict[str, str] = metadata
        tensors = {name: self._entry(name, entry) for name, entry in entries.items()}
        self._check_layout(tensors)
        return tensors

    def _entry(self, name: str, entry: Any) -> SafeTensor:
        where = f"tensor {name[:200]!r}"
        # Error messages show this name, so it must not contain line breaks or terminal commands.
        if not name.isprintable():
            self._fail(f"{where} has an unprintable name")
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            self._fail(f"{where} must have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            self._fail(f"{where} has unknown dtype {str(dtype)[:40]!r}")
        if isinstance(shape, list) and len(shape) > MAX_DIMS:
            self._fail(f"{where} has {len(shape)} dimensions; at most {MAX_DIMS} are accepted")
        if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
            self._fail(f"{where}: shape and data_offsets must be lists of sizes")
        begin, end = offsets
        if math.prod(shape) * ITEM_BYTES[dtype] != end - begin:
            self._fail(f"{where}: shape {shape} of {dtype} is not {end - begin} bytes")
        return SafeTensor(name, tuple(shape), dtype, self._start + begin, end - begin)

    def _check_layout(self, tensors: dict[str, SafeTensor]) -> None:
        """Check that the tensors fill the file after the header, without gaps or overlap."""
        at = self._start
        for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.size)):
            if tensor.offset != at:
                overlap = tensor.offset < at
                what = "overlaps the previous tensor" if overlap else "has a hole before it"
                self._fail(f"tensor {tensor.name[:200]!r} {what} (byte {at})")
            at += tensor.size
        if at != self.file.size:
            why = f"the tensors end at byte {at}, but the file at byte {self.file.size}"
            self._fail(why + (" (truncated?)" if self.file.size < at else ""))


class SafetensorsStore:
    """TensorStore of a checkpoint directory: one file, or shards with an index.

    only: the name of a single file to read instead of the model's files.
    tower: the beginnings of the tensor names of the served tower.
    names: how files call the tensors of the model's family.
    """

    def __init__(
        self,
        directory: Path,
        only: str = "",
        tower: tuple[str, ...] = (),
        names: StoredNames = AS_PROGRAM,
    ) -> None:
        self._tower = tower
        self._names = names
        self._tensors: dict[str, tuple[SafetensorsFile, SafeTensor]] = {}
        if only:
            check_file(directory, directory / only)
        index = {} if only else _index_of(directory)
        paths = [directory / only] if only else _files_of(directory, index)
        self.files = [SafetensorsFile(path) for path in paths]
        for file in self.files:
            self._add(file, index)
        if index:
            present = {t.name: f.path.name for f, t in self._tensors.values()}
            _check_index(directory, self._without_ignored(index), present)

    def _without_ignored(self, index: dict[str, str]) -> dict[str, str]:
        ignored = {name for name in index if self._leaves(self.named(name))}
        return {name: file for name, file in index.items() if name not in ignored}

    def _add(self, file: SafetensorsFile, index: dict[str, str]) -> None:
        """Add the tensors of a file, without those that the index assigns to another file.

        Some shards repeat a tensor of another shard (a tied embedding, for example).
        """
        for tensor in file.tensors.values():
            name = self.named(tensor.name)
            place = index.get(tensor.name, file.path.name)
            if self._leaves(name) or place != file.path.name:
                continue
            if name in self._tensors:
                other = self._tensors[name][0].path.name
                msg = f"tensor {name} is in both {other} and {file.path.name} of {file.path.parent}"
                raise ModelError(msg)
            self._tensors[name] = (file, tensor)

    def _leaves(self, name: str) -> bool:
        """Whether no Program reads a tensor that it would call `name`."""
        return is_ignored(name, self._tower, self._names)

    def named(self, stored: str) -> str:
        """Return the name that Programs use for a tensor of the files."""
        return program_name(stored, self._names)

    @property
    def offset_norms(self) -> bool:
        """Whether files of MLX have norms with 1 added to their weights (StoredNames)."""
        return self._names.offset_norms

    def names(self) -> set[str]:
        """Return the names of all tensors, except tensors that no Program reads."""
        return set(self._tensors)

    def metadata(self) -> dict[str, str]:
        """Return the texts in the headers of all files; keys are renamed as tensors are."""
        texts = (text for file in self.files for text in file.metadata.items())
        return {self.named(key): value for key, value in texts}

    def dtype(self, name: str) -> str:
        """Return the name of the dtype in safetensors, and F32 for tables of ids."""
        return dtype_read(name, self._tensors[name][1].dtype)

    def get(self, name: str) -> StoredTensor:
        """Return the tensor as a mapped view.

        Raises:
            ModelError: its file has changed since it was opened, or the tensor has no numbers.
        """
        file, tensor = self._tensors[name]
        file.file.check_unchanged()
        if not tensor.size:
            msg = f"{file.path}: tensor {name} has shape {list(tensor.shape)}, so no numbers"
            raise ModelError(msg)
        data = file.file.view(tensor.offset, tensor.size)

        def release() -> None:
            file.file.release(tensor.offset, tensor.size)

        dtype = self.dtype(name)
        if dtype != tensor.dtype:
            data = ids_as_floats(data, tensor.dtype)
        check = file.file.check_content
        return StoredTensor(name, tensor.shape, dtype, data, None, release, check)


def dtype_read(name: str, dtype: str) -> str:
    """Return the dtype that a tensor is read as: F32 if it is a table of ids with integers."""
    return "F32" if name.endswith(ID_TABLES) and dtype in _INTEGERS else dtype


def ids_as_floats(data: npt.NDArray[np.uint8], dtype: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of a table of ids, whose integers of `dtype` become F32."""
    return data.view(_INTEGERS[dtype]).astype("<f4").view("u1")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            msg = f"key {key[:200]!r} occurs twice"
            raise ValueError(msg)
        found[key] = value
    return found


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def _index_of(directory: Path) -> dict[str, str]:
    """Return {tensor name: file name} of the index; {} if there is no index."""
    path = directory / INDEX
    return _weight_map(directory) if path.exists() or path.is_symlink() else {}


def _files_of(directory: Path, index: dict[str, str]) -> list[Path]:
    """Return the weight files; each is a regular file or a permitted link to one."""
    names = sorted(set(index.values())) if index else _unindexed(directory)
    missing = [n for n in names if not (directory / n).exists()]
    if missing:
        msg = (
            f"{directory}: missing weight file{_s(missing)} {', '.join(missing)}; download the "
            "model again"
        )
        raise ModelError(msg)
    for name in names:
        check_file(directory, directory / name)
    _check_extra(directory, names)
    return [directory / n for n in names]


def _weight_map(directory: Path) -> dict[str, str]:
    """Return {tensor name: file name} of the index; ModelError for a file outside the directory."""
    path = directory / INDEX
    check_file(directory, path)
    data = read_small(path, "index", MAX_INDEX_BYTES)
    if (count := most_values(data)) > MAX_VALUES:
        msg = f"{path} has {count} values; at most {MAX_VALUES} are accepted"
        raise ModelError(msg)
    try:
        index = json.loads(data, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        msg = f"{path} is not valid JSON: {error}"
        raise ModelError(msg) from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not names:
        msg = f"{path} has no weight_map, which names the weight files; download the model again"
        raise ModelError(msg)
    if len(names) > MAX_TENSORS:
        msg = f"{path} has {len(names)} tensors; at most {MAX_TENSORS} are accepted"
        raise ModelError(msg)
    for name in names.values():
        plain = isinstance(name, str) and re.fullmatch(r"[\w.-]+\.safetensors", name)
        if not plain or name.startswith("."):
            msg = (
                f"{path} names the file {str(name)[:100]!r}; only .safetensors files in the same "
                "directory are allowed"
            )
            raise ModelError(msg)
    return names


def _unindexed(directory: Path) -> list[str]:
    found = sorted({p.name for p in directory.glob("*.safetensors")} - TOKEN_HEADS)
    if "model.safetensors" in found:
        return ["model.safetensors"]
    if len(found) == 1 and not _SHARD.fullmatch(found[0]):
        return found
    shards = [m for m in map(_SHARD.fullmatch, found) if m]
    if not shards:
        raise _no_weights(directory, found)
    stem, total = shards[0]["stem"], int(shards[0]["total"])
    if total > 10_000 or len(shards) > total or any(m["stem"] != stem for m in shards):
        msg = (
            f"{directory} holds shards of several checkpoints and no {INDEX}; remove the shards of "
            "other models, or download the model again"
        )
        raise ModelError(msg)
    return [f"{stem}-{i:05d}-of-{total:05d}.safetensors" for i in range(1, total + 1)]


def _no_weights(directory: Path, found: list[str]) -> ModelError:
    if found:
        return ModelError(
            f"{directory} holds several .safetensors files and no {INDEX}; remove the files of "
            "other models, or download the model again"
        )
    pickles = sorted(p.name for s in ("*.bin", "*.pt", "*.pth") for p in directory.glob(s))
    if pickles:
        return ModelError(
            f"{directory} holds only pickled weights ({', '.join(pickles[:3])}), which can run any "
            "code when loaded and are never read; convert the checkpoint to safetensors"
        )
    return ModelError(f"{directory} holds no .safetensors weights")


def check_file(directory: Path, path: Path) -> None:
    """Raise ModelError unless `path` is a regular file or a permitted link to one.

    In a directory that the user has passed, links may lead anywhere, because shared stores,
    DVC and Nix use such links. In a download, links may only lead to files of the same download:
    in the cache of the hub, models--OWNER--NAME/snapshots/COMMIT/FILE is a link to blobs/HASH.
    """
    regular_file(path, "model file")
    folder = directory.resolve()
    download = folder.parent.parent
    if folder.parent.name != "snapshots" or not download.name.startswith("models--"):
        return
    real = path.resolve()
    if not any(real.is_relative_to(root) for root in (folder, download / "blobs")):
        msg = (
            f"{path} is a link out of the downloaded model (to {real}), which a download never "
            f"creates; remove {download} and download the model again"
        )
        raise ModelError(msg)


def _check_extra(directory: Path, names: list[str]) -> None:
    """Raise ModelError if there are more shards, which remain from another checkpoint."""
    known = {(m["stem"], m["total"]) for m in map(_SHARD.fullmatch, names) if m}
    stems = {stem for stem, _ in known}
    found = [m for m in map(_SHARD.fullmatch, (p.name for p in directory.iterdir())) if m]
    extra = sorted(m.string for m in found if m["stem"] in stems and m.string not in names)
    if extra:
        msg = (
            f"{directory}: weight file{_s(extra)} {', '.join(extra[:5])} not part of the "
            "checkpoint; remove extra files or download the model again"
        )
        raise ModelError(msg)


def _check_index(directory: Path, expected: dict[str, str], present: dict[str, str]) -> None:
    """Raise ModelError unless every tensor is in the file that the index lists for it."""
    wrong = sorted(n for n in expected.keys() | present.keys() if expected.get(n) != present.get(n))
    if wrong:
        listed = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5} more" if len(wrong) > 5 else "")
        msg = (
            f"{directory}: {INDEX} and the weight files disagree about {listed}; download the "
            "model again"
        )
        raise ModelError(msg)


def _s(items: list[str]) -> str:
    return "s" if len(items) > 1 else ""
