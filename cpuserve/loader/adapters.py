"""Reads LoRA adapters in PEFT's files: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from cpuserve.errors import ModelError
from cpuserve.loader.load import read_json
from cpuserve.loader.safetensors import SafetensorsFile
from cpuserve.program.adapters import SCALES, Adapters, parse
from cpuserve.program.ops import Embed, Linear, Logits
from cpuserve.program.parts import parse as parse_part
from cpuserve.program.parts import stored_needs
from cpuserve.program.program import Program
from cpuserve.quant import dequantize
from cpuserve.quant.base import QuantTensor, WeightKind, Weights
from cpuserve.quant.dense import SOURCES
from cpuserve.quant.stored import DENSE_KINDS

Float32 = npt.NDArray[np.float32]
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MAX_RANK = 512
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight"
)
# Settings of PEFT that change what an adapter computes, and the value at which they do not.
PLAIN: dict[str, object] = {
    "bias": "none",
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "lora_bias": False,
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter: its rank and scale, and where the matrices A and B of each module are.

    stored: the module of the checkpoint that each linear of the Program is, or is rows of.
    """

    name: str
    path: Path
    rank: int
    scale: float
    file: SafetensorsFile
    tensors: Mapping[tuple[str, str], str]
    stored: Mapping[str, str] = field(default_factory=dict)

    @property
    def modules(self) -> frozenset[str]:
        """The linears that it changes, by the names of their weights without ".weight"."""
        return frozenset(self.stored)

    def matrix(self, module: str, side: str) -> Float32 | None:
        """A [rank, inputs] or B [outputs, rank] of a linear in fp32; None if it has none."""
        if module not in self.stored:
            return None
        tensor = self.file.tensors[self.tensors[self.stored[module], side]]
        self.file.file.check_unchanged()
        data = self.file.file.view(tensor.offset, tensor.size).reshape(tensor.shape[0], -1)
        values = dequantize(QuantTensor(tensor.name, tensor.shape, SOURCES[tensor.dtype], data))
        part = parse_part(module)
        if side == "B" and part is not None:
            values = values[part.of(values.shape)]
        return values

    def fingerprint(self) -> str:
        """A hash of the adapter, which separates the cached prefixes of different adapters."""
        digest = hashlib.sha256(f"{self.scale!r} {self.rank}".encode())
        digest.update(self.file.file.map)
        return digest.hexdigest()[:16]


def open_adapters(given: Mapping[str, str], program: Program) -> list[Adapter]:
    """The adapters with these names and directories, which fit `program` (without adapters).

    Raises:
        ModelError: an adapter is broken, not supported, or made for another model; one line.
    """
    linears = {name for op in program.ops if isinstance(op, Linear) for name in op.weights}
    others = {op.weight for op in program.ops if isinstance(op, Embed | Logits)}
    shapes = {
        need.name: need.shape
        for need in stored_needs(need for need in program.weights if need.name in linears)
    }
    adapters = [_open(name, Path(path).expanduser()) for name, path in given.items()]
    for adapter in adapters:
        _check_fit(adapter, shapes, others)
    return [replace(adapter, stored=_stored(adapter, linears)) for adapter in adapters]


def _open(name: str, path: Path) -> Adapter:
    if path.suffix == ".gguf":
        _fail(name, f"{path} is a GGUF file; give the directory of the adapter before conversion")
    config = read_json(path / CONFIG, f"adapter {name}: config")
    if config.get("peft_type") != "LORA":
        _fail(name, f"its peft_type is {str(config.get('peft_type'))[:40]}, but it must be LORA")
    for key, plain in PLAIN.items():
        value = config.get(key)
        if value != plain and value is not None and value != []:
            _fail(name, f"{key} is {str(value)[:60]}, which is not supported")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        _fail(name, f"its rank r is {rank!r:.40}, but it must be between 1 and {MAX_RANK}")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        _fail(name, f"its lora_alpha is {alpha!r:.40}, but it must be a number")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    file = SafetensorsFile(path / FILE)
    tensors: dict[tuple[str, str], str] = {}
    for tensor in file.tensors.values():
        match = _TENSOR.fullmatch(tensor.name)
        if match is None:
            _fail(name, f"tensor {tensor.name[:200]} is not a matrix A or B of a linear")
        if tensor.dtype not in SOURCES or len(tensor.shape) != 2:
            _fail(name, f"tensor {tensor.name} is not a matrix of F32, F16 or BF16")
        if tensor.shape[0 if match["side"] == "A" else 1] != rank:
            _fail(name, f"tensor {tensor.name} is {list(tensor.shape)}, but the rank r is {rank}")
        tensors[match["module"], match["side"]] = tensor.name
    for module, side in tensors:
        if (module, "B" if side == "A" else "A") not in tensors:
            _fail(name, f"{module} has only one of its matrices A and B")
    if not tensors:
        _fail(name, "it changes nothing")
    return Adapter(name, path, rank, float(scale), file, tensors)


