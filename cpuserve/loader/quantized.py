"""Writes a quantized copy of a checkpoint (`cpuserve quantize`).

The copy is written to a temporary directory next to the final one,
opened again as a check, and renamed. The final directory is therefore complete or does not exist.
Threads quantize blocks of rows from the mapped source,
and write each block to its offset in the file. Only these blocks are in memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.base.errors import ConfigError, ModelError
from cpuserve.config.values import format_bytes
from cpuserve.loader.heads import OWN_HEAD, with_own_head
from cpuserve.loader.load import (
    check_weights,
    open_checkpoint,
    quant_method,
    read_json,
    with_built,
    with_divided,
)
from cpuserve.loader.pooling import MODULE_FILE
from cpuserve.loader.safetensors import INDEX, ITEM_BYTES, TOKEN_HEADS, SafetensorsStore, check_file
from cpuserve.models import FAMILIES, stored_names
from cpuserve.program.parts import parse, stored_needs
from cpuserve.quant.base import QuantTensor
from cpuserve.quant.compress import (
    ROWS_OF_WORD,
    Form,
    StoredMatrixTensor,
    compress,
    form_of,
    is_quantized,
    parts,
    quantization_config,
)
from cpuserve.quant.dense import dense_weights, dequantize
from cpuserve.quant.parts import PartWeights, transposed

if TYPE_CHECKING:
    import numpy.typing as npt

    from cpuserve.loader.safetensors import SafeTensor, SafetensorsFile
    from cpuserve.program.program import Program

    ProgressFn = Callable[[str, int, int], None]

SHARD_BYTES = 4_000_000_000
# A thread quantizes this many weights at a time: in fp32 and with their codes they fit in L2.
BLOCK_WEIGHTS = 1 << 17
COPY_BYTES = 1 << 22  # tensors that are copied unchanged are copied in pieces of so many bytes
# The files that are copied unchanged: they describe the model, but have no weights and no code.
_COPIED = re.compile(
    r"[^.].*\.(json|jinja|model|tiktoken)|(merges|vocab)\.txt|(LICENSE|NOTICE).*", re.IGNORECASE
)
_NOT_COPIED = re.compile(r"config\.json|.*\.index\.json")


@dataclass(frozen=True, slots=True)
class Written:
    """The result: the bytes of weights before and after, and how the matrices are stored."""

    source_bytes: int
    bytes: int
    forms: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor that is copied unchanged."""

    file: SafetensorsFile
    tensor: SafeTensor

    def parts(self) -> list[tuple[str, StoredMatrixTensor]]:
        """Return a list with (name, description) of the tensor, which the copy has unchanged."""
        return [(self.tensor.name, StoredMatrixTensor("", self.tensor.dtype, self.tensor.shape, 1))]

    @property
    def source_bytes(self) -> int:
        return self.tensor.size

    @property
    def looks_linear(self) -> bool:
        """Whether a reader could take this tensor for the weight of a quantized linear."""
        return self.tensor.name.endswith(".weight") and len(self.tensor.shape) >= 2


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A matrix to quantize. file: its source file; module: its name without ".weight"."""

    file: SafetensorsFile
    module: str
    stored: QuantTensor
    form: Form

    def parts(self) -> list[tuple[str, StoredMatrixTensor]]:
        """Return (name, description) of each tensor that stores the matrix in the copy."""
        n, k = self.stored.shape
        return [(f"{self.module}.{part.suffix}", part) for part in parts(self.form, n, k)]

    @property
    def source_bytes(self) -> int:
        return self.stored.nbytes


_Item = _Kept | _Matrix


def _bytes(item: _Item) -> int:
    """Return the bytes of the item's tensors in the copy."""
    return sum(_size(part) for _, part in item.parts())


def quantize_checkpoint(
    source: Path,
    out: Path,
    program: Program,
    scheme: str,
    threads: int,
    progress: ProgressFn,
    shard_bytes: int = SHARD_BYTES,
) -> Written:
    """Write the checkpoint in directory `source` to `out`, with its matrices quantized.

    program: the Program of the model.
    scheme: a value of EngineConfig.quantize except "none".
    progress: called with ("quantize", bytes of the source so far, all bytes of the source).
    shard_bytes: the most bytes of weights in a file, unless a single tensor has more.

    Raises:
        ConfigError: `out` is not empty, or cannot be written.
        ModelError: the source is broken or quantized, or its experts have a layout that files of
            compressed-tensors do not have.
    """
    out = out.expanduser().resolve()
    _check_place(out)
    config = read_json(source / "config.json", "config")
    if (method := quant_method(config)) != "dense":
        msg = (
            f"{source} is quantized already (quant_method {method}); give the unquantized "
            "checkpoint, or serve this one as it is"
        )
        raise ModelError(msg)
    store = SafetensorsStore(source, names=stored_names(config))
    config = with_own_head(config, PartWeights(dense_weights(store, config)))
    config.pop(OWN_HEAD, None)
    items = _items(source, config, program, scheme)
    forms = {item.module: item.form for item in items if isinstance(item, _Matrix)}
    written = Written(
        sum(item.source_bytes for item in items),
        sum(map(_bytes, items)),
        tuple(sorted(set(forms.values()))),
    )
    _check_space(out.parent, written.bytes)
    with _replacing(out) as folder:
        _copy_others(source, folder)
        _write_weights(items, folder, _Work(threads, written.source_bytes, progress), shard_bytes)
        config["quantization_config"] = quantization_config(
            forms,
            [
                item.tensor.name.removesuffix(".weight")
                for item in items
                if isinstance(item, _Kept) and item.looks_linear
            ],
        )
        if _transposed(program):
            config["conv1d_transposed"] = True  # GPT-2: the copy has every matrix as [out, in]
        _write_json(folder / "config.json", config)
        check_weights(_program_of(config), open_checkpoint(folder).weights)
    return written


