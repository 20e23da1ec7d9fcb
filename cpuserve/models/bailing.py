"""Bailing: Ling and Ring 1 and 2, Sarvam (the layers of Ling 2), and Ling 3 Flash.

Ling 3 has five delta nets for each latent attention with gates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_float,
    read_int,
    read_kinds,
    refuse,
)
from cpuserve.models.decoder_row import without_nulls
from cpuserve.models.deepseek import latent_output, read_latent
from cpuserve.models.experts import (
    add_shared_mixture,
    read_dense_layers,
    read_experts,
    read_first_dense,
    read_groups,
    read_limits,
)
from cpuserve.models.llama import (
    dense_mlp,
    finish_decoder,
    guess_inputs,
    heads_of,
    read_decoder,
    rms_norm,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.row_delta import KINDS, gated_rows, read_row_delta, with_keys
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

# How transformers' modules are called, and how published files call them.
_NAMES = {
    r"^model\.embed_tokens\.": "model.word_embeddings.",
    r"\.self_attn\.o_proj\.": ".attention.dense.",
    r"\.self_attn\.q_norm\.": ".attention.query_layernorm.",
    r"\.self_attn\.k_norm\.": ".attention.key_layernorm.",
    r"\.self_attn\.": ".attention.",
    r"\.mlp\.gate\.e_score_correction_bias": ".mlp.gate.expert_bias",
}


class BailingMoe:
    """Ling and Ring 1 (lite, plus): experts chosen by a softmax, and shared experts.

    Source: modeling_bailing_moe of the published checkpoints.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Ling 1 config."""
        parts: SpecParts = {
            "score": "softmax",
            "groups": None,
            "expert_scale": 1.0,
            "expert_bias": False,
            "qk_norm": read_bool(config, "use_qk_norm", False),
            "split": read_bool(config, "split_qkv", False),
        }
        return _read(
            {"rope_theta": 6e5, "first_k_dense_replace": 0, **without_nulls(config)}, parts
        )

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s, _attention)


class BailingMoeV2(BailingMoe):
    """Ling and Ring 2 (mini, flash, 1T): experts chosen by a sigmoid and a bias, in groups.

    Source: modeling_bailing_moe_v2 of the published checkpoints.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Ling 2 config.

        The number of rotated dims of a head is rotary_dim, or else a share of the head.
        """
        read_choice(config, "score_function", "sigmoid", {"sigmoid": "sigmoid"})
        settings = {"rope_theta": 6e5, "n_group": 8, "topk_group": 4, **without_nulls(config)}
        if settings.get("rotary_dim"):
            head_dim = read_int(settings, "head_dim", 128)
            rotary = read_int(settings, "rotary_dim", high=head_dim)
            settings["partial_rotary_factor"] = rotary / head_dim
        return _read({"head_dim": 128, "first_k_dense_replace": 1, **settings}, _routed(settings))


class SarvamMoe(BailingMoe):
    """Sarvam 30B: the layers of Ling 2. Source: transformers modeling_glm4_moe, sarvam_moe."""

    stored = StoredNames(
        _NAMES,
        joined={".attention.query_key_value": tuple(f".attention.{n}_proj" for n in "qkv")},
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Sarvam config, in both spellings."""
        spellings = {
            "n_routed_experts": "num_experts",
            "n_shared_experts": "num_shared_experts",
            "attention_bias": "use_qkv_bias",
        }
        settings = {spellings.get(key, key): value for key, value in without_nulls(config).items()}
        settings = {
            "rope_theta": 8e6,
            "head_dim": 64,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1024,
            "routed_scaling_factor": 2.5,
            "max_position_embeddings": 131072,
            "first_k_dense_replace": 1,
            **settings,
        }
        return _read(settings, _routed(settings))


