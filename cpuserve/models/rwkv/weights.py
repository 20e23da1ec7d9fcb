"""The weights of RWKV 6, as its Program reads them.

A layer makes the factors of five mixtures of rows, each by a small matrix and a fixed row.
flash-linear-attention has the small matrices side by side, as columns of a matrix [width, 5 ranks].
A Program reads them as matrices of a stack [5, width, rank], as they are in GGUF files.
The directories of RWKV itself (Finch) call tensors otherwise, and transpose small matrices.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cpuserve.quant import dequantize
from cpuserve.quant.base import QuantTensor
from cpuserve.quant.parts import transposed
from cpuserve.quant.stored import DENSE_KINDS

if TYPE_CHECKING:
    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import Weights

MATRICES = ".attn.x_proj.2.weight"
ROWS = ".attn.x_proj.2.bias"
ROWS_STORED = ".attn.x_bias"
COUNT = 5  # of mixtures


class MixtureWeights:
    """The `Weights` of an RWKV 6 checkpoint, as its Program reads them."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._stored = {name.replace(ROWS_STORED, ROWS): name for name in weights.names()}

    def names(self) -> set[str]:
        """Return the name of each tensor; fixed rows are called as in a Program."""
        return set(self._stored)

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; matrices that are side by side are stacked in fp32."""
        tensor = self._weights.get(self._stored.get(name, name))
        if name.endswith(ROWS):
            return replace(tensor, name=name)
        if not name.endswith(MATRICES) or len(tensor.shape) != 2 or tensor.shape[1] % COUNT:
            return tensor
        width, ranks = tensor.shape
        stack = dequantize(tensor).reshape(width, COUNT, ranks // COUNT).transpose(1, 0, 2)
        data = np.ascontiguousarray(stack).reshape(COUNT * width, -1).view("u1")
        return QuantTensor(name, stack.shape, "f32", data, release=tensor.release)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of the tensor; matrices of mixtures are dense."""
        mixes = ".attn.x_proj.2" in name
        return DENSE_KINDS[dtype] if mixes else self._weights.kind(name, dtype)


_BLOCK = re.compile(r"rwkv\.blocks\.(\d+)\.(.+)")
_TOP = {
    "rwkv.embeddings.weight": "model.embeddings.weight",
    "rwkv.ln_out.weight": "model.norm.weight",
    "rwkv.ln_out.bias": "model.norm.bias",
    "head.weight": "lm_head.weight",
}
_PARTS = {
    **{
        f"{theirs}.{kind}": f"{ours}.{kind}"
        for theirs, ours in {
            "pre_ln": "pre_norm",
            "ln1": "attn_norm",
            "ln2": "ffn_norm",
            "attention.ln_x": "attn.g_norm",
        }.items()
        for kind in ("weight", "bias")
    },
    "attention.time_maa_x": "attn.x_proj.0.mu",
    **{f"attention.time_maa_{part}": f"attn.x_{part}.bias" for part in "wkvrg"},
    "attention.time_maa_w1": "attn.x_proj.0.linear.weight",
    "attention.time_maa_w2": "attn.x_proj.2.weight",
    "attention.time_decay": "attn.w_proj.linear.lora.2.bias",
    "attention.time_decay_w1": "attn.w_proj.linear.lora.0.weight",
    "attention.time_decay_w2": "attn.w_proj.linear.lora.2.weight",
    "attention.time_faaaa": "attn.bonus",
    "attention.receptance.weight": "attn.r_proj.linear.weight",
    "attention.key.weight": "attn.k_proj.linear.weight",
    "attention.value.weight": "attn.v_proj.linear.weight",
    "attention.gate.weight": "attn.g_proj.linear.weight",
    "attention.output.weight": "attn.o_proj.weight",
    "feed_forward.time_maa_k": "ffn.key.mu",
    "feed_forward.time_maa_r": "ffn.receptance.mu",
    "feed_forward.key.weight": "ffn.key.linear.weight",
    "feed_forward.value.weight": "ffn.value.weight",
    "feed_forward.receptance.weight": "ffn.receptance.linear.weight",
}
_TRANSPOSED = ("time_maa_w1", "time_maa_w2", "time_decay_w1", "time_decay_w2")


class FinchWeights:
    """The `Weights` of a directory of RWKV's own, as its Program reads them."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._stored = {_name(name): name for name in weights.names()}

    def names(self) -> set[str]:
        """Return the name of each tensor, as a Program calls it."""
        return set(self._stored)

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; small matrices are transposed, rows of factors are vectors."""
        stored_name = self._stored.get(name, name)
        tensor = self._weights.get(stored_name)
        if stored_name.endswith(_TRANSPOSED) and len(tensor.shape) > 1:
            return transposed(tensor)
        rows = math.prod(tensor.shape[:-1]) == 1
        return replace(tensor, name=name, shape=tensor.shape[-1:] if rows else tensor.shape)

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of the tensor."""
        return self._weights.kind(self._stored.get(name, name), dtype)


def _name(stored: str) -> str:
    """Return the name that a Program has for a tensor of a file; others keep their names."""
    match = _BLOCK.fullmatch(stored)
    if match is None:
        return _TOP.get(stored, stored)
    part = _PARTS.get(match[2])
    return stored if part is None else f"model.layers.{match[1]}.{part}"
