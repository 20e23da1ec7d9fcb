"""Reads the files of LoRA adapters: PEFT directories and GGUF files.

A PEFT directory has adapter_config.json and adapter_model.safetensors. A GGUF file has
the general.type "adapter". The name of its matrix is the name of the tensor that it changes, with a
suffix: "blk.0.attn_q.weight.lora_a" (convert_lora_to_gguf.py).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.archs.table import ARCHS, find
from cpuserve.loader.gguf.file import GgufFile
from cpuserve.loader.gguf.model import row_order
from cpuserve.loader.load import read_json
from cpuserve.loader.mapped import AnyFile
from cpuserve.loader.names import gguf_to_hf, program_name
from cpuserve.loader.safetensors import SafetensorsFile
from cpuserve.models import FAMILIES, names_of
from cpuserve.program.parts import parse as parse_part
from cpuserve.program.weight_kinds import SourceType
from cpuserve.quant import dequantize
from cpuserve.quant.base import QuantTensor
from cpuserve.quant.dense import SOURCES

if TYPE_CHECKING:
    from cpuserve.models.spec import ModelSpec

Float32 = npt.NDArray[np.float32]
FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
MAX_RANK = 512
# The tensor types that the converter of llama.cpp writes (its option --outtype).
GGUF_SOURCES: dict[str, SourceType] = {**SOURCES, "Q8_0": "gguf_q8_0"}
_TENSOR = re.compile(
    r"base_model\.model\.(?P<module>.+)\.lora_(?P<table>embedding_)?(?P<side>[AB])"
    r"(?:\.default)?(?:\.weight)?"
)
_GGUF_TENSOR = re.compile(r"(?P<tensor>.+\.weight)\.lora_(?P<side>[ab])")
# Settings of PEFT that change the result of an adapter,
# each with the only value that is supported. fan_in_fan_out (the model stores linears transposed,
# as GPT-2 does) is not checked, because it changes neither A nor B.
PLAIN: dict[str, object] = {
    "bias": "none",
    "use_dora": False,
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layer_replication": None,
    "lora_bias": False,
}


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Matrix A [rank, inputs] or B [outputs, rank] of a linear, or A [vocab, rank] of a table.

    tensor: the name of the matrix in the file.
    row_order: row i of the matrix is row row_order[i] of the file; None = the same order.
    transposed: whether the file has the transpose of the matrix.
    """

    tensor: str
    shape: tuple[int, ...]
    source: SourceType
    offset: int
    size: int
    row_order: npt.NDArray[np.int32] | None = None
    transposed: bool = False

    def values(self, file: AnyFile) -> Float32:
        """Return the matrix in fp32; ModelError if the file has changed."""
        file.check_unchanged()
        shape = self.shape[::-1] if self.transposed else self.shape
        data = file.view(self.offset, self.size).reshape(shape[0], -1)
        values = dequantize(
            QuantTensor(self.tensor, shape, self.source, data, row_order=self.row_order)
        )
        return values.T if self.transposed else values


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter: its rank and scale, and where the matrices A and B of each module are.

    matrices: the stored matrices by (module, "A" or "B").
    tiled: whether the value heads of gated delta nets are in the order of llama.cpp.
    stored: for each linear and table of the Program, the checkpoint module that has its rows.
    task: the name of the task, if several tasks share the file.
    types: (table of words, table of token types), if the adapter changes both tables.
      All tokens have type 0. The change of type 0 is one more column of matrix B for words,
      and matrix A for words has ones in this column.
    """

    name: str
    path: Path
    rank: int
    scale: float
    file: AnyFile
    matrices: Mapping[tuple[str, str], StoredMatrix]
    tiled: bool = False
    stored: Mapping[str, str] = field(default_factory=dict)
    task: str = ""
    types: tuple[str, str] | None = None

    @property
    def modules(self) -> frozenset[str]:
        """The linears and tables that the adapter changes: weight names without ".weight"."""
        return frozenset(self.stored)

    def matrix(self, module: str, side: str) -> Float32 | None:
        """Return matrix A or B of a linear or table in fp32; None if the adapter has none.

        A is [rank, inputs] for a linear and [vocab, rank] for a table; B is [outputs, rank].
        The rank of a matrix may be smaller than the rank of the adapter.
        """
        if module not in self.stored:
            return None
        values = self.matrices[self.stored[module], side].values(self.file)
        if self.types is not None and module == self.types[0]:
            return np.concatenate([values, self._column_of_types(side, len(values))], axis=1)
        part = parse_part(module)
        if side == "B" and part is not None:
            values = values[part.of(values.shape)]
        return values

    def _column_of_types(self, side: str, rows: int) -> Float32:
        """Return the last column [rows, 1] of A or B for words: the change of token type 0."""
        assert self.types is not None
        if side == "A":
            return np.ones((rows, 1), np.float32)
        a, b = (self.matrices[self.types[1], x].values(self.file) for x in "AB")
        change: Float32 = b @ a[0]
        return change[:, None]

    def fingerprint(self) -> str:
        """A hash of the adapter; it separates the cached prefixes of different adapters."""
        found = hashlib.sha256(f"{self.scale!r} {self.rank} ".encode())
        if not self.task:
            found.update(self.file.digest)
        for matrix in self.matrices.values() if self.task else ():
            found.update(self.file.view(matrix.offset, matrix.size).data)
        return found.hexdigest()[:16]


def weights_file(path: Path) -> Path:
    """Return the file with the matrices of the adapter at `path`."""
    return path if path.suffix == ".gguf" else path / FILE


def read_adapter(name: str, path: Path, spec: ModelSpec, copy: AnyFile | None = None) -> Adapter:
    """Return the adapter at `path`; its matrices are not read yet.

    copy: a copy of its weights_file, if there is one.

    Raises:
        ModelError: the adapter is broken or not supported.
    """
    read = _read_gguf if path.suffix == ".gguf" else _read_peft
    adapter = read(name, path, spec, copy)
    for module, side in adapter.matrices:
        if (module, "B" if side == "A" else "A") not in adapter.matrices:
            fail(name, f"{module} has only one of its matrices A and B")
    if not adapter.matrices:
        fail(name, "it changes nothing")
    return adapter


def fail(name: str, why: str) -> NoReturn:
    """Raise the ModelError for adapter `name`."""
    msg = f"adapter {name}: {why}"
    raise ModelError(msg)


def check_rank(name: str, rank: object) -> int:
    """Return the rank of adapter `name`; ModelError unless it is between 1 and MAX_RANK."""
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MAX_RANK:
        fail(name, f"its rank r is {rank!r:.40}, but it must be between 1 and {MAX_RANK}")
    return rank


def check_alpha(name: str, key: str, alpha: Any) -> float:
    """Return the alpha of adapter `name`; ModelError unless it is a finite number."""
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        fail(name, f"its {key} is {alpha!r:.40}, but it must be a number")
    return float(alpha)


# --- PEFT -------------------------------------------------------------------------------------


def _read_peft(name: str, path: Path, spec: ModelSpec, copy: AnyFile | None) -> Adapter:
    config = read_json(path / CONFIG, f"adapter {name}: config")
    if config.get("peft_type") != "LORA":
        fail(name, f"its peft_type is {str(config.get('peft_type'))[:40]}, but it must be LORA")
    for key, plain in PLAIN.items():
        value = config.get(key)
        if value != plain and value is not None and value != []:
            fail(name, f"{key} is {str(value)[:60]}, which is not supported")
    rank = check_rank(name, config.get("r"))
    alpha = check_alpha(name, "lora_alpha", config.get("lora_alpha"))
    file = SafetensorsFile(path / FILE, copy)
    matrices: dict[tuple[str, str], StoredMatrix] = {}
    names = names_of(spec.architecture)
    for tensor in file.tensors.values():
        match = _TENSOR.fullmatch(tensor.name)
        if match is None:
            fail(name, f"tensor {tensor.name[:200]} is not a matrix A or B of LoRA")
        if tensor.dtype not in SOURCES or len(tensor.shape) != 2:
            fail(name, f"tensor {tensor.name} is not a matrix of F32, F16 or BF16")
        if tensor.shape[0 if match["side"] == "A" else 1] != rank:
            fail(name, f"tensor {tensor.name} is {list(tensor.shape)}, but the rank r is {rank}")
        weight = program_name(f"{match['module']}.weight", names)
        module = weight.removesuffix(".weight")
        # PEFT stores the transpose of matrix A for a table of embeddings.
        flip = match["table"] is not None and match["side"] == "A"
        matrices[module, match["side"]] = StoredMatrix(
            tensor.name,
            tensor.shape[::-1] if flip else tensor.shape,
            SOURCES[tensor.dtype],
            tensor.offset,
            tensor.size,
            transposed=flip,
        )
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return Adapter(name, path, rank, scale, file.file, matrices)


# --- GGUF -------------------------------------------------------------------------------------


def _read_gguf(name: str, path: Path, spec: ModelSpec, copy: AnyFile | None) -> Adapter:
    file = GgufFile(path, copy)
    arch = _arch_of(name, file, spec)
    matrices: dict[tuple[str, str], StoredMatrix] = {}
    ranks: set[int] = set()
    for tensor in file.tensors.values():
        match = _GGUF_TENSOR.fullmatch(tensor.name)
        if match is None:
            fail(name, f"tensor {tensor.name} is not a matrix lora_a or lora_b of a linear")
        if tensor.dtype not in GGUF_SOURCES or len(tensor.shape) != 2:
            fail(name, f"tensor {tensor.name} is not a matrix of {', '.join(GGUF_SOURCES)}")
        weight = gguf_to_hf(match["tensor"], arch.blocks, arch.top, arch.layers)
        side, rows = match["side"].upper(), tensor.shape[0]
        # B has the rows of the matrix that it changes, and the converter reorders both equally.
        heads = spec.q_heads, spec.kv_heads
        split = spec.parts.get("split_pairs", 0)
        order = row_order(arch, weight, rows, *heads, split) if side == "B" else None
        # A is [rank, inputs] for a linear, and [vocab, rank] for the table of words.
        linear = match["tensor"] != "token_embd.weight"
        ranks.add(check_rank(name, tensor.shape[0 if side == "A" and linear else 1]))
        matrices[weight.removesuffix(".weight"), side] = StoredMatrix(
            tensor.name, tensor.shape, GGUF_SOURCES[tensor.dtype], tensor.offset, tensor.size, order
        )
    if len(ranks) > 1:
        fail(name, f"its matrices have the ranks {sorted(ranks)}, but all must have one")
    rank = next(iter(ranks), 1)
    alpha = check_alpha(name, "adapter.lora.alpha", file.value("adapter.lora.alpha"))
    # As in llama.cpp, an alpha of 0 means that alpha is unknown.
    scale = alpha / rank if alpha else 1.0
    return Adapter(name, path, rank, scale, file.file, matrices, arch.tiled)


def _arch_of(name: str, file: GgufFile, spec: ModelSpec) -> GgufArch:
    """Return the entry for the architecture of the file; ModelError unless it fits the model."""
    for key, required in (("general.type", "adapter"), ("adapter.type", "lora")):
        if file.value(key) != required:
            fail(name, f"its {key} is {file.value(key)!r:.40}, but it must be {required!r}")
    if "adapter.alora.invocation_tokens" in file:
        fail(name, "it is an activated LoRA (adapter.alora), which is not supported")
    architecture = file.value("general.architecture")
    arch = find(architecture) if isinstance(architecture, str) else None
    if arch is None:
        supported = ", ".join(ARCHS)
        fail(
            name, f"its architecture {architecture!r:.40} is not supported; supported: {supported}"
        )
    family = FAMILIES.texts.get(spec.architecture)
    names = [name for name in ARCHS if ARCHS[name].family == spec.architecture]
    if family is not None and family.shared_gguf:
        names = list(family.shared_gguf.values())
    if names and architecture not in names:
        msg = f"its architecture is {architecture}, that of the model {' or '.join(names)}"
        fail(name, f"it is for another model: {msg}")
    return arch
