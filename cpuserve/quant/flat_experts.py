"""The experts of checkpoints that have all experts of a layer in flat matrices.

Published files of DBRX and of nomic-bert have the matrices [experts * features, width] of a layer,
such as "ffn.experts.mlp.w1". The down projections are transposed there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cpuserve.quant.parts import part_of, transposed

if TYPE_CHECKING:
    from cpuserve.program.weight_kinds import WeightKind
    from cpuserve.quant.base import QuantTensor, Weights

DOWN = "down_proj"
_FLAT = re.compile(r"(?P<at>.+\.experts)\.mlp\.(?P<flat>\w+)\.weight")
_EXPERT = re.compile(r"(?P<at>.+\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight")


class FlatExperts:
    """`Weights` with a tensor for each expert's matrix, called as in other families.

    A checkpoint that already has these tensors is read as it is.
    """

    def __init__(self, weights: Weights, experts: int, parts: Mapping[str, str]) -> None:
        """Wrap the weights of a checkpoint.

        experts: the number of experts in a layer.
        parts: the part of an expert in each flat matrix, such as {"w1": "up_proj"}.
        """
        self._weights = weights
        self._count = experts
        self._names: set[str] = set()
        self._flat: dict[str, str] = {}  # the flat matrix of each expert's matrix
        for name in weights.names():
            match = _FLAT.fullmatch(name)
            if match is None or match["flat"] not in parts:
                self._names.add(name)
                continue
            part = parts[match["flat"]]
            of_experts = [f"{match['at']}.{e}.{part}.weight" for e in range(experts)]
            self._flat |= dict.fromkeys(of_experts, name)
        self._names |= self._flat.keys()

    def names(self) -> set[str]:
        """Return the name of each tensor, with each expert's matrices as separate tensors."""
        return self._names

    def get(self, name: str) -> QuantTensor:
        """Return the tensor; matrices of experts are views of the file, or are built when read.

        A flat matrix without an equal number of rows for each expert is returned as it is.
        """
        stored = self._flat.get(name)
        match = _EXPERT.fullmatch(name)
        if stored is None or match is None:
            return self._weights.get(name)
        whole = self._weights.get(stored)
        if len(whole.shape) != 2 or whole.shape[0] % self._count:
            return whole
        each, number = whole.shape[0] // self._count, int(match["number"])
        rows = slice(number * each, (number + 1) * each)
        part = part_of(name, whole, rows, vector=False)
        return transposed(part) if match["part"] == DOWN else part

    def kind(self, name: str, dtype: str) -> WeightKind:
        """Return the weight kind of a matrix; an expert has the kind of its flat matrix."""
        return self._weights.kind(self._flat.get(name, name), dtype)
