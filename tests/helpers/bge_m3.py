"""A tiny BGE-M3 with random heads, and its results with transformers and torch."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from tests.helpers.encoders import rows_of
from tests.helpers.tiny import tiny_model

WIDTH, MULTI = 64, 24
ENDS = ("<|im_start|>", "<|im_end|>")  # the special tokens around a text
LINEARS = {"sparse_linear": 1, "colbert_linear": MULTI}


@functools.cache
def heads() -> dict[str, dict[str, torch.Tensor]]:
    """The weight and the bias of each head."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: {
            "weight": torch.randn(size, WIDTH, generator=generator) / WIDTH**0.5,
            "bias": torch.randn(size, generator=generator) / 4,
        }
        for name, size in LINEARS.items()
    }


@functools.cache
def bge_m3(*, apart: bool = True) -> Path:
    """The directory of the model. apart: the heads have files of their own."""
    source = tiny_model("xlm-roberta")
    directory = source.with_name(f"{source.name}-bge-m3-{apart}")
    shutil.copytree(source, directory, dirs_exist_ok=True)
    path = str(directory / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    around = [(token, tokenizer.token_to_id(token)) for token in ENDS]
    tokenizer.post_processor = TemplateProcessing(
        single=f"{ENDS[0]} $A {ENDS[1]}", special_tokens=around
    )
    tokenizer.save(path)
    if apart:
        for name, tensors in heads().items():
            save_file(tensors, directory / f"{name}.safetensors")
        return directory
    named = {f"{name}.{part}": t for name, own in heads().items() for part, t in own.items()}
    (file,) = directory.glob("*.safetensors")
    save_file({**load_file(file), **named}, file, metadata={"format": "pt"})
    return directory


def expected(prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The embedding [WIDTH], the weight of each token, and the vector of each token [n, MULTI]."""
    rows = rows_of(tiny_model("xlm-roberta"), prompt).double()
    sparse, colbert = (
        rows @ own["weight"].double().T + own["bias"].double() for own in heads().values()
    )
    unit = torch.nn.functional.normalize
    return unit(rows[0], dim=0), torch.relu(sparse[:, 0]), unit(colbert, dim=1)
