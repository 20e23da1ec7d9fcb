"""Reads the extra heads of BGE-M3, which compute a weight and a vector for each token.

BGE-M3 publishes them as pickles, which are never read. Their tensors are read from the model's
safetensors files ("sparse_linear.weight"), or from separate safetensors files
("sparse_linear.safetensors" with "weight"), which a user can make from the pickles.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cpuserve.base.errors import ModelError
from cpuserve.loader.safetensors import TOKEN_HEADS, SafetensorsStore
from cpuserve.models.bert import COLBERT, SPARSE

if TYPE_CHECKING:
    from cpuserve.loader.dense_module import Dense, Float32

ARCHITECTURE = "XLMRobertaModel"  # no other models have these heads
# The linear of each head by the head's name, and the activation after it.
LINEARS = {"weights": (SPARSE, "relu"), "multi": (COLBERT, "none")}


def has_token_heads(path: Path, names: set[str]) -> bool:
    """Whether the model in a directory has such a head; names: the model's own tensors."""
    found = {f"{linear}.weight" for linear, _ in LINEARS.values()} & names
    return bool(found) or any((path / name).exists() for name in TOKEN_HEADS)


def token_heads(path: Path, width: int) -> dict[str, Dense]:
    """Return the heads of the model in a directory, by their name in LINEARS; {} if it has none.

    width: the length of a token's vector.

    Raises:
        ModelError: a tensor is missing, or has another shape.
    """
    from cpuserve.loader.dense_module import Dense

    found = {}
    for name, (linear, activation) in LINEARS.items():
        if tensors := _tensors(path, linear):
            _check(f"{path}: the head {linear}", tensors, width, 1 if name == "weights" else None)
            found[name] = Dense(tensors["weight"], tensors["bias"], activation)
    return found


def _check(head: str, tensors: dict[str, Float32], width: int, outputs: int | None) -> None:
    """Raise a ModelError unless the linear has `width` inputs and `outputs` outputs."""
    shapes = {part: list(tensor.shape) for part, tensor in tensors.items()}
    if outputs is None:
        outputs = shapes.get("weight", [0])[0]
    wanted = {"weight": [outputs, width], "bias": [outputs]}
    if shapes != wanted:
        msg = f"{head} has tensors of the shapes {shapes}, but the model needs {wanted}"
        raise ModelError(msg)


def _tensors(path: Path, linear: str) -> dict[str, Float32]:
    """Return the weight and the bias of a linear; {} if the model does not have this linear."""
    if not path.is_dir():
        return {}
    from cpuserve.quant import open_weights
    from cpuserve.quant.dense import dequantize

    own = f"{linear}.safetensors"
    is_apart = (path / own).exists() or (path / own).is_symlink()
    tensors = open_weights("dense", SafetensorsStore(path, own if is_apart else ""), {})
    before = "" if "weight" in tensors.names() else f"{linear}."
    return {
        name.removeprefix(before): dequantize(tensors.get(name))
        for name in sorted(tensors.names())
        if name.startswith(before) and (before or is_apart)
    }
