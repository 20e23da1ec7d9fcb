"""EAGLE-3 heads for tiny models, in the forms of published ones."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB, KNOWN = 512, 160  # tokens of tiny models, and those that a head may guess


def known_ids(seed: int = 5) -> list[int]:
    """The tokens that a head may guess, in order."""
    from random import Random

    return sorted(Random(seed).sample(range(VOCAB), KNOWN))


def eagle_head(
    directory: Path,
    width: int,
    *,
    form: str = "plain",
    own: int | None = None,
    reads: int = 3,
    seed: int = 1,
    change=None,
    config=None,
    layers: int = 1,
    reduced: bool = True,
) -> Path:
    """A random head in `directory` for a model with `width` columns.

    form: "plain", "library" (with norms of heads, of speculators), or "norms" (EAGLE-3.1).
    own: the columns of the head. reads: how many layers of the model it reads.
    change: a function that may change the tensors. config: more keys of the config.
    reduced: whether it guesses only some tokens; otherwise it also shares the output matrix.
    """
    import torch
    from safetensors.torch import save_file

    own, numbers = own or width, torch.Generator().manual_seed(seed)
    shares = own == width
    sizes = {
        "hidden_size": own,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": own // 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "model_type": "llama",
    }
    first = "layers.0" if form == "library" else "midlayer"
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (own, reads * width), "norm.weight": (own,)}
    for i in range(layers):
        at, inputs = first if i == 0 else f"layers.{i}", own * (2 if i == 0 else 1)
        for part in "qkv":
            shapes[f"{at}.self_attn.{part}_proj.weight"] = (own, inputs)
        shapes[f"{at}.self_attn.o_proj.weight"] = (own, own)
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (96, own)
        shapes[f"{at}.mlp.down_proj.weight"] = (own, 96)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{norm}.weight"] = (own,)
        if form == "library":
            for part in "qk":
                shapes[f"{at}.self_attn.{part}_norm.weight"] = (own // 4,)
    shapes[f"{first}.hidden_norm.weight"] = (own,)
    if not shares or form == "norms":
        shapes["embed_tokens.weight"] = (VOCAB, own)
    if reduced or not shares:
        shapes["lm_head.weight"] = (KNOWN if reduced else VOCAB, own)
    if form == "norms":
        shapes |= {f"fc_norm.{i}.weight": (width,) for i in range(reads)}
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=numbers)
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5
    if reduced:
        ids = torch.tensor(known_ids())
        tensors["d2t"] = ids - torch.arange(KNOWN)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
        tensors["t2d"][ids] = True
    if change is not None:
        change(tensors, first)
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()}
    directory.mkdir(parents=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, directory / "model.safetensors")
    top: dict[str, object] = {
        "plain": {"architectures": ["LlamaForCausalLMEagle3"], **sizes},
        "norms": {
            "architectures": ["LlamaForCausalLMEagle3"],
            **sizes,
            "fc_norm": True,
            "norm_output": True,
        },
        "library": {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "draft_vocab_size": KNOWN,
            "norm_before_residual": True,
            "transformer_layer_config": {**sizes, "model_type": "qwen3"},
        },
    }[form]
    (directory / "config.json").write_text(json.dumps({**top, **(config or {})}))
    return directory