def _program_of(config: dict[str, Any]) -> Program:
    from cpuserve.models import build_program, spec_from_config

    return build_program(spec_from_config(config))


def _check_place(out: Path) -> None:
    try:
        found = out.is_dir() and next(out.iterdir(), None)
    except OSError as error:
        msg = f"{out} cannot be read: {error.strerror}"
        raise ConfigError(msg) from error
    if out.exists() and not out.is_dir():
        msg = f"{out} exists and is no directory; give a new or an empty directory"
        raise ConfigError(msg)
    if found:
        msg = f"{out} is not empty (it holds {found.name}); give a new or an empty directory"
        raise ConfigError(msg)
    if not out.parent.is_dir():
        msg = f"{out.parent} is no directory, so {out.name} cannot be written there; create it"
        raise ConfigError(msg)


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        msg = (
            f"{folder} has {format_bytes(free)} free, but {format_bytes(needed)} would be written; "
            "give a directory on another disk"
        )
        raise ConfigError(msg)


@contextmanager
def _replacing(out: Path) -> Iterator[Path]:
    """Yield a new directory; it becomes `out`, or is removed if an error occurs."""
    folder = out.parent / f".{out.name}.{os.getpid()}"
    try:
        folder.mkdir()
        yield folder
        _sync(folder)
        folder.rename(out)
        _sync(out.parent)
    except OSError as error:
        reason = error.strerror or error
        msg = f"{out} cannot be written: {reason}"
        raise ConfigError(msg) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _items(source: Path, config: dict[str, Any], program: Program, scheme: str) -> list[_Item]:
    """Return a checkpoint's tensors in the order of its files; ModelError if one is missing."""
    store = SafetensorsStore(source, names=stored_names(config))
    weights = PartWeights(dense_weights(store, config))
    whole = with_divided(weights, config)
    check_weights(program, with_built(whole, config))
    needs = [need for need in stored_needs(program.weights) if need.role == "matrix"]
    known = weights.names()  # without the matrices that are built from flat ones
    flat = [n.name for n in needs if ".experts." in n.name and n.name not in known]
    stacks = [n.name for n in needs if len(n.shape) != 2 and n.use != "exact"]
    if stacks := sorted(flat + stacks):
        msg = (
            f"{source} stores the matrices of all experts as one tensor ({stacks[0]}), which "
            "compressed-tensors has no form for; serve it with --quantization instead"
        )
        raise ModelError(msg)
    if divided := sorted({need.name for need in needs} & (whole.names() - known)):
        msg = (
            f"{source} divides its matrices in another way than published files ({divided[0]}); "
            "serve it with --quantization, or save it with transformers' save_original_format"
        )
        raise ModelError(msg)
    across = _transposed(program)
    if across and scheme == "w8a8":
        msg = (
            f"{source} stores matrices transposed ({min(across)}), and a reader of W8A8, which has "
            "no shape of its own, would transpose them again; use --scheme int8 or int4"
        )
        raise ModelError(msg)
    matrices = {need.name: need for need in needs if is_quantized(need)}
    items: list[_Item] = []
    for file in store.files:
        for tensor in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
            name = store.named(tensor.name)
            named = [each for each in weights.parts_of(name) if each in matrices]
            if not named:
                items.append(_Kept(file, tensor))
            same = len(_common_end(tensor.name, name))
            for each in named:
                # Replace the prefix that Programs use by the prefix in the file,
                # which readers expect.
                module = tensor.name[:-same] + each[len(name) - same :].removesuffix(".weight")
                stored = weights.get(each)
                stored = transposed(stored) if each in across else stored
                form = form_of(matrices[each], stored.shape[1], scheme)
                items.append(_Matrix(file, module, stored, form))
    return items


def _transposed(program: Program) -> set[str]:
    """Return the matrices that the checkpoint of the program stores as [in, out]."""
    parts = [part for need in program.weights if (part := parse(need.name))]
    return {part.tensor for part in parts if part.columns}


