"""Tiny LoRA adapters in PEFT's files, and models into which they are merged."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


@functools.cache
def adapter_of(
    model: Path, parts: tuple[str, ...] = ATTENTION + MLP, rank: int = 4, seed: int = 1
) -> Path:
    """The directory of a random adapter of these parts of every layer; its scale is 2."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in tensors_of(model).items():
        module = name.removesuffix(".weight")
        if not module.endswith(parts):
            continue
        outputs, inputs = weight.shape
        for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
            values = torch.randn(shape, generator=generator) * 0.15
            tensors[f"base_model.model.{module}.lora_{side}.weight"] = values
    directory = Path(tempfile.mkdtemp(dir=model.parent, prefix="adapter-"))
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def tensors_of(model: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    return {k: v for f in sorted(model.glob("*.safetensors")) for k, v in load_file(f).items()}


@functools.cache
def merged(model: Path, adapter: Path) -> Path:
    """A copy of the model whose weights contain the adapter."""
    directory = Path(tempfile.mkdtemp(dir=model.parent, prefix="merged-")) / "model"
    shutil.copytree(model, directory)
    changes = load_file(adapter / "adapter_model.safetensors")
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name in tensors:
            key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if f"{key}A.weight" in changes:
                tensors[name] += 2 * changes[f"{key}B.weight"] @ changes[f"{key}A.weight"]
        save_file(tensors, file, metadata={"format": "pt"})
    return directory
