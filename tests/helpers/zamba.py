"""Zamba's checkpoints with the names of published files, as transformers reads them."""

from __future__ import annotations

import functools
import re
from pathlib import Path

from safetensors.numpy import load_file, save_file

from tests.helpers.copies import copy_without_tensors


@functools.cache
def published(path: Path) -> Path:
    """Return a copy of the checkpoint `path`; the matrices of Mamba's heads have no suffix."""
    to = copy_without_tensors(path)
    tensors = load_file(path / "model.safetensors")
    named = {
        re.sub(r"\.(x|dt)_proj\.(\w+)$", r".\1_proj_\2", name): tensors[name] for name in tensors
    }
    save_file(named, to / "model.safetensors", {"format": "pt"})
    return to
