"""Molmo 2 as transformers has it: the part for text, in no class of its own, with other names."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.helpers.copies import copy_without_tensors
from tests.helpers.text_class import text_class

# From the names of published files, as in transformers' conversion_mapping.py.
NAMES = {
    "model.transformer.wte.embedding": "model.embed_tokens.weight",
    "model.transformer.wte.weight": "model.embed_tokens.weight",
    "model.transformer.ln_f.": "model.norm.",
    "model.transformer.blocks.": "model.layers.",
    ".attn_norm.": ".input_layernorm.",
    ".ff_norm.": ".post_attention_layernorm.",
    ".attn_out.": ".o_proj.",
    ".ff_out.": ".down_proj.",
}


@functools.cache
def text_model():
    """A class of transformers with the part for text and the output head."""
    from transformers.models.molmo2 import modeling_molmo2 as theirs

    return text_class(theirs, "Molmo2", "Molmo2ForCausalLM")


@functools.cache
def renamed(path: Path) -> Path:
    """Return a copy of the checkpoint `path` with the tensors of that class."""
    to = copy_without_tensors(path)
    config = json.loads((path / "config.json").read_text())
    kv = config["num_key_value_heads"] * config["head_dim"]
    out = {}
    for name, value in load_file(path / "model.safetensors").items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        if ".att_proj." in name:
            q = len(value) - 2 * kv
            for part, rows in zip("qkv", np.split(value, [q, q + kv]), strict=True):
                out[name.replace(".att_proj.", f".{part}_proj.")] = np.ascontiguousarray(rows)
        elif ".ff_proj." in name:
            for part, rows in zip(("up", "gate"), np.split(value, 2), strict=True):
                out[name.replace(".ff_proj.", f".{part}_proj.")] = np.ascontiguousarray(rows)
        else:
            out[name] = value
    save_file(out, to / "model.safetensors", {"format": "pt"})
    return to
