"""nomic-bert: BERT with RoPE and gated MLPs, without biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.base import register_model
from cpuserve.models.bert import read_encoder_heads
from cpuserve.models.config import read_dtype, read_float, read_int, refuse
from cpuserve.models.rope import read_rope
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder

# Keys of the published configs, which follow GPT-2, and the same settings in transformers.
KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "max_trained_positions": "max_position_embeddings",
}
# Features of the published code that no published text model uses.
FIXED = {
    "prenorm": False,
    "parallel_block": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "use_rms_norm": False,
    "rotary_emb_interleaved": False,
    "rotary_emb_fraction": 1.0,
    "causal": False,
    "activation_function": "swiglu",
    "hidden_act": "silu",
    "num_experts": 0,
}


@register_model("NomicBertModel")
class NomicBert:
    """nomic-embed-text v1 and v1.5. Source: transformers modeling_nomic_bert.

    Keys of spec.extra: "types" (the number of token types; all tokens have type 0).
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """The hyperparameters in a config of transformers, or in one published by Nomic."""
        for key, only in FIXED.items():
            if config.get(key, only) not in (only, None):
                refuse(key, config[key], f"{only}: others are not supported")
        config = {**{KEYS[k]: v for k, v in config.items() if k in KEYS and v}, **config}
        width, heads = read_encoder_heads(config)
        theta = {"rope_theta": config.get("rope_theta") or 1000.0}
        rope, positions = read_rope({**config, **theta}, width // heads, 2048)
        return ModelSpec(
            architecture="NomicBertModel",
            vocab=read_int(config, "vocab_size"),
            width=width,
            layers=read_int(config, "num_hidden_layers", high=4096),
            q_heads=heads,
            kv_heads=heads,
            head_dim=width // heads,
            intermediate=read_int(config, "intermediate_size", 4 * width, high=1 << 24),
            max_position=positions,
            norm_eps=read_float(config, "layer_norm_eps", 1e-12),
            tied=True,
            dtype=read_dtype(config),
            rope=rope,
            pooled=True,
            encoder=True,
            extra={"types": read_int(config, "type_vocab_size", 2, high=1 << 16)},
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the ops of the model to `b`."""
        x = b.embed("embeddings.word_embeddings")
        types = "embeddings.token_type_embeddings", cast("int", s.extra["types"])
        b.position_embed(x, None, rows=s.max_position, types=types)
        x = b.layer_norm(x, "emb_ln")
        for i in range(s.layers):
            at = f"encoder.layers.{i}"
            qkv = b.linear(x, f"{at}.attn.Wqkv", features=3 * s.width)
            b.linear(b.attend_both_sides(qkv, rope=s.rope), f"{at}.attn.out_proj", add_to=x)
            x = b.layer_norm(x, f"{at}.norm1")
            g = b.linear(
                x, [f"{at}.mlp.fc12", f"{at}.mlp.fc11"], features=s.intermediate, then="silu_mul"
            )
            b.linear(g, f"{at}.mlp.fc2", add_to=x)
            x = b.layer_norm(x, f"{at}.norm2")
        b.hidden(x)
