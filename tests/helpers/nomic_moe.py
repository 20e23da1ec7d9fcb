"""Tiny mixtures of nomic-bert as published, and what a plain torch model makes of a prompt."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import gelu, layer_norm, linear

from tests.helpers.tiny import copy_of, tiny_model

EXPERTS, CHOSEN, EVERY, HEADS, BASE = 4, 2, 2, 4, 10000.0
# Keys of Nomic's config, and the keys of transformers for the same values.
KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}


@functools.cache
def published() -> Path:
    """The directory of a model, with the experts of a layer in two matrices, and their bias."""
    source = tiny_model("nomic-bert-moe")
    path = copy_of(source, "nomic-moe-")
    tensors, experts = {}, {}
    for name, value in load_file(source / "model.safetensors").items():
        if ".experts." in name:
            experts[name] = value
        else:
            tensors[name] = value
    generator = torch.Generator().manual_seed(5)
    for layer in {int(name.split(".")[2]) for name in experts}:
        at = f"encoder.layers.{layer}.mlp.experts"
        for stack, part in (("w1", "up"), ("w2", "down")):
            each = [experts[f"{at}.{e}.{part}_proj.weight"] for e in range(EXPERTS)]
            rows = [m.T if part == "down" else m for m in each]
            tensors[f"{at}.mlp.{stack}"] = torch.cat(rows).contiguous()
        tensors[f"{at}.bias"] = torch.randn(64, generator=generator) * 0.3
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config = {**{k: config.pop(v) for k, v in KEYS.items()}, **config}
    del config["moe_bias"], config["rope_theta"]
    config |= {"rotary_emb_base": BASE, "layer_norm_epsilon": 1e-5, "max_trained_positions": 320}
    (path / "config.json").write_text(json.dumps(config))
    return path


def rows_of(path: Path, prompt: list[int]) -> torch.Tensor:
    """The last hidden state [tokens, width] of a published model, computed in fp64."""
    t = {k: v.double() for k, v in load_file(path / "model.safetensors").items()}
    x = t["embeddings.word_embeddings.weight"][prompt]
    x = _norm(t, "emb_ln", x + t["embeddings.token_type_embeddings.weight"][0])
    for layer in range(4):
        at = f"encoder.layers.{layer}"
        x = _norm(t, f"{at}.norm1", x + _attention(t, f"{at}.attn", x))
        mlp = _experts if layer % EVERY == 1 else _mlp
        x = _norm(t, f"{at}.norm2", x + mlp(t, f"{at}.mlp", x))
    return x


def _norm(t, name, x):
    return layer_norm(x, x.shape[-1:], t[f"{name}.weight"], t[f"{name}.bias"], 1e-5)


def _linear(t, name, x):
    return linear(x, t[f"{name}.weight"], t.get(f"{name}.bias"))


def _attention(t, at, x):
    q, k, v = _linear(t, f"{at}.Wqkv", x).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
    half = q.shape[-1] // 2
    angles = torch.outer(torch.arange(len(x)), BASE ** (-torch.arange(half) / half)).double()
    cos, sin = angles.cos(), angles.sin()

    def turned(y):
        a, b = y[..., :half], y[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    scores = turned(q) @ turned(k).mT / q.shape[-1] ** 0.5
    mixed = (scores.softmax(dim=-1) @ v).transpose(0, 1).reshape(len(x), -1)
    return _linear(t, f"{at}.out_proj", mixed)


def _mlp(t, at, x):
    return _linear(t, f"{at}.fc2", gelu(_linear(t, f"{at}.fc1", x)))


def _experts(t, at, x):
    weights = _linear(t, f"{at}.router.layer", x).softmax(dim=-1)
    w1, w2 = (t[f"{at}.experts.mlp.{w}"].chunk(EXPERTS) for w in ("w1", "w2"))
    kept = weights >= weights.topk(CHOSEN, dim=-1).values[:, -1:]
    total = t[f"{at}.experts.bias"].expand(x.shape)
    for e in range(EXPERTS):
        total = total + (weights * kept)[:, e, None] * (gelu(x @ w1[e].T) @ w2[e])
    return total
