"""The rotation of matrices in a config, which only GGUF files have (loader/gguf/rotation.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_int, read_object, refuse
from cpuserve.program.rotation import Rotation

KEY = "gguf_rotation"  # no key of any config.json


def read_rotation(config: Mapping[str, Any]) -> Rotation | None:
    """Return the rotated matrices of a model; None if its config has no `KEY`.

    Matrices in "grouped" read value heads of gated delta nets, whose sizes are in the config.
    """
    found = read_object(config, KEY)
    if not found:
        return None
    block = read_int(found, "block", low=16)
    if block & (block - 1):
        refuse("block", block, "a power of two")
    width, heads = 1, 1
    try:
        names = [frozenset(map(str, found[key])) for key in ("matrices", "tables", "grouped")]
        signs = {int(columns): bytes.fromhex(bits) for columns, bits in found["signs"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        refuse(KEY, found, "as the reader of GGUF files writes it")
    if names[2]:
        width = read_int(config, "linear_value_head_dim", 128)
        heads = read_int(config, "linear_num_key_heads", 16)
    return Rotation(block, names[0], names[1], signs, names[2], width, heads)
