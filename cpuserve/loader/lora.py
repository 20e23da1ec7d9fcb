"""LoRA adapters of a model: checks that they fit it, and their matrices as a Program has them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cpuserve.loader.load import read_json
from cpuserve.loader.lora_files import (
    CONFIG,
    Adapter,
    Float32,
    StoredMatrix,
    check_alpha,
    check_rank,
    fail,
    read_adapter,
    weights_file,
)
from cpuserve.loader.mapped import AnyFile, copy_file, regular_file
from cpuserve.loader.names import checkpoint_to_hf
from cpuserve.loader.safetensors import SafeTensor, SafetensorsFile
from cpuserve.loader.tasks import OWN, own_tasks
from cpuserve.program.lora import SCALES, Adapters, module_of_table, name_table, parse
from cpuserve.program.operations.dense import Embed, Linear, Logits, PositionEmbed
from cpuserve.program.parts import parse as parse_part
from cpuserve.program.parts import stored_needs
from cpuserve.program.program import Program
from cpuserve.program.weight_kinds import WeightKind
from cpuserve.quant.base import QuantTensor, Weights
from cpuserve.quant.dense import SOURCES
from cpuserve.quant.stored import DENSE_KINDS

if TYPE_CHECKING:
    from collections.abc import Generator

    from cpuserve.models.spec import ModelSpec

# The most bytes of an adapter file besides its matrices: keys, and padding between tensors.
MOST_HEADER_BYTES = 16 << 20
_DELTA = ".linear_attn."  # this text is in the names of linears in gated delta nets


class AdapterReader:
    """Opens the adapters of one model; `program` is the Program of the model without adapters."""

    def __init__(self, spec: ModelSpec, program: Program, most_rank: int | None = None) -> None:
        """most_rank: the largest rank that an adapter may have; None = any supported rank."""
        self._spec = spec
        self._most_rank = most_rank
        self._tasks: dict[Path, TaskAdapters | None] = {}
        self.linears = {n for op in program.ops if isinstance(op, Linear) for n in op.weights}
        tables = [op for op in program.ops if isinstance(op, Embed)]
        self._tables = {op.weight: (op.vocab, op.width) for op in tables}
        shapes = {need.name: need.shape for need in program.weights}
        positions = [op for op in program.ops if isinstance(op, PositionEmbed)]
        self._types = {op.types: shapes[op.types] for op in positions if op.types is not None}
        self._heads = {op.weight for op in program.ops if isinstance(op, Logits)}
        needs = stored_needs(need for need in program.weights if need.name in self.linears)
        parts = filter(None, map(parse_part, self.linears))
        transposed = {part.tensor for part in parts if part.columns}
        self._shapes = {  # [outputs, inputs] of each linear in a checkpoint
            need.name: need.shape[::-1] if need.name in transposed else need.shape for need in needs
        }

    def room(self, slots: int, rank: int, opened: Sequence[Adapter] = ()) -> Adapters:
        """Return the `Adapters` of a Program with `slots` slots for adapters up to rank `rank`.

        opened: the adapters that are loaded at the start; only these may change tables.
        """
        linears = {name.removesuffix(".weight") for name in self.linears}
        modules = frozenset(linears.union(*(adapter.modules for adapter in opened)))
        return Adapters(slots, rank, modules, len(opened) if modules - linears else 0)

    def summary(self, opened: Sequence[Adapter]) -> Adapters:
        """Return the `Adapters` of a Program for exactly these adapters (at least one)."""
        rank = max(adapter.rank for adapter in opened)
        changed = frozenset().union(*(adapter.modules for adapter in opened))
        return replace(self.room(len(opened), rank, opened), modules=changed)

    def open(self, name: str, path: Path, copy: AnyFile | None = None) -> Adapter:
        """Return the adapter at `path`, a directory or a GGUF file.

        copy: the content of its weight file in memory; None = the file is mapped.

        Raises:
            ModelError: it is broken, not supported, or made for another model.
        """
        path = path.expanduser()
        tasks = self._tasks_of(path) if copy is None else None
        if tasks is not None:
            adapter = tasks.open(name)
        else:
            adapter = read_adapter(name, path, self._spec, copy)
        self._check_fit(adapter)
        adapter = self._with_types(replace(adapter, stored=self._stored(adapter)))
        most = self._most_rank
        if most is not None and adapter.rank > most:
            fail(
                name,
                f"its rank r is {adapter.rank}, but this server has room for ranks up to {most}; "
                f"start it with --max-lora-rank {adapter.rank}",
            )
        tables = sorted(adapter.modules & self._table_modules)
        if copy is not None and tables:
            fail(
                name,
                f"it changes the table {tables[0]}, which only adapters can that are loaded at the "
                "start; give it with --lora-modules",
            )
        return adapter

    def _tasks_of(self, path: Path) -> TaskAdapters | None:
        """Return the adapters for tasks at `path`; they are read for the first task only."""
        if path not in self._tasks:
            self._tasks[path] = find_tasks(path)
        return self._tasks[path]

    @property
    def _table_modules(self) -> set[str]:
        return {name.removesuffix(".weight") for name in self._tables}

    def _with_types(self, adapter: Adapter) -> Adapter:
        """Return the adapter with its change of token types as a part of its change of words.

        Raises:
            ModelError: the adapter changes the table of token types but not the table of words.
        """
        types = [m for m, _ in adapter.matrices if f"{m}.weight" in self._types]
        if not types:
            return adapter
        words = sorted(adapter.modules & self._table_modules)
        if not words:
            fail(adapter.name, f"it changes {types[0]}, but not the table of words")
        return replace(adapter, rank=adapter.rank + 1, types=(words[0], types[0]))

    def copy(self, name: str, path: Path) -> Generator[None, None, Adapter]:
        """Copy an adapter to memory, with pauses, and return it; ModelError if it cannot be used.

        Its file may then change while the adapter is served, or shrink while it is being read.
        """
        path = path.expanduser()
        if path.suffix != ".gguf":  # check the config before megabytes are copied
            regular_file(path / CONFIG, f"adapter {name}: config")
        file = yield from copy_file(weights_file(path), f"adapter {name}:", self._most_bytes)
        return self.open(name, path, file)

    @property
    def _most_bytes(self) -> int:
        """Return the most bytes of an fp32 adapter's file: all modules, with the largest rank."""
        shapes = [*self._shapes.values(), *self._tables.values()]
        widths = sum(map(sum, shapes))
        return MOST_HEADER_BYTES + 4 * widths * (self._most_rank or 0)

    def _check_fit(self, adapter: Adapter) -> None:
        """Raise ModelError unless the model has every module of the adapter in the same shape."""
        for (module, side), matrix in adapter.matrices.items():
            weight = f"{module}.weight"
            if weight in self._heads and weight not in self._tables:
                fail(adapter.name, f"it changes {module}, but the output head cannot be changed")
            if weight not in (self._shapes.keys() | self._tables.keys() | self._types.keys()):
                fail(
                    adapter.name, f"it is for another model: this one has no linear {module[:200]}"
                )
            wanted = self._shape_of(weight, side, adapter.rank)
            if matrix.shape != wanted:
                fail(
                    adapter.name,
                    f"it is for another model: {side} of {module} is {list(matrix.shape)}, and "
                    f"must be {list(wanted)} here",
                )
            if _DELTA in module and adapter.tiled != bool(self._spec.parts.get("tiled")):
                fail(
                    adapter.name,
                    f"the rows of {module} are in another order than those of the model: a GGUF "
                    "model needs a GGUF adapter here, and safetensors need PEFT's",
                )

    def _shape_of(self, weight: str, side: str, rank: int) -> tuple[int, int]:
        """Return the shape of matrix A or B for the linear or table with this weight."""
        table = self._tables.get(weight) or self._types.get(weight)
        if table is not None:
            return (table[0] if side == "A" else table[1], rank)
        outputs, inputs = self._shapes[weight]
        return (rank, inputs) if side == "A" else (outputs, rank)

    def _stored(self, adapter: Adapter) -> dict[str, str]:
        """Return, for each linear and table that the adapter changes, the adapter's module."""
        changed = {module for module, _ in adapter.matrices}
        found = {module: module for module in changed & self._table_modules}
        for name in self.linears:
            part = parse_part(name)
            module = (name if part is None else part.tensor).removesuffix(".weight")
            if module in changed:
                found[name.removesuffix(".weight")] = module
        return found


