"""Ling 3 Flash: five delta nets for each latent attention with gates, and experts in groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from cpuserve.models.bailing import routed_mlp
from cpuserve.models.config import read_bool, read_choice, read_float, read_int, read_kinds
from cpuserve.models.deepseek import latent_output, read_latent
from cpuserve.models.experts import read_dense_layers, read_groups
from cpuserve.models.kimi_linear import KINDS, read_row_delta, with_keys
from cpuserve.models.llama import finish_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

_DEFAULTS = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rope_theta": 6e6,
    "n_routed_experts": 512,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 768,
    "routed_scaling_factor": 2.5,
}


class BailingHybrid:
    """Ling 3 Flash. Source: transformers modeling_bailing_hybrid."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Ling 3 config."""
        read_choice(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
        config = {**_DEFAULTS, **with_keys({k: v for k, v in config.items() if v is not None})}
        every = read_int(config, "layer_group_size", 6)
        kinds = read_kinds(config, "layer_types", KINDS, lambda i: KINDS[(i + 1) % every == 0])
        dense = read_dense_layers(config, first=read_int(config, "first_k_dense_replace", 2, low=0))
        spec = read_latent(
            config,
            positions=262144,
            dense=dense,
            groups=read_groups(config, (8, 4), best=2),
            renormalize=read_bool(config, "norm_topk_prob", True),
        )
        bound = 0.0
        if read_bool(config, "kda_safe_gate", True):
            bound = -read_float({"bound": -config.get("kda_lower_bound", -5.0)}, "bound")
        delta = {  # transformers writes head_dim as the width of the RoPE
            "linear_num_heads": spec.q_heads,
            "linear_head_dim": read_int(config, "head_dim", 128, high=1024),
            "linear_conv_kernel_dim": read_int(config, "short_conv_kernel_size", 4),
        }
        extra = {
            **spec.extra,
            "score": "sigmoid",
            "expert_bias": True,
            "attends": tuple(kind == "full_attention" for kind in kinds),
            "delta": read_row_delta({**delta, **config}),
            "bound": bound,
        }
        return replace(spec, extra=extra)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        x = b.embed("model.word_embeddings")
        for layer in range(s.layers):
            at = f"model.layers.{layer}"
            _mix(b, s, layer, b.rms_norm(x, f"{at}.input_layernorm"), x)
            routed_mlp(b, s, layer, b.rms_norm(x, f"{at}.post_attention_layernorm"), x)
        finish_decoder(b, s, b.rms_norm(x, "model.norm"), embedding="model.word_embeddings")


def _mix(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the latent attention or the delta net of h to x, whichever the layer has."""
    at = f"model.layers.{layer}.attention"
    attends = cast("tuple[bool, ...]", s.extra["attends"])[layer]
    if attends:
        out = latent_output(b, s, layer, h, at=at)
        b.gate(b.linear(h, f"{at}.g_proj", features=s.q_heads), to=out, heads=s.q_heads)
    else:
        out = _delta(b, s, at, h)
    b.linear(out, f"{at}.dense", bias=s.out_bias and attends, add_to=x)


def _delta(b: Builder, s: ModelSpec, at: str, h: ValueId) -> ValueId:
    """Return the delta net `at` of h; one matrix makes the gates, and one the decays."""
    sizes = cast("dict[str, int]", s.extra["delta"])
    heads, width = sizes["heads"], sizes["width"]
    wide = heads * width
    qkvz = b.linear(h, [f"{at}.{part}_proj" for part in "qkvg"], features=[wide] * 4)
    gates = b.linear(h, [f"{at}.b_proj", f"{at}.f_proj"], features=[heads, wide])
    return b.gated_delta(
        qkvz,
        gates,
        at,
        key_heads=heads,
        value_heads=heads,
        key_width=width,
        value_width=width,
        taps=sizes["taps"],
        split_conv=True,
        norm="o_norm",
        by_row=True,
        sigmoid=True,
        bound=cast("float", s.extra["bound"]),
    )
