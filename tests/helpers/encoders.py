"""Results of transformers for tiny encoders: the rows of a prompt, and the pooled embedding."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from tests.helpers.tiny import tiny_model

# 300 tokens are more than a chunk of keys, and than the windows of tiny models.
LENGTHS = (1, 2, 5, 31, 32, 33, 64, 100, 257, 300)
PROMPTS = [
    [(7 * i * (i + n) + 31 * n) % 500 + 5 for i in range(size)] for n, size in enumerate(LENGTHS)
]


@functools.cache
def encoder_of(path: Path):
    """The transformers model of a directory, fp32, eager attention."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    kind = json.loads((path / "config.json").read_text())["architectures"][0]
    model, info = getattr(transformers, kind).from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        **without_pooler(kind),
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model.eval()


def without_pooler(kind: str) -> dict[str, bool]:
    """The arguments with which a class of transformers has no pooler, which no test needs."""
    plain = ("ModernBert", "Gemma", "EuroBert", "Distil", "Deberta", "T5", "UMT5")
    return {} if kind.startswith(plain) else {"add_pooling_layer": False}


def rows_of(path: Path, prompt: list[int]) -> torch.Tensor:
    """The last hidden state [tokens, width] of transformers; do not change it."""
    return _rows_of(path, tuple(prompt))


@functools.lru_cache(maxsize=64)
def _rows_of(path: Path, prompt: tuple[int, ...]) -> torch.Tensor:
    with torch.inference_mode():
        return encoder_of(path)(torch.tensor([prompt])).last_hidden_state[0]


def pooled(rows: torch.Tensor, pooling: str) -> np.ndarray:
    """The embedding, of length 1, of these rows."""
    row = {"last": rows[-1], "first": rows[0], "mean": rows.mean(dim=0)}[pooling].double()
    return (row / row.norm()).numpy()


# Two Dense modules, (outputs, bias, activation) of each, as EmbeddingGemma and LaBSE have them.
DENSE = (
    (96, False, "torch.nn.modules.linear.Identity"),
    (48, True, "torch.nn.modules.activation.Tanh"),
)


@functools.cache
def with_modules(family: str, mode: str = "mean_tokens") -> tuple[Path, tuple]:
    """A directory with sentence-transformers' files; (weight, bias) of its Dense modules."""
    source = tiny_model(family)
    directory = source.with_name(f"{source.name}-modules-{mode}")
    shutil.copytree(source, directory)
    names = ["Transformer", "Pooling", *["Dense"] * len(DENSE), "Normalize"]
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names) if i)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    inputs, layers = 64, []
    generator = torch.Generator().manual_seed(0)
    for i, (outputs, bias, activation) in enumerate(DENSE, 2):
        folder = directory / f"{i}_Dense"
        folder.mkdir()
        config = {"in_features": inputs, "out_features": outputs, "bias": bias}
        (folder / "config.json").write_text(
            json.dumps({**config, "activation_function": activation})
        )
        weight = torch.randn(outputs, inputs, generator=generator) / inputs**0.5
        tensors = {"linear.weight": weight}
        if bias:
            tensors["linear.bias"] = torch.randn(outputs, generator=generator)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        layers.append((weight, tensors.get("linear.bias")))
        inputs = outputs
    return directory, tuple(layers)


def projected(row: np.ndarray, layers: tuple) -> np.ndarray:
    """Return the output of these Dense modules for the input `row`, scaled to length 1."""
    (first, _), (second, bias) = layers
    out = torch.tanh(second.double() @ (first.double() @ torch.from_numpy(row)) + bias)
    return (out / out.norm()).numpy()
