"""Tiny random assistants of Gemma 4, as transformers writes them."""

from __future__ import annotations

import json
from pathlib import Path


def assistant(directory: Path, model: Path, *, seed: int = 4, change=None, **changed) -> Path:
    """An assistant in `directory` for the Gemma 4 at `model`; its layers are half as wide.

    change: a function that gets all tensors by name, and may change them.
    changed: keys of its config.json; those of `text` replace keys of its text_config.
    """
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    target = json.loads((model / "config.json").read_text())
    own = changed.pop("text", {})
    kept = ("vocab_size", "num_key_value_heads", "head_dim", "global_head_dim", "sliding_window")
    kept += ("attention_k_eq_v", "num_global_key_value_heads", "max_position_embeddings")
    text = {
        **{key: target[key] for key in kept if key in target},
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 3,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        **{key: target[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **own,
    }
    kind = target["architectures"][0].removesuffix("ForCausalLM")
    config = getattr(transformers, f"{kind}AssistantConfig")(
        text_config=getattr(transformers, f"{kind}TextConfig")(**text),
        **{"backbone_hidden_size": target["hidden_size"], **changed},
    )
    made = getattr(transformers, f"{kind}AssistantForCausalLM")(config)
    transformers.utils.logging.disable_progress_bar()
    made.save_pretrained(directory)
    file, numbers = directory / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(file)
    for name, tensor in sorted(tensors.items()):
        if not tensor.is_floating_point():
            continue
        noise = torch.randn(tensor.shape, generator=numbers)
        vector = len(tensor.shape) < 2
        tensors[name] = 1 + 0.1 * noise if vector else noise * tensor.shape[-1] ** -0.5
    if change is not None:
        change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return directory
