"""The text part of MiniMax M3 as transformers has it: other names, and tensors for all experts."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.helpers.copies import copy_without_tensors
from tests.helpers.gemma4 import stack_experts

# From the names of published files, as in transformers' conversion_mapping.py.
NAMES = {
    ".block_sparse_moe.e_score": ".mlp.gate.e_score",
    ".block_sparse_moe.": ".mlp.",
    ".w1.": ".gate_proj.",
    ".w3.": ".up_proj.",
    ".w2.": ".down_proj.",
    ".self_attn.index_": ".self_attn.indexer.",
}


@functools.cache
def renamed(path: Path) -> Path:
    """Return a copy of the checkpoint `path` with the names of transformers' MiniMaxM3VL."""
    to = copy_without_tensors(path)
    tensors = {}
    for name, value in load_file(path / "model.safetensors").items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = value
    for name in [n for n in tensors if re.search(r"mlp\.(shared_experts\.)?gate_proj", n)]:
        both = [tensors.pop(name), tensors.pop(name.replace("gate_proj", "up_proj"))]
        tensors[name.replace("gate_proj", "gate_up_proj")] = np.concatenate(both)
    save_file(stack_experts(tensors), to / "model.safetensors", {"format": "pt"})
    return to
