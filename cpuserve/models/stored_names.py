"""How files call, divide and hold the tensors of a family, where its Program differs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cpuserve.models.spec import ModelSpec

# The parts of a tensor, each with its share of the rows.
Shares = Mapping[str, int]


def _uncut(_spec: ModelSpec) -> Mapping[str, Shares]:
    return {}


@dataclass(frozen=True, slots=True)
class StoredNames:
    """The tensors of files that a Program calls or divides in another way.

    A file calls tensors as its authors did, or as the modules of transformers do
    (`save_original_format=False`, and tools that write models again). A Program has one of these
    forms, and this table has the other. A tensor is given by the end of its name, without
    ".weight" and ".bias".

    published: regular expressions for names as files have them, each with its replacement, where
      files of the family have names that none of our readers expects (loader/names.py).
    renamed: the same, for names with the prefixes of transformers; they apply after the others.
    joined: tensors that the Program reads as one; their rows follow each other.
    cut: a function that returns the tensors that the Program reads as several, each with its parts;
      in a stack of matrices, the rows of each matrix are divided.
    turned: matrices that the Program reads transposed, each with the tensor of the Program.
    unread: regular expressions for whole names, as a Program would have them, of tensors that files
      of the family have and no Program reads; loader/names.py has those of many families.
    offset_norms: whether files of MLX have norms with 1 added to their weights, which the Program
      adds again.
    """

    renamed: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    cut: Callable[[ModelSpec], Mapping[str, Shares]] = _uncut
    turned: Mapping[str, str] = field(default_factory=dict)
    published: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    offset_norms: bool = False

    def normalize(self, name: str) -> str:
        """Return the name of a tensor of a file as files of other families would have it."""
        return _replaced(name, self.published)

    def translate(self, name: str) -> str:
        """Return the name that a Program has for the tensor `name` of a file."""
        return _replaced(name, self.renamed)

    def leaves(self, name: str) -> bool:
        """Return whether no Program of the family reads the tensor that it would call `name`."""
        return any(re.fullmatch(pattern, name) for pattern in self.unread)


def _replaced(name: str, replacements: Mapping[str, str]) -> str:
    for pattern, replacement in replacements.items():
        name = re.sub(pattern, replacement, name)
    return name


AS_PROGRAM = StoredNames()


@dataclass(frozen=True, slots=True)
class BuiltTensors:
    """Tensors of a Program that are built from others when a model is loaded.

    weights: the class of cpuserve.quant that builds them, as "module:attribute".
    arguments: its arguments after the weights of the files.
    gguf: whether the tensors of GGUF files need it as well.
    parts: whether the Program reads parts of the built tensors.
    """

    weights: str
    arguments: tuple[Any, ...] = ()
    gguf: bool = False
    parts: bool = False


def experts_by_number(modules: str, block: str) -> dict[str, str]:
    """Return the renamed matrices of experts that a Program calls w1 (gate), w2 (down) and w3 (up).

    modules: the module with the experts in transformers. block: its name in the Program.
    """
    stored_pattern, program_name = re.escape(f".{modules}.experts."), f".{block}.experts."
    parts = {"gate_proj": "w1", "up_proj": "w3", "gate_up_proj": "w13", "down_proj": "w2"}
    return {
        rf"{stored_pattern}(\d+\.|){part}\b": rf"{program_name}\1{w}" for part, w in parts.items()
    }
