"""Hunyuan 4 for transformers, whose RoPE rotates halves where vLLM and llama.cpp rotate pairs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny import copy_of


def with_halves(source: Path) -> Path:
    """A copy of a checkpoint whose rotated rows have the first dims of all pairs first."""
    path = copy_of(source, "halves-")
    config = json.loads((path / "config.json").read_text())
    heads, rotary = config["num_attention_heads"], config["qk_rope_head_dim"]
    parts = {  # the number of heads in a tensor
        **{f".{name}.weight": 1 for name in ("self_attn.kv_a_proj_with_mqa", "indexer.wk")},
        ".self_attn.kv_a_proj_with_mqa.bias": 1,
        ".self_attn.q_b_proj.weight": heads,
        **{f".indexer.k_norm.{kind}": 1 for kind in ("weight", "bias")},
        ".indexer.wq_b.weight": config["index_n_heads"],
    }
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if count := next((n for end, n in parts.items() if name.endswith(end)), 0):
            by_head = tensor.reshape(count, -1, *tensor.shape[1:])
            tail = by_head[:, -rotary:]
            halves = torch.cat([by_head[:, :-rotary], tail[:, ::2], tail[:, 1::2]], dim=1)
            tensors[name] = halves.reshape(tensor.shape).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return path
