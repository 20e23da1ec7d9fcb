"""nomic-bert: BERT with RoPE and gated MLPs, without biases; and its mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.bert import encoder_sizes
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_float,
    read_int,
    refuse,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import read_rope
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import BuiltTensors, StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then, ValueId

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
# Settings with one supported value, which all published text models have; others are refused.
FIXED = {
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "rotary_emb_interleaved": False,
    "rotary_emb_fraction": 1.0,
    "causal": False,
    "hidden_act": "silu",
    "num_shared_experts": 0,
    "ffn_div": 1,
    "moe_normalize_expert_weights": False,
    "expert_choice_router": False,
}
# The activation of the MLP for each activation_function of a config.
# For swiglu the MLP is gated, for gelu it is not.
ACTIVATIONS: dict[str, Then] = {"swiglu": "silu", "gelu": "gelu"}
# The first norm of a layer plus the common bias of its experts; quant/bert_weights.py makes it.
SHIFTED = "norm1_and_experts_bias"


class NomicBert:
    """nomic-embed-text v1, v1.5 and v2-moe. Source: modeling_nomic_bert, and Nomic's for mixtures.

    Keys of spec.parts: "types" (the number of token types; all tokens have type 0).
    Mixtures have, in addition, "experts", "chosen" (the number that a token uses), "every"
    (layers 1, 1 + every, ... are mixtures) and "shifted" (whether a layer's experts have
    a common bias).
    """

    stored = StoredNames(
        {
            r"^embeddings\.LayerNorm\.": "emb_ln.",
            r"^model\.layers\.": "encoder.layers.",
            r"\.self_attn\.o_proj\.": ".attn.out_proj.",
            r"\.self_attn\.": ".attn.",
            r"\.post_attention_layernorm\.": ".norm1.",
            r"\.post_mlp_layernorm\.": ".norm2.",
            r"\.mlp\.up_proj\.": ".mlp.fc11.",
            r"\.mlp\.gate_proj\.": ".mlp.fc12.",
            r"\.mlp\.down_proj\.": ".mlp.fc2.",
        },
        joined={".attn.Wqkv": tuple(f".attn.{n}_proj" for n in "qkv")},
        published={r"(\.experts\.mlp\.(?:w[12]|v1))$": r"\1.weight"},
    )

    @staticmethod
    def built(config: Mapping[str, Any]) -> BuiltTensors | None:
        """Return what divides the flat matrices of experts, if there are any."""
        if not config.get("num_experts"):
            return None
        arguments = (config["num_experts"], SHIFTED)
        return BuiltTensors("cpuserve.quant.bert_weights:NomicExperts", arguments)

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a config of transformers or in a published one."""
        for key, required in FIXED.items():
            if config.get(key, required) not in (required, None):
                refuse(key, config[key], f"{required}: others are not supported")
        config = {**{KEYS[k]: v for k, v in config.items() if k in KEYS and v}, **config}
        sizes = encoder_sizes(config)
        theta = {"rope_theta": config.get("rope_theta") or 1000.0}
        rope, positions = read_rope({**config, **theta}, sizes["head_dim"], 2048)
        return ModelSpec(
            **sizes,
            max_position=positions,
            norm_eps=read_float(config, "layer_norm_eps", 1e-12),
            tied=True,
            rope=rope,
            qkv_bias=read_bool(config, "qkv_proj_bias", False),
            mlp_bias=read_bool(config, "mlp_fc1_bias", False),
            activation=read_choice(config, "activation_function", "swiglu", ACTIVATIONS),
            parts={
                "types": read_int(config, "type_vocab_size", 2, high=1 << 16),
                **_mixture(config),
            },
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("embeddings.word_embeddings")
        types = "embeddings.token_type_embeddings", s.parts["types"]
        b.position_embed(x, None, rows=s.max_position, types=types)
        x = b.layer_norm(x, "emb_ln")
        for i in range(s.layers):
            prefix = f"encoder.layers.{i}"
            qkv = b.linear(x, f"{prefix}.attn.Wqkv", features=3 * s.width, bias=s.qkv_bias)
            a = b.attend_both_sides(qkv, rope=s.rope)
            b.linear(a, f"{prefix}.attn.out_proj", bias=s.qkv_bias, add_to=x)
            interval = s.parts.get("every", 0)
            mlp = _experts if interval and i % interval == 1 else _mlp
            x = b.layer_norm(mlp(b, s, prefix, x), f"{prefix}.norm2")
        b.hidden(x)


def _mlp(b: Builder, s: ModelSpec, prefix: str, x: ValueId) -> ValueId:
    """Return h + mlp(h), where h is the first norm of x."""
    h = b.layer_norm(x, f"{prefix}.norm1")
    if s.activation == "silu":
        names, activation = [f"{prefix}.mlp.fc12", f"{prefix}.mlp.fc11"], "silu_mul"
    else:
        names, activation = [f"{prefix}.mlp.fc1"], s.activation
    g = b.linear(h, names, features=s.intermediate, bias=s.mlp_bias, then=cast("Then", activation))
    return b.linear(g, f"{prefix}.mlp.fc2", bias=s.mlp_bias, add_to=h, use="down")


def _experts(b: Builder, s: ModelSpec, prefix: str, x: ValueId) -> ValueId:
    """Return h + common bias of the experts + experts of h, where h is the first norm of x."""
    h = b.layer_norm(x, f"{prefix}.norm1")
    total = b.layer_norm(x, f"{prefix}.{SHIFTED}" if s.parts["shifted"] else f"{prefix}.norm1")
    experts = range(s.parts["experts"])
    names = [[f"{prefix}.mlp.experts.{e}.{part}_proj" for part in ("up", "down")] for e in experts]
    return b.mixture(
        h,
        f"{prefix}.mlp.router.layer",
        names,
        features=s.intermediate,
        chosen=s.parts["chosen"],
        then=s.activation,
        to=total,
    )


def _mixture(config: Mapping[str, Any]) -> SpecParts:
    """Return the keys of spec.parts for mixtures; {} if the config has no experts."""
    if not config.get("num_experts"):
        return {}
    experts = read_int(config, "num_experts", high=4096)
    if config.get("activation_function") != "gelu":
        refuse("activation_function", config.get("activation_function"), "gelu in a mixture")
    return {
        "experts": experts,
        "chosen": read_int(config, "moe_top_k", 1, high=experts),
        "every": read_int(config, "moe_every_n_layers", 2, low=2),
        "shifted": read_bool(config, "moe_bias", True),
        "expert_width": read_int(config, "intermediate_size", high=1 << 24),
    }
