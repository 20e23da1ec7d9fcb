"""Writes tiny checkpoints of Gemma 4 and Mistral 4 as published: one tensor for all experts."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.helpers.copies import copy_without_tensors


@functools.cache
def stacked(path: Path, *, by_inputs: bool = False, unused: int = 0) -> Path:
    """Return a copy of the checkpoint `path` with one tensor for all experts of a layer.

    The original has a tensor for each expert's matrix.

    by_inputs: whether a matrix has a row for each input, as in published files of Llama 4.
    unused: how many further matrices gates and ups have, which transformers has for LongCat's
      experts without matrices.
    """
    to = copy_without_tensors(path)
    tensors = stack_experts(load_file(path / "model.safetensors"))
    for name, value in tensors.items():
        if unused and name.endswith("experts.gate_up_proj"):
            tensors[name] = np.pad(value, ((0, unused), (0, 0), (0, 0)))
    if by_inputs:
        tensors = {
            name: np.ascontiguousarray(value.transpose(0, 2, 1)) if value.ndim == 3 else value
            for name, value in tensors.items()
        }
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def stack_experts(tensors):
    """Return `tensors` with experts.gate_up_proj and experts.down_proj for all experts together."""
    out, experts = {}, {}
    for name, value in tensors.items():
        at, found, rest = name.partition(".experts.")
        if found:
            number, part, _ = rest.split(".")
            experts.setdefault(at, {})[part, int(number)] = value
        else:
            out[name] = value
    for at, own in experts.items():
        gate, up, down = (
            np.stack([own[f"{part}_proj", e] for e in range(len(own) // 3)])
            for part in ("gate", "up", "down")
        )
        out[f"{at}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        out[f"{at}.experts.down_proj"] = down
    return out
