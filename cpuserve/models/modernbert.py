"""ModernBERT: an encoder with RoPE, gated MLPs, and windows in two of three layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.base import GGUF_HEAD
from cpuserve.models.bert import leave_linears, read_encoder_heads
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_int,
    read_windows,
)
from cpuserve.models.llama import layer_rope, layer_window
from cpuserve.models.opt import GATED
from cpuserve.models.rope import read_rope, split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then
from cpuserve.program.parts import rows


class ModernBert:
    """ModernBERT (gte-modernbert, modernbert-embed). Source: transformers modeling_modernbert.

    Keys of spec.extra: "windows" and "local_rope" (as in other families), and "norm_bias".
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a ModernBERT config."""
        width, heads = read_encoder_heads(config)
        theta = {
            "theta": read_float(config, "global_rope_theta", 160000.0, low=1.0),
            "local_theta": read_float(config, "local_rope_theta", 10000.0, low=1.0),
        }
        config, local_rope = split_ropes(config, width // heads, 8192, **theta)
        rope, positions = read_rope(config, width // heads, 8192)
        every = read_int(config, "global_attn_every_n_layers", 3)
        # local_attention counts tokens on both sides;
        # `window` counts one side and the token itself.
        window = read_int(config, "local_attention", 128) // 2 + 1
        bias = read_bool(config, "attention_bias", False)
        return ModelSpec(
            vocab=read_int(config, "vocab_size"),
            width=width,
            layers=read_int(config, "num_hidden_layers", high=4096),
            q_heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            intermediate=read_int(config, "intermediate_size", 1152, high=1 << 24),
            max_position=positions,
            norm_eps=read_float(config, "norm_eps", 1e-5),
            tied=True,
            dtype=read_dtype(config),
            rope=rope,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=read_bool(config, "mlp_bias", False),
            activation=read_choice(config, "hidden_activation", "gelu", GATED),
            pooled=True,
            encoder=True,
            extra={
                "windows": read_windows(config, window, default=lambda i: i % every > 0),
                "local_rope": local_rope,
                "norm_bias": read_bool(config, "norm_bias", False),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        bias = cast("bool", s.extra["norm_bias"])
        x = b.layer_norm(
            b.embed("model.embeddings.tok_embeddings"), "model.embeddings.norm", bias=bias
        )
        for i in range(s.layers):
            at = f"model.layers.{i}"
            h = b.layer_norm(x, f"{at}.attn_norm", bias=bias) if i else x
            qkv = b.linear(h, f"{at}.attn.Wqkv", features=3 * s.width, bias=s.qkv_bias)
            a = b.attend_both_sides(qkv, rope=layer_rope(s, i), window=layer_window(s, i))
            b.linear(a, f"{at}.attn.Wo", bias=s.out_bias, add_to=x)
            h = b.layer_norm(x, f"{at}.mlp_norm", bias=bias)
            wide = [rows(f"{at}.mlp.Wi", n * s.intermediate, s.intermediate) for n in (0, 1)]
            then = cast("Then", s.activation)
            g = b.linear(h, wide, features=s.intermediate, bias=s.mlp_bias, then=then)
            b.linear(g, f"{at}.mlp.Wo", bias=s.mlp_bias, add_to=x)
        leave_linears(b, "head.dense", "head.norm", "classifier", *GGUF_HEAD)
        b.hidden(b.layer_norm(x, "model.final_norm", bias=bias))
