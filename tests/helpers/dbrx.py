"""DBRX as it is published, and as transformers has it: the experts of a layer in flat matrices."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.helpers.copies import copy_without_tensors

FLAT = {"gate_proj": "w1", "up_proj": "v1", "down_proj": "w2"}


@functools.cache
def flat(path: Path) -> Path:
    """Return a copy of the checkpoint `path` with flat matrices of experts."""
    to = copy_without_tensors(path)
    tensors = load_file(path / "model.safetensors")
    for name in [n for n in tensors if ".experts.0." in n]:
        at, part = name.removesuffix(".weight").split(".experts.0.")
        found, count = [], 0
        while (each := f"{at}.experts.{count}.{part}.weight") in tensors:
            value = tensors.pop(each)
            found.append(np.ascontiguousarray(value.T) if part == "down_proj" else value)
            count += 1
        tensors[f"{at}.experts.mlp.{FLAT[part]}"] = np.concatenate(found)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to
