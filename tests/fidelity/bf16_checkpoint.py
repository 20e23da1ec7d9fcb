"""The default model's weights rounded to bfloat16, as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from cpuserve.loader.load import open_checkpoint
from cpuserve.quant import dequantize


def write_bf16(gguf: Path, directory: Path) -> Path:
    """Dequantize every tensor of `gguf`, round it to bfloat16, and save; returns `directory`."""
    checkpoint = open_checkpoint(gguf)
    tensors = {}
    for name in sorted(checkpoint.weights.names()):
        tensor = checkpoint.weights.get(name)
        tensors[name] = torch.from_numpy(dequantize(tensor)).reshape(tensor.shape).bfloat16()
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {**checkpoint.config, "torch_dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory
