"""Quantize matrices into the formats of compressed-tensors, for `cpuserve quantize`.

vLLM loads all of these formats on GPUs, and W8A8 and W4A16 on CPUs. `compressed_tensors.py` reads
them back without loss. The format of a matrix depends on the weight kind that the matrix would get
if the server quantized it at load with the same scheme.

The left column of this table has weight kinds, with "of" and a scheme if the scheme matters.
"The same values" means that the copy has the same weights as quantization at load:

w8_channel of w8a8   int-quantized, W8A8: activations int8 with a scale per row. The same values.
w8_channel, w8_channel_g128 of int8
                     pack-quantized, W8A16 with a scale per output. The same values.
w8_g32               pack-quantized, W8A16 in groups of 32. The same values.
w4m_g128, w4m_g32    pack-quantized, W4A16 in groups of 128 or 32, with integer zero points
                     (`quantize_zeros`); quantization at load has fp16 minimums instead

Three things differ from quantization at load, because vLLM could not load the copy otherwise.
Embeddings and output heads are not quantized. q, k and v have one format, because vLLM fuses them:
if v needs 8 bits, all three have 8 bits. All matrices of experts have one format,
because vLLM fuses experts: every int4 scheme stores them with symmetric codes of 4 bits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cpuserve.base.errors import ModelError
from cpuserve.quant.codes import GROUP, ZERO
from cpuserve.quant.online import (
    BLOCK,
    FINE,
    PER_TOKEN,
    kind_of,
    quantize,
    quantize_zeros,
)
from cpuserve.quant.rows import join_bits

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy.typing as npt

    from cpuserve.program.program import WeightNeed

    Bytes = npt.NDArray[np.uint8]
    Float32 = npt.NDArray[np.float32]

# The number of rows that are quantized together is a multiple of this number,
# because the zero points of 8 rows share a 32-bit word.
ROWS_OF_WORD = 8
WITH_VALUES = ("q_proj.weight", "k_proj.weight")  # vLLM fuses both with v_proj.weight
# vLLM creates these linears, like routers, without a quantization config: they are not quantized.
GATES = ("shared_expert_gate.weight",)
_EXPERT = re.compile(r".*\.experts\.\d+\..*")
_LAYER = re.compile(r".*?(\blayers\.\d+\..+)")


@dataclass(frozen=True, slots=True, order=True)
class Form:
    """How a matrix is stored.

    bits: 4 or 8 bits per code.
    group: number of inputs that share a scale; 0 = all inputs.
    symmetric: whether there are no zero points.
    per_token: whether activations are int8 with a scale for each row.
    """

    bits: int
    group: int
    symmetric: bool
    per_token: bool = False

    def __str__(self) -> str:
        """Return a text such as "W4A16 in groups of 128"."""
        scales = f"in groups of {self.group}" if self.group else "with a scale per output"
        return f"W{self.bits}A{8 if self.per_token else 16} {scales}"


class StoredMatrixTensor(NamedTuple):
    """One of the tensors that store a matrix.

    rows: number of matrix rows that a row of the tensor describes; 0 if it describes all rows.
    """

    suffix: str
    dtype: str
    shape: tuple[int, ...]
    rows: int


def is_quantized(need: WeightNeed) -> bool:
    """Whether files have a matrix quantized: not embeddings, heads, routers and gates."""
    name, kept = need.name, need.use in (*PER_TOKEN, "exact")
    return name.endswith(".weight") and not name.endswith(GATES) and not kept


def form_of(need: WeightNeed, k: int, scheme: str) -> Form:
    """Return how a matrix [n, k] is stored; scheme: a value of --quantization but none."""
    expert = _EXPERT.fullmatch(need.name) is not None
    use = "values" if need.name.endswith(WITH_VALUES) else need.use
    kind = kind_of(need.name, use, scheme)
    if expert and scheme.startswith("int4"):
        kind = "w4m_g32" if scheme.endswith(FINE) else "w4m_g128"
    if scheme == "w8a8":
        return Form(8, 0, symmetric=True, per_token=True)
    four = kind.startswith("w4")
    wanted = (GROUP, BLOCK) if kind == "w4m_g128" else (BLOCK,)
    groups = [group for group in wanted if k % group == 0]
    if kind in ("w8_channel", "w8_channel_g128") or not groups:
        return Form(8, 0, symmetric=True)
    return Form(4 if four else 8, groups[0], symmetric=expert or not four)


def parts(form: Form, n: int, k: int) -> list[StoredMatrixTensor]:
    """Return the tensors that store a matrix [n, k], in their order in a file."""
    groups = k // form.group if form.group else 1
    scale = StoredMatrixTensor("weight_scale", "F16" if form.group else "F32", (n, groups), 1)
    if form.per_token:
        return [StoredMatrixTensor("weight", "I8", (n, k), 1), scale]
    found = [StoredMatrixTensor("weight_packed", "I32", (n, -(-k * form.bits // 32)), 1), scale]
    found.append(StoredMatrixTensor("weight_shape", "I64", (2,), 0))
    if not form.symmetric:
        words = -(-n // ROWS_OF_WORD)
        found.append(StoredMatrixTensor("weight_zero_point", "I32", (words, groups), ROWS_OF_WORD))
    return found


def compress(rows: Float32, form: Form, name: str) -> dict[str, npt.NDArray[Any]]:
    """Quantize fp32 rows [n, k] of matrix `name`; return the rows of its tensors by suffix.

    The tensors are those in `parts`, without weight_shape.

    Raises:
        ModelError: a weight is not a finite number, or is too large for the form.
    """
    if not np.isfinite(rows).all():
        msg = f"{name} has a weight that is not a finite number; download the model again"
        raise ModelError(msg)
    found: dict[str, npt.NDArray[Any]] = {}
    # Infinite scales are reported as an error below.
    with np.errstate(over="ignore", invalid="ignore"):
        if form.bits == 4:
            codes, scale, zero = quantize_zeros(rows, form.group, symmetric=form.symmetric)
            found |= {"weight_packed": join_bits(codes, 4), "weight_zero_point": _columns(zero)}
        else:
            codes, scale = quantize(rows, "w8_g32" if form.group else "w8_channel")[:2]
            found["weight"] = (codes ^ np.uint8(ZERO)).view(np.int8)
            found["weight_packed"] = np.pad(codes, ((0, 0), (0, -codes.shape[1] % 4)))
    if not np.isfinite(scale).all():
        msg = f"{name} has weights that are too large for {form}; use --scheme w8a8"
        raise ModelError(msg)
    found["weight_scale"] = scale.astype("<f2" if form.group else "<f4")
    wanted = {part.suffix for part in parts(form, *rows.shape)}
    return {suffix: array for suffix, array in found.items() if suffix in wanted}


def _columns(zero: Bytes) -> Bytes:
    """Pack 4-bit zero points [n, groups], eight rows in a word: bytes [n / 8, 4 * groups]."""
    padded = np.pad(zero, ((0, -len(zero) % ROWS_OF_WORD), (0, 0)))
    words = join_bits(np.ascontiguousarray(padded.T), 4).view("<u4")
    return np.ascontiguousarray(words.T).view(np.uint8)


def quantization_config(forms: Mapping[str, Form], dense: Iterable[str]) -> dict[str, Any]:
    """Return the quantization_config for config.json.

    forms: how matrices are quantized, by the name of their module.
    dense: modules that look like linears but are not quantized.
    """
    present = sorted(set(forms.values()))
    config_groups = {
        f"group_{i}": _config_group(form, targets)
        for i, (form, targets) in enumerate(_targets(forms, present).items())
    }
    per_token = all(form.per_token for form in present)
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if per_token else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": config_groups,
        # "lm_head" is listed even if the output head is tied:
        # readers then see the module although it has no tensor.
        "ignore": sorted({*dense, "lm_head"}),
    }


def _targets(forms: Mapping[str, Form], present: list[Form]) -> dict[Form, list[str]]:
    """Return the `targets` of each form: "Linear" if there is one form, else patterns of names.

    vLLM matches its fused matrix of q, k and v with "Linear"
    before it looks at the names of its parts, so "Linear" may not be mixed with patterns.
    """
    if len(present) == 1:
        return {present[0]: ["Linear"]}
    found: dict[str, set[Form]] = {}
    patterns = {name: _pattern(name) for name in forms}
    for name, form in forms.items():
        found.setdefault(patterns[name], set()).add(form)
    targets: dict[Form, set[str]] = {form: set() for form in present}
    for name, form in forms.items():
        alone = len(found[patterns[name]]) == 1
        targets[form].add(patterns[name] if alone else _pattern(name, every=False))
    return {form: sorted(names) for form, names in targets.items()}


def _pattern(module: str, *, every: bool = True) -> str:
    """Return a pattern that matches this module in every layer and expert; every=False: only here.

    The pattern has no prefix,
    because multimodal models have other prefixes in vLLM than in the file.
    """
    layer = _LAYER.fullmatch(module)
    stem = re.escape(layer[1] if layer else module)
    if every:
        stem = re.sub(r"(?<=\\\.)\d+(?=\\\.)", r"\\d+", stem)
    return f"re:.*{stem}$"


def _config_group(form: Form, targets: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": form.bits,
        "type": "int",
        "symmetric": form.symmetric,
        "strategy": "group" if form.group else "channel",
        "group_size": form.group or None,
        "dynamic": False,
    }
    rows = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    return {
        "targets": targets,
        "weights": weights,
        "input_activations": rows if form.per_token else None,
        "output_activations": None,
    }