def _fail(name: str, why: str) -> NoReturn:
    msg = f"adapter {name}: {why}"
    raise ModelError(msg)


def summary(adapters: Sequence[Adapter]) -> Adapters:
    """What a Program needs to know of the adapters, of which there is at least one."""
    rank = max(adapter.rank for adapter in adapters)
    return Adapters(len(adapters), rank, frozenset().union(*(a.modules for a in adapters)))


def _check_fit(
    adapter: Adapter, shapes: Mapping[str, tuple[int, ...]], others: Iterable[str]
) -> None:
    """Raise ModelError unless the model has every linear of the adapter, in the same shape.

    shapes: of the stored matrices of linears. others: the names of the other matrices.
    """
    for (module, side), tensor in adapter.tensors.items():
        weight = f"{module}.weight"
        if weight in others:
            _fail(adapter.name, f"it changes {module}, but only linears of layers can be")
        if weight not in shapes:
            _fail(adapter.name, f"it is for another model: this one has no linear {module}")
        outputs, inputs = shapes[weight]
        shape = adapter.file.tensors[tensor].shape
        wanted = (adapter.rank, inputs) if side == "A" else (outputs, adapter.rank)
        if shape != wanted:
            _fail(
                adapter.name,
                f"it is for another model: {side} of {module} is {list(shape)}, and must be "
                f"{list(wanted)} here",
            )


def _stored(adapter: Adapter, linears: Iterable[str]) -> dict[str, str]:
    """The linears that the adapter changes; each is a whole module of its, or rows of one."""
    changed = {module for module, _ in adapter.tensors}
    found = {}
    for name in linears:
        part = parse_part(name)
        module = (name if part is None else part.tensor).removesuffix(".weight")
        if module in changed:
            found[name.removesuffix(".weight")] = module
    return found


class AdaptedWeights:
    """The weights of a model and of its adapters, under the names of the program."""

    def __init__(self, base: Weights, program: Program, adapters: Sequence[Adapter]) -> None:
        self._base = base
        self._adapters = adapters
        self._rank = max(adapter.rank for adapter in adapters)
        self._shapes = {need.name: need.shape for need in program.weights}
        self._own = {name for name in self._shapes if name == SCALES or parse(name) is not None}

    def names(self) -> set[str]:
        """Every tensor name."""
        return self._base.names() | self._own

    def kind(self, name: str, dtype: str) -> WeightKind:
        """The weight kind of a matrix; those of adapters are never quantized."""
        return DENSE_KINDS[dtype] if name in self._own else self._base.kind(name, dtype)

    def get(self, name: str) -> QuantTensor:
        """The tensor; those of adapters are made here, padded to the common rank."""
        if name not in self._own:
            return self._base.get(name)
        shape, matrix = self._shapes[name], parse(name)
        values = np.zeros(shape, np.float32)
        if matrix is None:
            values[:] = [adapter.scale for adapter in self._adapters]
        elif matrix.side == "A":
            self._fill_a(values, matrix.modules[0], self._adapters[matrix.adapter])
        else:
            self._fill_b(values, matrix.modules, self._adapters[matrix.adapter])
        rows = shape[0] if len(shape) > 1 else 1
        return QuantTensor(name, shape, "f32", values.view(np.uint8).reshape(rows, -1))

    def _fill_a(self, values: Float32, module: str, adapter: Adapter) -> None:
        """Put A of a module into the first rows."""
        found = adapter.matrix(module, "A")
        if found is not None:
            values[: adapter.rank] = found

    def _fill_b(self, values: Float32, modules: Sequence[str], adapter: Adapter) -> None:
        """Put B of each module into its block on the diagonal."""
        row = 0
        for i, module in enumerate(modules):
            found, column = adapter.matrix(module, "B"), i * self._rank
            end = row + self._shapes[f"{module}.weight"][0]
            if found is not None:
                values[row:end, column : column + adapter.rank] = found
            row = end