def adapter_weights(program: Program) -> int:
    """Return the number of weights in the matrices of all adapters of a Program."""
    return sum(math.prod(n.shape) for n in program.weights if _is_adapted(n.name))


def _is_adapted(name: str) -> bool:
    """Whether a tensor of a Program has the matrices of adapters."""
    return parse(name) is not None or module_of_table(name) is not None


class AdaptedWeights:
    """The weights of a model and of its adapters, under their names in the Program.

    The matrices of adapters are zeros until an executor loads an adapter (`AdapterMatrices`). But
    the tables of adapters are complete: they have the columns of all adapters loaded at the start.
    """

    def __init__(self, base: Weights, program: Program, opened: Sequence[Adapter]) -> None:
        self._base = base
        self._opened = tuple(opened)
        self._own = {
            need.name: need.shape
            for need in program.weights
            if need.name == SCALES or _is_adapted(need.name)
        }
        # The matrices of all slots are views of one array of zeros.
        sizes = [math.prod(shape) for name, shape in self._own.items() if not module_of_table(name)]
        self._zeros = np.zeros(max(sizes, default=0), np.float32)

    def names(self) -> set[str]:
        """Return the names of all tensors."""
        return self._base.names() | self._own.keys()

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of a matrix; matrices of adapters are never quantized."""
        return DENSE_KINDS[dtype] if name in self._own else self._base.kind(name, dtype)

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; a matrix of an adapter slot is all zeros."""
        if name not in self._own:
            return self._base.get(name)
        shape, module = self._own[name], module_of_table(name)
        if module is None:
            return _as_rows(name, self._zeros[: math.prod(shape)], shape)
        table = np.zeros(shape, np.float32)
        for i, adapter in enumerate(self._opened):
            found, first = adapter.matrix(module, "A"), i * shape[1] // len(self._opened)
            if found is None:
                continue
            # A row has the columns of all adapters: a NaN of one would reach all (0 x NaN is NaN).
            if not np.isfinite(found).all():
                fail(adapter.name, f"A of {module} has numbers that are not finite")
            table[:, first : first + found.shape[1]] = found
        return _as_rows(name, table, shape)