_HYBRID = {
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
    """Ling 3 Flash. Source: transformers modeling_bailing_hybrid.

    transformers leaves out the limits of experts, but the model was trained with them.
    """

    stored = StoredNames(
        {**_NAMES, r"\.forget_gate\.": "."},
        cut=lambda _: {".attention.conv1d": {f".attention.{n}_conv1d": 1 for n in "qkv"}},
    )

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Ling 3 config.

        All of qk_rope_head_dim is rotated; partial_rotary_factor is its share of head_dim.
        """
        read_choice(config, "hidden_act", "silu", {"silu": "silu", "swish": "silu"})
        config = {**_HYBRID, **with_keys(without_nulls(config)), "partial_rotary_factor": None}
        if isinstance(rope := config.get("rope_parameters"), dict):
            config["rope_parameters"] = {**rope, "partial_rotary_factor": None}
        interval = read_int(config, "layer_group_size", 6)
        kinds = read_kinds(config, "layer_types", KINDS, lambda i: KINDS[(i + 1) % interval == 0])
        dense = read_dense_layers(config, first=read_int(config, "first_k_dense_replace", 2, low=0))
        spec = read_latent(
            config,
            positions=262144,
            dense=dense,
            groups=read_groups(config, (8, 4), best=2),
            renormalize=read_bool(config, "norm_topk_prob", True),
            interleaved=read_bool(config, "rope_interleave", True),
        )
        bound = 0.0
        if read_bool(config, "kda_safe_gate", True):
            bound = read_float(config, "kda_lower_bound", -5.0, low=-1e6, high=-1e-6)
        delta = {  # transformers writes head_dim as the width of the RoPE
            "linear_num_heads": spec.q_heads,
            "linear_head_dim": read_int(config, "head_dim", 128, high=1024),
            "linear_conv_kernel_dim": read_int(config, "short_conv_kernel_size", 4),
        }
        parts: SpecParts = {
            **spec.parts,
            "score": "sigmoid",
            "expert_bias": True,
            "attends": tuple(kind == "full_attention" for kind in kinds),
            "row_delta": read_row_delta({**delta, **config}),
            "bound": bound,
            "limits": read_limits(config, "expert_swiglu_limit_list", spec.layers),
            "shared_limits": read_limits(config, "share_expert_swiglu_limit_list", spec.layers),
            "guess": {"limits": (0.0,), "shared_limits": (0.0,)},
        }
        return replace(spec, parts=parts)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        _build(b, s, _mix)


# Switches of published configs of Ling 3, with the values that the layers here have.
_LAYERS = {
    "no_kda_lora": True,
    "use_kda_lora": False,
    "linear_silu": True,
    "use_mla_nope": False,
    "up_proj_norm": False,
    "value_norm": False,
    "use_nGPT": False,
    "use_bias": False,
    "pregate_inference": False,
}


class BailingMoeV3(BailingHybrid):
    """Ling 3 tiny and Flash. Source: configs of the published checkpoints, which transformers
    reads as BailingHybrid, and vLLM bailing_moe_v3 for the layers after the last whole group.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a published config of Ling 3."""
        for key, value in _LAYERS.items():
            if read_bool(config, key, value) is not value:
                refuse(key, not value, str(value).lower())
        gate = "gated_attention_proj_granularity_type"
        read_choice(config, gate, "head_wise", {"head_wise": "head_wise"})
        read_int(config, "group_norm_size", 1, high=1)
        layers = read_int(config, "num_hidden_layers", high=4096)
        interval = read_int(config, "layer_group_size", 6)
        grouped_layers = layers // interval * interval
        kinds = [KINDS[(i + 1) % interval == 0 or i >= grouped_layers] for i in range(layers)]
        return BailingHybrid.spec({**config, "layer_types": kinds})


def _build(
    b: Builder, s: ModelSpec, mix: Callable[[Builder, ModelSpec, int, ValueId, ValueId], None]
) -> None:
    """Append the layers; mix adds the attention or the delta net of a layer."""
    table = "model.word_embeddings"
    x = guess_inputs(b, s, rms_norm, embedding=table) if s.guesses else b.embed(table)
    for layer in range(s.layers):
        prefix = f"model.layers.{layer}"
        mix(b, s, layer, b.rms_norm(x, f"{prefix}.input_layernorm"), x)
        _routed_mlp(b, s, layer, b.rms_norm(x, f"{prefix}.post_attention_layernorm"), x)
    finish_decoder(b, s, b.rms_norm(x, "model.norm"), embedding=table)


def _routed(config: Mapping[str, Any]) -> SpecParts:
    """Return the entries of ModelSpec.parts of a router with groups and a bias."""
    return {
        "score": "sigmoid",
        "groups": read_groups(config, (1, 1), best=2),
        "expert_scale": read_float(config, "routed_scaling_factor", 1.0),
        "expert_bias": read_bool(config, "moe_router_enable_expert_bias", True),
        "qk_norm": read_bool(config, "use_qk_norm", True),
    }


def _read(config: Mapping[str, Any], parts: SpecParts) -> ModelSpec:
    """Return the hyperparameters; parts: of the router, and whether there are norms."""
    if read_bool(config, "norm_head", False):
        refuse("norm_head", True, "false: divide each column of lm_head.weight by its norm first")
    return read_decoder(
        config,
        positions=32768,
        qkv_bias=read_bool(config, "use_qkv_bias", False),
        out_bias=read_bool(config, "use_bias", False),
        parts={
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "shared": read_int(config, "num_shared_experts", 1, low=0),
            "dense_layers": read_first_dense(config, 0),
            "renormalize": read_bool(config, "norm_topk_prob", True),
            **parts,
        },
    )


def _attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's attention of h to x."""
    prefix = f"model.layers.{layer}.attention"
    if s.parts.get("split"):  # GGUF files of Ling 1
        qkv = heads_of(b, s, prefix, h)
    else:
        features = (s.q_heads + 2 * s.kv_heads) * s.head_dim
        qkv = b.linear(h, f"{prefix}.query_key_value", features=features, bias=s.qkv_bias)
    q_norm, k_norm = f"{prefix}.query_layernorm", f"{prefix}.key_layernorm"
    norms = (q_norm, k_norm) if s.parts["qk_norm"] else (None, None)
    b.rope_store_kv(qkv, layer=layer, rope=s.rope, q_norm=norms[0], k_norm=norms[1])
    b.linear(
        b.attention(qkv, layer=layer), f"{prefix}.dense", bias=s.out_bias, add_to=x, use="output"
    )


def _routed_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add to x the experts of h, chosen and shared; some layers have a plain MLP instead."""
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
        return
    prefix = f"model.layers.{layer}.mlp"
    bias = "gate.expert_bias" if s.parts["expert_bias"] else None
    score = s.parts["score"]
    no_limits = (0.0,) * s.layers
    limits = s.parts.get("limits", no_limits)[layer], s.parts.get("shared_limits", no_limits)[layer]
    add_shared_mixture(b, s, prefix, h, x, score=score, bias=bias, silu_limits=limits)


def _mix(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the latent attention or the delta net of h to x, whichever the layer has."""
    prefix = f"model.layers.{layer}.attention"
    attends = s.parts["attends"][layer]
    if attends:
        out = latent_output(b, s, layer, h, prefix=prefix)
        b.gate(b.linear(h, f"{prefix}.g_proj", features=s.q_heads), to=out, heads=s.q_heads)
    else:
        out = _delta(b, s, prefix, h)
    b.linear(out, f"{prefix}.dense", bias=s.out_bias and attends, add_to=x, use="output")


def _delta(b: Builder, s: ModelSpec, prefix: str, h: ValueId) -> ValueId:
    """Return the delta net `prefix` of h; one matrix makes the gates, and one the decays."""
    sizes = s.parts["row_delta"]
    heads, width = sizes["heads"], sizes["width"]
    qkv_width = heads * width
    names = [f"{prefix}.{part}_proj" for part in "qkvg"]
    qkvz = b.linear(
        h, names, features=[qkv_width] * 4, use=("linear", "linear", "values", "linear")
    )
    gates = b.linear(h, [f"{prefix}.b_proj", f"{prefix}.f_proj"], features=[heads, qkv_width])
    return gated_rows(b, s, prefix, qkvz, gates, bound=s.parts["bound"])