def _common_end(one: str, other: str) -> str:
    return os.path.commonprefix([one[::-1], other[::-1]])[::-1]


def _copy_others(source: Path, folder: Path) -> None:
    """Copy the tokenizer, templates, generation settings, licenses, sentence-transformers files."""
    found = [
        path
        for path in source.iterdir()
        if (_COPIED.fullmatch(path.name) and not _NOT_COPIED.fullmatch(path.name))
        or path.name in TOKEN_HEADS
        or any(fnmatch(path.name, name) for name in FAMILIES.tokenizer.files)
    ]
    inner = source.glob("*/*")
    found += [path for path in inner if MODULE_FILE.fullmatch(path.relative_to(source).as_posix())]
    for path in found:
        check_file(source, path)
        to = folder / path.relative_to(source)
        to.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, to)


class _Work:
    """The number of threads, and how many bytes of the source they have processed."""

    def __init__(self, threads: int, total: int, progress: ProgressFn) -> None:
        self.threads, self.total, self._progress = threads, total, progress
        self._done = 0

    def did(self, size: int) -> None:
        """Report that `size` more bytes of the source are done."""
        self._done += size
        self._progress("quantize", self._done, self.total)


def _write_weights(items: list[_Item], folder: Path, work: _Work, shard_bytes: int) -> None:
    shards = list(_shards(items, shard_bytes))
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        name = "model.safetensors" if len(shards) == 1 else name
        _write_shard(folder / name, shard, work)
        where |= {part: name for item in shard for part, _ in item.parts()}
    if len(shards) > 1:
        total = sum(map(_bytes, items))
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _shards(items: list[_Item], most: int) -> Iterator[list[_Item]]:
    shard: list[_Item] = []
    used = 0
    for item in items:
        if shard and used + _bytes(item) > most:
            yield shard
            shard, used = [], 0
        shard.append(item)
        used += _bytes(item)
    yield shard


def _write_shard(path: Path, items: list[_Item], work: _Work) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at, offsets = 0, {}
    for name, part in (named for item in items for named in item.parts()):
        offsets[name] = at
        end = at + _size(part)
        entry = {"dtype": part.dtype, "shape": list(part.shape), "data_offsets": [at, end]}
        header[name], at = entry, end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data of the file starts at a multiple of 8 bytes
    # The pool must end before the file is closed:
    # a late write could go to another file that has got the same file descriptor.
    with path.open("xb") as file, ThreadPoolExecutor(work.threads) as pool:
        _put(file.fileno(), len(text).to_bytes(8, "little") + text, 0)
        start = 8 + len(text)
        for item in items:
            item.file.file.check_unchanged()
            places = [start + offsets[name] for name, _ in item.parts()]
            if isinstance(item, _Kept):
                _keep(item, places[0], file.fileno(), work)
            else:
                _quantize(item, places, file.fileno(), pool, work)
        os.fsync(file.fileno())


def _keep(item: _Kept, place: int, fd: int, work: _Work) -> None:
    """Copy a tensor unchanged."""
    mapped = item.file.file
    for done in range(0, item.tensor.size, COPY_BYTES):
        at, size = item.tensor.offset + done, min(COPY_BYTES, item.tensor.size - done)
        _put(fd, mapped.view(at, size), place + done)
        mapped.release(at, size)
        work.did(size)


def _quantize(
    item: _Matrix, places: list[int], fd: int, pool: ThreadPoolExecutor, work: _Work
) -> None:
    """Quantize a matrix and write its tensors at the offsets `places`."""
    stored, found = item.stored, [part for _, part in item.parts()]
    n, k = stored.shape
    row = stored.nbytes // n
    step = max(1, BLOCK_WEIGHTS // (k * ROWS_OF_WORD)) * ROWS_OF_WORD

    def run(first: int) -> int:
        data = stored.cut(slice(first, first + step), row)
        block = QuantTensor(stored.name, (len(data), k), stored.source, data)
        made = compress(dequantize(block), item.form, stored.name)
        for part, place in zip(found, places, strict=True):
            if part.rows:
                row_bytes = _size(part) // part.shape[0]
                _put(fd, made[part.suffix], place + first // part.rows * row_bytes)
        return len(data) * row

    for part, place in zip(found, places, strict=True):
        if not part.rows:
            _put(fd, np.array([n, k], "<i8"), place)
    for size in pool.map(run, range(0, n, step)):
        work.did(size)
    if stored.release:
        stored.release()


def _size(part: StoredMatrixTensor) -> int:
    return math.prod(part.shape) * ITEM_BYTES[part.dtype]


def _put(fd: int, data: bytes | npt.NDArray[Any], at: int) -> None:
    """Write all bytes of `data` at byte `at` of the file; any thread may call this."""
    array = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    left = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while left:
        done = os.pwrite(fd, left, at)
        left, at = left[done:], at + done


def _write_json(path: Path, value: object) -> None:
    with path.open("x", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