class AdapterMatrices:
    """The matrices of one adapter as a Program has them, padded with zeros to its rank."""

    def __init__(self, program: Program, rank: int, adapter: Adapter) -> None:
        """rank: the rank of the adapters in the Program."""
        self._rank = rank
        self._adapter = adapter
        self._shapes: Mapping[str, tuple[int, ...]] = {n.name: n.shape for n in program.weights}

    def get(self, name: str) -> QuantTensor:
        """Return this adapter's matrix for the tensor `name` of the Program, in any slot."""
        shape, matrix = self._shapes[name], parse(name)
        assert matrix is not None
        values = np.zeros(shape, np.float32)
        if matrix.side == "A":
            self._fill_a(values, matrix.modules[0])
        elif name_table(matrix.modules[0]) + ".weight" in self._shapes:
            self._fill_columns(values, matrix.modules[0], matrix.adapter * self._rank)
        else:
            self._fill_b(values, matrix.modules)
        return _as_rows(name, values, shape)

    def _fill_a(self, values: Float32, module: str) -> None:
        """Copy matrix A of a module into the first rows of `values`."""
        found = self._adapter.matrix(module, "A")
        if found is not None:
            values[: len(found)] = found

    def _fill_columns(self, values: Float32, module: str, first: int) -> None:
        """Copy matrix B of a table into the columns of this adapter, which begin at `first`."""
        found = self._adapter.matrix(module, "B")
        if found is not None:
            values[:, first : first + found.shape[1]] = found

    def _fill_b(self, values: Float32, modules: Iterable[str]) -> None:
        """Copy matrix B of each module into its block on the diagonal of `values`."""
        row = 0
        for i, module in enumerate(modules):
            found, column = self._adapter.matrix(module, "B"), i * self._rank
            end = row + self._shapes[f"{module}.weight"][0]
            if found is not None:
                values[row:end, column : column + found.shape[1]] = found
            row = end


