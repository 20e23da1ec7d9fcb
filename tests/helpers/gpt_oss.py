"""Writes tiny gpt-oss checkpoints as they are published: one tensor holds all experts.

`tiny_model("gpt-oss")` has a tensor for each expert's matrix instead, as other mixtures have.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.helpers.copies import copy_without_tensors

PARTS = ("gate", "up", "down")


@functools.cache
def published(path: Path, *, packed: bool = False, bias: float = 1.0) -> Path:
    """Return a copy of the checkpoint `path` in the published layout.

    packed: the experts are stored as MXFP4.
    bias: a factor of the experts' biases; a large one makes gates and ups exceed their limits.
    """
    to = copy_without_tensors(path)
    config = json.loads((path / "config.json").read_text())
    if packed:
        kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
        quantization = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
        config["quantization_config"] = quantization
        (to / "config.json").write_text(json.dumps(config))
    tensors = load_file(path / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        _stack(tensors, f"model.layers.{layer}.mlp.experts", config, packed, np.float32(bias))
    tensors = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    return to


def _stack(tensors, at, config, packed, bias):
    experts = range(config["num_local_experts"])

    def take(kind):
        return {
            p: np.stack([tensors.pop(f"{at}.{e}.{p}_proj.{kind}") for e in experts]) for p in PARTS
        }

    weights, biases = take("weight"), take("bias")
    for stacks in (weights, biases):  # the rows of gate and up alternate
        both = np.stack([stacks.pop("gate"), stacks.pop("up")], axis=2)
        stacks["gate_up"] = both.reshape(both.shape[0], -1, *both.shape[3:])
    for part, value in weights.items():
        tensors[f"{at}.{part}_proj_bias"] = biases[part] * bias
        if not packed:
            tensors[f"{at}.{part}_proj"] = value.swapaxes(1, 2)
            continue
        blocks, scales = mxfp4(value)
        tensors[f"{at}.{part}_proj_blocks"] = blocks
        tensors[f"{at}.{part}_proj_scales"] = scales


def mxfp4(values):
    """Blocks [..., k / 32, 16] and scales [..., k / 32] of fp32 values [..., k].

    The gguf package rounds them; its blocks have another order of nibbles.
    """
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.MXFP4)
    blocks = blocks.reshape(*values.shape[:-1], -1, 17)
    codes = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    return codes[..., ::2] | codes[..., 1::2] << 4, blocks[..., 0]
