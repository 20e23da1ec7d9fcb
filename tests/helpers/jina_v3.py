"""Tiny models of jina-embeddings v3 as published: with random adapters of tasks in their file."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny import copy_of, tiny_model

PROMPTS = {
    "retrieval.query": "Represent the query for retrieving evidence documents: ",
    "retrieval.passage": "Represent the document for retrieval: ",
    "separation": "",
    "classification": "",
    "text-matching": "",
}
TASKS = tuple(PROMPTS)
RANK, ALPHA = 4, 6


def stacks_of(model: Path) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Matrices A and B of all tasks by the name of the weight that they change.

    A linear [outputs, inputs] has A [tasks, rank, inputs] and B [tasks, outputs, rank], and a table
    [rows, width] has A [tasks, rows, rank] and B [tasks, rank, width].
    """
    generator, found = torch.Generator().manual_seed(3), {}
    for name, weight in load_file(model / "model.safetensors").items():
        if weight.ndim != 2:
            continue
        rows, columns = weight.shape
        table = name.startswith("embeddings.")
        shapes = ((rows, RANK), (RANK, columns)) if table else ((RANK, columns), (rows, RANK))
        a, b = (torch.randn(len(TASKS), *s, generator=generator) * 0.2 for s in shapes)
        found[name] = a, b
    return found


@functools.cache
def jina_v3() -> Path:
    """The directory of a model, with tensors and config as published."""
    source = tiny_model("jina-v3")
    path = copy_of(source, "jina-v3-")
    stacks, tensors = stacks_of(source), {}
    for name, value in load_file(source / "model.safetensors").items():
        stem = f"roberta.{name.removesuffix('.weight')}.parametrizations.weight"
        tensors[f"{stem}.original" if name in stacks else f"roberta.{name}"] = value
        for side, stack in zip("AB", stacks.get(name, ()), strict=False):
            tensors[f"{stem}.0.lora_{side}"] = stack
    save_file(tensors, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    del config["model_type"]
    config |= {"architectures": ["XLMRobertaModel"], "lora_adaptations": [*TASKS]}
    config |= {"lora_rank": RANK, "lora_alpha": ALPHA, "task_instructions": PROMPTS}
    config |= {"position_embedding_type": "rotary", "rotary_emb_base": 20000.0}
    (path / "config.json").write_text(json.dumps(config))
    return path


@functools.cache
def with_task(task: str) -> Path:
    """The model in the format of transformers, with the adapter of one task in its weights."""
    source = tiny_model("jina-v3")
    path, stacks = copy_of(source, "jina-v3-merged-"), stacks_of(source)
    tensors = load_file(source / "model.safetensors")
    for name, (a, b) in stacks.items():
        first, second = (a, b) if name.startswith("embeddings.") else (b, a)
        at = TASKS.index(task)
        tensors[name] += ALPHA / RANK * (first[at] @ second[at])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