def _as_rows(name: str, values: Float32, shape: tuple[int, ...]) -> QuantTensor:
    rows = shape[0] if len(shape) > 1 else 1
    data = values.reshape(-1).view(np.uint8).reshape(rows, -1)
    return QuantTensor(name, shape, "f32", data)


FILE = "model.safetensors"
_TENSOR = re.compile(r"(?P<module>.+)\.parametrizations\.weight\.0\.lora_(?P<side>[AB])")
_UNREAD = "pooler.dense"  # computing embeddings does not need this linear


class TaskAdapters:
    """The task adapters of a checkpoint; each file is read once for all tasks."""

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        """config: of the checkpoint at `path`; ModelError if its tasks or files are broken."""
        self._path = path
        self._config = config
        self._tasks = own_tasks(path, config)

    @cached_property
    def _file(self) -> SafetensorsFile:
        return SafetensorsFile(self._path / FILE)

    def open(self, name: str) -> Adapter:
        """Return the adapter for the task `name`.

        Raises:
            ModelError: the checkpoint has no such task, or its adapters are broken.
        """
        path, config, tasks = self._path, self._config, self._tasks
        if name not in tasks:
            known = ", ".join(tasks) or "no tasks"
            fail(name, f"{path} has adapters for {known}, and not for {name}")
        rank = check_rank(name, config.get("lora_rank", 4))
        alpha = check_alpha(name, "lora_alpha", config.get("lora_alpha", 1))
        matrices = {}
        for tensor in self._file.tensors.values():
            match = _TENSOR.fullmatch(tensor.name)
            if match is None:
                continue
            module = checkpoint_to_hf(f"{match['module']}.weight").removesuffix(".weight")
            if module != _UNREAD:
                flip = module.startswith("embeddings.") and match["side"] == "B"
                matrix = _matrix(name, tensor, len(tasks), tasks.index(name), flip=flip)
                matrices[module, match["side"]] = matrix
        return Adapter(name, path, rank, alpha / rank, self._file.file, matrices, task=name)


def find_tasks(path: Path) -> TaskAdapters | None:
    """Return the adapters for tasks that the checkpoint at `path` has in the file of its weights.

    None if `path` is no checkpoint with such adapters. ModelError if its tasks or files are broken.
    """
    file = path / "config.json"
    config = read_json(file, "config") if file.is_file() else {}
    return TaskAdapters(path, config) if OWN in config else None


def _matrix(name: str, tensor: SafeTensor, tasks: int, index: int, *, flip: bool) -> StoredMatrix:
    """Return the matrix of one task in a stack; flip: whether the stack has transposed matrices."""
    if tensor.dtype not in SOURCES or len(tensor.shape) != 3 or tensor.shape[0] != tasks:
        fail(name, f"tensor {tensor.name} is no stack of {tasks} matrices of F32, F16 or BF16")
    size = tensor.size // tasks
    shape = tensor.shape[:0:-1] if flip else tensor.shape[1:]
    source = SOURCES[tensor.dtype]
    offset = tensor.offset + index * size
    return StoredMatrix(tensor.name, shape, source, offset, size, transposed=flip)
