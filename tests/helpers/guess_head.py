"""Tiny models with a head for multi-token prediction (MTP)."""

from __future__ import annotations

import shutil
from pathlib import Path

from cpuserve.loader.load import read_config
from cpuserve.loader.speculation.guess_heads import guess_head
from cpuserve.models import spec_from_config
from cpuserve.program.operations.dense import Embed
from cpuserve.program.parts import stored_needs
from tests.helpers.tiny import tiny_model

FAMILIES = (
    *("deepseek-v3", "deepseek-v3.2", "deepseek-v4", "glm-moe-dsa"),
    *("glm4-moe", "glm4-moe-lite", "qwen3-next", "qwen3.5", "qwen3.5-moe", "mimo-v2"),
    *("ernie4.5-moe", "longcat", "qwen2"),  # MiMo 7B is a Qwen2
    *("exaone-moe", "hy-v3", "ling2", "bailing-hybrid", "nemotron-h-moe", "step3.5"),
)


def head_of(path):
    """The head of the checkpoint at `path`."""
    return guess_head(spec_from_config(read_config(path)))


def with_head(directory: Path, family: str, *, seed: int = 1, change=None, **options) -> Path:
    """A tiny model in `directory`, with a random head.

    change: a function that gets all tensors by name, and the head; it may change the tensors.
    """
    shutil.copytree(tiny_model(family, **options), directory)
    return add_head(directory, offset=is_offset(family), seed=seed, change=change)


def add_head(directory: Path, *, offset: bool = False, seed: int = 1, change=None) -> Path:
    """Add a random head to the model in `directory`; offset: norms are offsets from 1."""
    import torch
    from safetensors.torch import load_file, save_file

    file, head = directory / "model.safetensors", head_of(directory)
    tensors, numbers = load_file(file), torch.Generator().manual_seed(seed)
    embedding = tensors[table_of(head, tensors)]
    for need in stored_needs(head.program.weights):
        if head.stored(need.name) == need.name:  # model and head have it in common
            continue
        noise = torch.randn(need.shape, generator=numbers)
        if len(need.shape) == 1:  # a norm, or the bias of a router
            noise = 0.1 * noise + (0.0 if "bias" in need.name or offset else 1.0)
        else:
            noise *= need.shape[-1] ** -0.5
        tensors[head.stored(need.name)] = noise.to(embedding.dtype)
    if change is not None:
        change(tensors, head)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def table_of(head, tensors) -> str:
    """The name of the embedding of the model of a head, in a checkpoint of `tensors`."""
    own = next(op.weight for op in head.program.ops if isinstance(op, Embed))
    names = own, own.replace("model.", "model.language_model.", 1), head.stored(own)
    return next(name for name in names if name in tensors)


def own_matrices(tensors, head):
    """Give a head an embedding and an output matrix of its own."""
    import torch

    begin = head.stored("guess.fc.weight").removesuffix("eh_proj.weight")
    numbers, table = torch.Generator().manual_seed(9), tensors["model.embed_tokens.weight"]
    for name in ("embed_tokens", "shared_head.head"):
        noise = torch.randn(table.shape, generator=numbers) * table.shape[-1] ** -0.5
        tensors[f"{begin}{name}.weight"] = noise.to(table.dtype)


def is_offset(family):
    """Whether norms are stored as offsets from 1."""
    return family.startswith(("qwen3", "step3.5"))
