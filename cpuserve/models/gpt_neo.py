"""GPT-Neo: learned positions, unscaled scores, and a window in every second layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_ids,
    read_int,
    read_kinds,
    refuse,
)
from cpuserve.models.opt import ACTIVATIONS
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId


class GptNeo:
    """GPT-Neo 125M to 2.7B. Source: transformers modeling_gpt_neo."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a GPT-Neo config."""
        vocab = read_int(config, "vocab_size")
        width = read_int(config, "hidden_size", high=1 << 20)
        heads = read_int(config, "num_heads", high=65536)
        if width % heads:
            refuse("hidden_size", width, f"a multiple of num_heads ({heads})")
        layers = read_int(config, "num_layers", high=4096)
        return ModelSpec(
            vocab=vocab,
            width=width,
            layers=layers,
            q_heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            intermediate=read_int(config, "intermediate_size", 4 * width, high=1 << 24),
            max_position=read_int(config, "max_position_embeddings", 2048),
            norm_eps=read_float(config, "layer_norm_epsilon", 1e-5),
            tied=read_bool(config, "tie_word_embeddings", True),
            dtype=read_dtype(config),
            out_bias=True,
            mlp_bias=True,
            activation=read_choice(config, "activation_function", "gelu_new", ACTIVATIONS),
            attention_scale=1.0,
            bos_ids=read_ids(config, "bos_token_id", vocab),
            eos_ids=read_ids(config, "eos_token_id", vocab),
            parts={"windows": _windows(config, layers)},
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("transformer.wte")
        b.position_embed(x, "transformer.wpe", rows=s.max_position)
        for i in range(s.layers):
            at = f"transformer.h.{i}"
            _attention(b, s, i, b.layer_norm(x, f"{at}.ln_1"), x)
            h, then = b.layer_norm(x, f"{at}.ln_2"), cast("Then", s.activation)
            g = b.linear(h, f"{at}.mlp.c_fc", features=s.intermediate, bias=True, then=then)
            b.linear(g, f"{at}.mlp.c_proj", bias=True, add_to=x, use="down")
        h = b.layer_norm(x, "transformer.ln_f")
        b.logits(h, "lm_head", tied_to="transformer.wte" if s.tied else None)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the window of each layer from attention_types, a list of [kinds, repetitions].

    attention_layers, a list of the kind of each layer, goes before.
    """
    window = read_int(config, "window_size", 256)
    if config.get("attention_layers") is not None:
        counted = {**config, "num_hidden_layers": layers}
        kinds = read_kinds(counted, "attention_layers", ("global", "local"), lambda _: "global")
        return tuple(window if kind == "local" else 0 for kind in kinds)
    types = config.get("attention_types")
    if types is None:
        types = [[["global", "local"], layers // 2]]
    try:
        expanded = [kind for names, count in types for _ in range(count) for kind in names]
    except (TypeError, ValueError):
        expanded = []
    if len(expanded) != layers or {*expanded} - {"global", "local"}:
        refuse("attention_types", types, f"lists of global and local for {layers} layers")
    return tuple(window if kind == "local" else 0 for kind in expanded)


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x."""
    at = f"transformer.h.{layer}.attn.attention"
    parts = {f"{at}.{part}_proj": s.width for part in "qkv"}
    qkv = b.linear(h, list(parts), features=list(parts.values()), use="qkv")
    b.rope_store_kv(qkv, layer=layer, rope=None)
    window = s.parts["windows"][layer]
    a = b.attention(qkv, layer=layer, window=window, scale=s.attention_scale)
    b.linear(a, f"{at}.out_proj", bias=True, add_to=x)
