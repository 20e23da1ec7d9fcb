"""The table of decoders with mixtures of experts that differ from Llama, Qwen3 or Mixtral by parts.

Mixtures of families with files of their own, such as DeepSeek and Granite, are there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_float,
    read_int,
    read_object,
    read_qwen_windows,
    read_window,
    read_windows,
    refuse,
)
from cpuserve.models.decoder_row import (
    ATTENTION_BIAS,
    MLP_BIAS,
    Config,
    DecoderRow,
    read_roped_windows,
    when_empty,
    with_head_dim,
    without_nulls,
)
from cpuserve.models.experts import (
    GATED_PARTS,
    add_mixture,
    add_shared_mixture,
    qwen_mlp,
    qwen_shared_mlp,
    read_dense_layers,
    read_experts,
    read_first_dense,
    read_groups,
    read_shared_experts,
    read_sparse_step,
    sigmoid_mixture,
)
from cpuserve.models.llama import (
    attend,
    build_decoder,
    build_sandwich,
    clip_values,
    dense_mlp,
    finish_decoder,
    gated_mlp,
    heads_of,
    layer_norm,
    layer_rope,
    layer_window,
    plain_mlp,
    qk_norm_attention,
    read_clip,
    self_attention,
)
from cpuserve.models.parts import SpecParts
from cpuserve.models.rope import split_ropes
from cpuserve.models.spec import ModelSpec
from cpuserve.models.stored_names import BuiltTensors, StoredNames, experts_by_number
from cpuserve.program.builder import Builder
from cpuserve.program.ops import SWIGLU_ALPHA, SWIGLU_LIMIT, ValueId


def _with_qwen_windows(config: Config, parts: SpecParts) -> dict[str, Any]:
    arguments = read_qwen_windows(config)
    return {**arguments, "parts": {**arguments.get("parts", {}), **parts}}


def _qwen2_moe(config: Config) -> dict[str, Any]:
    renormalize = read_bool(config, "norm_topk_prob", False)
    return _with_qwen_windows(config, read_shared_experts(config, renormalize=renormalize))


Qwen2Moe = DecoderRow(
    "Qwen2 with routed experts, and a gated expert that all tokens share."
    " Source: transformers modeling_qwen2_moe.",
    positions=32768,
    layers=partial(build_decoder, mlp=qwen_shared_mlp),
    bias=("qkv_bias", True),
    out_bias=False,
    read_arguments=_qwen2_moe,
)


def _qwen3_moe(config: Config) -> dict[str, Any]:
    layers = read_int(config, "num_hidden_layers", high=4096)
    parts: SpecParts = {
        **read_experts(config, count="num_experts", width="moe_intermediate_size"),
        "renormalize": read_bool(config, "norm_topk_prob", False),
        "dense_layers": read_sparse_step(config, layers),
    }
    return _with_qwen_windows(config, parts)


Qwen3Moe = DecoderRow(
    "Qwen3 with experts chosen by a softmax. Source: transformers modeling_qwen3_moe.",
    positions=32768,
    layers=partial(build_decoder, attention=qk_norm_attention, mlp=qwen_mlp),
    bias=ATTENTION_BIAS,
    read_arguments=_qwen3_moe,
)


def _mellum_ropes(config: Config) -> Config:
    config = with_head_dim(128)(config)
    config, local_rope = split_ropes(
        config, config["head_dim"], 131072, theta=500000.0, local_theta=10000.0
    )
    return {**config, "local_rope": local_rope}


def _mellum(config: Config) -> dict[str, Any]:
    """Return the settings of layers, which have a window or a dense MLP only if lists say so."""
    window = read_int(config, "sliding_window", 1024, low=0)
    return {
        "parts": {
            "windows": read_windows(config, window, default=lambda _: False),
            "dense_layers": read_dense_layers(config),
            "renormalize": read_bool(config, "norm_topk_prob", True),
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "local_rope": config["local_rope"],
        }
    }


Mellum = DecoderRow(
    "JetBrains' models for code: experts, and layers with a window. Source: modeling_mellum.",
    positions=131072,
    layers=partial(build_decoder, attention=qk_norm_attention, mlp=qwen_mlp),
    prepare=_mellum_ropes,
    bias=ATTENTION_BIAS,
    read_arguments=_mellum,
)


def _dots1(config: Config) -> dict[str, Any]:
    window = read_window(config, 4096)
    first = read_int(config, "max_window_layers", 62, low=0)
    return {
        "parts": {
            "windows": read_windows(config, window, lambda i: window > 0 and i >= first),
            **read_experts(config, count="n_routed_experts", width="moe_intermediate_size"),
            "shared": read_int(config, "n_shared_experts", 1),
            "dense_layers": read_first_dense(config, 0),
            "groups": read_groups(config, (1, 1), best=2),
            "expert_scale": read_float(config, "routed_scaling_factor", 1.0),
            "renormalize": read_bool(config, "norm_topk_prob", False),
        }
    }


Dots1 = DecoderRow(
    "dots.llm1: experts chosen by a sigmoid and a bias. Source: transformers modeling_dots1.",
    positions=2048,
    layers=partial(build_decoder, attention=qk_norm_attention, mlp=sigmoid_mixture),
    bias=ATTENTION_BIAS,
    read_arguments=_dots1,
)


def _deepseek_moe_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h to x; the first layers have a plain MLP."""
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
    else:
        add_shared_mixture(b, s, f"model.layers.{layer}.mlp", h, x, score="softmax")


def _deepseek_moe_keys(config: Config) -> Config:
    read_choice(config, "scoring_func", "softmax", {"softmax": "softmax"})
    return without_nulls(config)


def _deepseek_moe(config: Config) -> dict[str, Any]:
    dense_count = read_int(config, "first_k_dense_replace", 0, low=0)
    interval = read_int(config, "moe_layer_freq", 1)
    return {
        "parts": {
            **read_experts(config, count="n_routed_experts", width="moe_intermediate_size"),
            "shared": read_int(config, "n_shared_experts", 0, low=0),
            "dense_layers": read_dense_layers(config, first=dense_count, interval=interval),
            "renormalize": read_bool(config, "norm_topk_prob", False),
            "expert_scale": read_float(config, "routed_scaling_factor", 1.0),
            "groups": None,
        }
    }


DeepseekMoe = DecoderRow(
    "DeepSeek MoE 16B: Llama with chosen and shared experts. Source: llama.cpp deepseek.cpp.",
    positions=2048,
    layers=partial(build_decoder, mlp=_deepseek_moe_mlp),
    prepare=_deepseek_moe_keys,
    bias=ATTENTION_BIAS,
    read_arguments=_deepseek_moe,
)


def _mixtral_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    prefix = f"model.layers.{layer}.block_sparse_moe"
    add_mixture(b, s, prefix, h, x, parts=("w1", "w3", "w2"), renormalize=True)


def _local_experts(config: Config) -> dict[str, Any]:
    return {"parts": read_experts(config, count="num_local_experts", width="intermediate_size")}


Mixtral = DecoderRow(
    "Mistral with experts; their weights add up to 1. Source: transformers modeling_mixtral.",
    positions=131072,
    layers=partial(build_decoder, mlp=_mixtral_mlp),
    prepare=when_empty(rope_theta=1e6, rms_norm_eps=1e-5),
    read_arguments=lambda config: {
        "window": read_int(config, "sliding_window", 0, low=0),
        **_local_experts(config),
    },
    stored=StoredNames(
        {
            **experts_by_number("mlp", "block_sparse_moe"),
            r"\.mlp\.gate\.": ".block_sparse_moe.gate.",
        }
    ),
)


def _rotated_share(config: Config) -> dict[str, Any]:
    """Return the keys of a config that have values, with the width of heads.

    Published configs have the number of rotated dimensions of a head (rotary_dim),
    and newer configs have their share (partial_rotary_factor).
    """
    head_dim = read_int(config, "head_dim", 128)
    values = {**without_nulls(config), "head_dim": head_dim}
    shares = read_object(config, "rope_parameters"), values
    if "rotary_dim" in values and not any("partial_rotary_factor" in params for params in shares):
        rotary = read_int(config, "rotary_dim", high=head_dim)
        values["partial_rotary_factor"] = rotary / head_dim
    return values


def _minimax_m2_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    prefix, parts = f"model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2")
    bias = f"{prefix}.e_score_correction_bias"
    add_mixture(b, s, prefix, h, x, parts=parts, renormalize=True, score="sigmoid", bias=bias)


MiniMaxM2 = DecoderRow(
    "MiniMax M2 and M2.5. Source: transformers modeling_minimax_m2.",
    positions=196608,
    layers=partial(
        build_decoder, attention=partial(self_attention, wide_norm=True), mlp=_minimax_m2_mlp
    ),
    prepare=_rotated_share,
    defaults={"rope_theta": 5e6},
    read_arguments=_local_experts,
    stored=StoredNames(
        {**Mixtral.stored.renamed, r"\.mlp\.e_score_": ".block_sparse_moe.e_score_"}
    ),
)


def _kolibri1(config: Config) -> dict[str, Any]:
    """Return the settings of layers; only those with a window have a RoPE, none has a dense MLP."""
    window = read_int(config, "sliding_window", 513)
    return {
        "parts": {
            **read_roped_windows(config, window, lambda i: (i + 1) % 5 > 0),
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "renormalize": read_bool(config, "norm_topk_prob", False),
        }
    }


def _kolibri1_keys(config: Config) -> Config:
    defaults = {
        "head_dim": 128,
        "num_key_value_heads": 4,
        "num_experts": 384,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 512,
    }
    config = {**defaults, **without_nulls(config)}
    shared_width = read_int(config, "shared_expert_intermediate_size", 512, high=1 << 24)
    return {**config, "intermediate_size": shared_width}


def _kolibri1_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, to: ValueId | None) -> ValueId:
    """Return the layer's experts of h plus the expert that all tokens share."""
    prefix, renormalize = f"model.layers.{layer}.mlp", s.parts["renormalize"]
    bias = f"{prefix}.gate.e_score_correction_bias"
    total = add_mixture(
        b, s, prefix, h, to, renormalize=renormalize, score="chosen_sigmoid", bias=bias
    )
    return gated_mlp(b, s, f"{prefix}.shared_experts", h, s.intermediate, to=total)


Kolibri1 = DecoderRow(
    "Kolibri 1: only layers with a window have a RoPE. Source: transformers modeling_kolibri1.",
    positions=262144,
    layers=partial(
        build_sandwich,
        attention=partial(attend, qk_norm=True),
        norms=(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        mlp=_kolibri1_mlp,
    ),
    prepare=_kolibri1_keys,
    read_arguments=_kolibri1,
    stored=StoredNames(
        {
            r"\.moe\.router\.expert_bias": ".mlp.gate.e_score_correction_bias",
            r"\.post_attn_norm\.": ".post_self_attn_layernorm.",
            r"\.post_ffn_norm\.": ".post_mlp_layernorm.",
        }
    ),
)


_GPT_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss_keys(config: Config) -> Config:
    for key, built_in in (("swiglu_alpha", SWIGLU_ALPHA), ("swiglu_limit", SWIGLU_LIMIT)):
        if read_float(config, key, built_in) != built_in:
            refuse(key, config[key], f"{built_in:g}, which the kernels are built for")
    has_scaling = any(config.get(key) is not None for key in ("rope_scaling", "rope_parameters"))
    scaling = {} if has_scaling else {"rope_scaling": _GPT_OSS_YARN}
    return {**without_nulls(config), **scaling}


def _gpt_oss(config: Config) -> dict[str, Any]:
    """Return the settings of layers; without layer_types, layers 0, 2 and so on have a window."""
    window = read_int(config, "sliding_window", 128, low=0)
    windows = read_windows(config, window, default=lambda i: i % 2 == 0)
    experts = read_experts(config, count="num_local_experts", width="intermediate_size")
    return {"parts": {"windows": windows, **experts}}


def _gpt_oss_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's mixture of experts of h to x; the router and all experts have biases."""
    add_mixture(
        b,
        s,
        f"model.layers.{layer}.mlp",
        h,
        x,
        renormalize=False,
        score="chosen_softmax",
        router="router",
        then="clamped_swiglu_mul",
        biased=True,
    )


GptOss = DecoderRow(
    "gpt-oss-20b and 120b: experts with biases, attention sinks. Source: modeling_gpt_oss.",
    positions=131072,
    layers=partial(build_decoder, attention=partial(self_attention, sinks=True), mlp=_gpt_oss_mlp),
    prepare=_gpt_oss_keys,
    defaults={"head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150000.0},
    bias=("attention_bias", True),
    read_arguments=_gpt_oss,
)


def _biased_experts(
    b: Builder,
    s: ModelSpec,
    prefix: str,
    h: ValueId,
    x: ValueId | None,
    bias: str = "expert_bias",
    router: str = "router.gate",
) -> ValueId:
    """Return x plus the experts of h that a sigmoid and a bias choose; see add_mixture.

    bias, router: their names in module `prefix`.
    """
    return add_mixture(
        b,
        s,
        prefix,
        h,
        x,
        renormalize=True,
        score="sigmoid",
        scale=s.parts["expert_scale"],
        bias=f"{prefix}.{bias}",
        router=router,
    )


def _hunyuan3_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h to x; the first layers have a plain MLP."""
    prefix = f"model.layers.{layer}.mlp"
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
        return
    out = _biased_experts(b, s, prefix, h, x)
    shared_width = s.parts["shared"] * s.parts["expert_width"]
    gated_mlp(b, s, f"{prefix}.shared_mlp", h, shared_width, to=out)


def _hunyuan3(config: Config) -> dict[str, Any]:
    defaults = {"num_experts": 192, "num_experts_per_tok": 8, "moe_intermediate_size": 1536}
    expert_config = {**defaults, **without_nulls(config)}
    return {
        "parts": {
            **read_experts(expert_config, count="num_experts", width="moe_intermediate_size"),
            "shared": read_int(config, "num_shared_experts", 1),
            "dense_layers": read_dense_layers(config, first=1),
            "expert_scale": read_float(config, "router_scaling_factor", 2.826),
        }
    }


HunYuan3 = DecoderRow(
    "Hunyuan 3: chosen experts and a shared one. Source: transformers modeling_hy_v3.",
    positions=131072,
    layers=partial(build_decoder, attention=qk_norm_attention, mlp=_hunyuan3_mlp),
    defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "num_key_value_heads": 8,
    },
    bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
    read_arguments=_hunyuan3,
    stored=StoredNames(
        {
            r"\.mlp\.gate\.": ".mlp.router.gate.",
            r"\.mlp\.e_score_correction_bias": ".mlp.expert_bias",
            r"\.mlp\.shared_experts\.": ".mlp.shared_mlp.",
        }
    ),
)


def _flint_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add to x the experts of h, chosen and shared, or the plain MLP of h."""
    prefix = f"model.layers.{layer}.mlp"
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
        return
    add_mixture(b, s, prefix, h, x, renormalize=s.parts["renormalize"], score="sigmoid")
    gated_mlp(b, s, f"{prefix}.shared_expert", h, s.parts["shared_width"], to=x)


def _flint(config: Config) -> dict[str, Any]:
    last_layer = read_int(config, "num_hidden_layers", high=4096) - 1
    window = read_int(config, "sliding_window", 513)
    renormalize = read_bool(config, "norm_topk_prob", True)
    return {
        "parts": {
            **read_shared_experts(config, renormalize=renormalize),
            **read_roped_windows(
                config, window, lambda i: i >= 2 and i % 4 != 1 and i != last_layer
            ),
        }
    }


Flint = DecoderRow(
    "Flint: only layers with a window have a RoPE. Source: transformers modeling_flint.",
    positions=262144,
    layers=partial(
        build_decoder,
        attention=partial(self_attention, qk_norm=True, sinks=True),
        mlp=_flint_mlp,
    ),
    prepare=without_nulls,
    defaults={
        "num_experts": 256,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 1024,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "mlp_only_layers": [0, 1],
    },
    bias=ATTENTION_BIAS,
    read_arguments=_flint,
    stored=StoredNames(published={r"\.self_attn\.softmax_offset": ".self_attn.sinks"}),
)


def _gated_columns(b: Builder, s: ModelSpec, layer: int, h: ValueId) -> ValueId:
    """Return the attention of h, where the sigmoid of a linear of h multiplies each column."""
    a = attend(b, s, layer, h, qk_norm=True)
    gates = f"model.layers.{layer}.self_attn.gate_proj"
    b.gate(b.linear(h, gates, features=s.q_heads * s.head_dim), to=a)
    return a


def _afmoe_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, to: ValueId | None) -> ValueId:
    """Return the layer's experts of h plus the shared expert; a plain MLP in the first layers."""
    if layer in s.parts["dense_layers"]:
        return plain_mlp(b, s, layer, h, to)
    prefix = f"model.layers.{layer}.mlp"
    total = _biased_experts(b, s, prefix, h, to)
    shared_width = s.parts["shared"] * s.parts["expert_width"]
    if shared_width:
        gated_mlp(b, s, f"{prefix}.shared_experts", h, shared_width, to=total)
    return total


def _afmoe(config: Config) -> dict[str, Any]:
    interval = read_int(config, "global_attn_every_n_layers", 4)
    window = read_int(config, "sliding_window", 1024)
    return {
        "parts": {
            **read_roped_windows(config, window, lambda i: (i + 1) % interval > 0),
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "shared": read_int(config, "num_shared_experts", low=0),
            "dense_layers": tuple(range(min(read_int(config, "num_dense_layers", low=0), 4096))),
            "expert_scale": read_float(config, "route_scale", 1.0),
        }
    }


def _afmoe_scale(spec: ModelSpec, config: Config) -> ModelSpec:
    has_scale = read_bool(config, "mup_enabled", False)
    return replace(spec, embed_scale=float(spec.width**0.5) if has_scale else 1.0)


Afmoe = DecoderRow(
    "Trinity Nano and Mini: only layers with a window have a RoPE. Source: modeling_afmoe.",
    positions=16384,
    layers=partial(
        build_sandwich,
        attention=_gated_columns,
        norms=(
            "input_layernorm",
            "post_attention_layernorm",
            "pre_mlp_layernorm",
            "post_mlp_layernorm",
        ),
        mlp=_afmoe_mlp,
    ),
    prepare=with_head_dim(128),
    defaults={"rms_norm_eps": 1e-5},
    bias=ATTENTION_BIAS,
    read_arguments=_afmoe,
    finish=_afmoe_scale,
)


def _aria_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the chosen and the shared experts of h to x."""
    prefix = f"model.layers.{layer}.mlp"
    add_mixture(b, s, prefix, h, x, router="router", renormalize=False, score="chosen_softmax")
    gated_mlp(b, s, f"{prefix}.shared_experts", h, s.parts["shared"] * s.intermediate, to=x)


def _aria(config: Config) -> dict[str, Any]:
    expert_config = {
        "moe_num_experts": read_int(config, "moe_num_experts", 8, high=4096),
        "num_experts_per_tok": read_int(config, "moe_topk", 2),
        "intermediate_size": config.get("intermediate_size"),
    }
    parts = read_experts(expert_config, count="moe_num_experts", width="intermediate_size")
    return {"parts": {**parts, "shared": read_int(config, "moe_num_shared_experts", 2)}}


AriaText = DecoderRow(
    "The text part of Aria. Source: transformers modeling_aria.",
    positions=2048,
    layers=partial(build_decoder, mlp=_aria_mlp),
    bias=ATTENTION_BIAS,
    mlp_bias=MLP_BIAS,
    read_arguments=_aria,
    stored=StoredNames(
        published={
            r"\.mlp\.experts\.fc1\.weight": ".mlp.experts.gate_up_proj",
            r"\.mlp\.experts\.fc2\.weight": ".mlp.experts.down_proj",
        }
    ),
)


def _phimoe_keys(config: Config) -> Config:
    """Return the config with short_mscale as the attention factor of its LongRoPE."""
    prepared = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        scaling = read_object(config, key)
        if scaling.get("short_mscale") is not None:
            short, long = (read_float(scaling, f"{kind}_mscale") for kind in ("short", "long"))
            if short != long:
                refuse("long_mscale", long, f"short_mscale, {short}")
            prepared[key] = {**scaling, "attention_factor": short}
    return prepared


def _phimoe_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h to x."""
    prefix, parts = f"model.layers.{layer}.block_sparse_moe", ("w1", "w3", "w2")
    near = s.parts["near"]
    add_mixture(b, s, prefix, h, x, parts=parts, renormalize=False, score="near_softmax", near=near)


def _phimoe(config: Config) -> dict[str, Any]:
    """Return the settings of experts.

    They are near if they differ by at most twice the noise of the router's training.
    """
    parts = read_experts(config, count="num_local_experts", width="intermediate_size")
    if parts["chosen"] != 2:
        refuse("num_experts_per_tok", parts["chosen"], "2 for PhiMoE")
    parts["near"] = 2 * read_float(config, "router_jitter_noise", 0.01, low=0.0)
    parts["head_bias"] = read_bool(config, "lm_head_bias", False)
    window = read_int(config, "sliding_window", low=0) if config.get("sliding_window") else 0
    return {"window": window, "parts": parts}


PhiMoe = DecoderRow(
    "Phi-3.5 MoE, Phi-mini-MoE and Phi-tiny-MoE: Mixtral with layer norms and another router."
    " Source: transformers modeling_phimoe.",
    positions=131072,
    layers=partial(build_decoder, mlp=_phimoe_mlp, norm=layer_norm),
    prepare=_phimoe_keys,
    defaults={
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
    },
    bias=ATTENTION_BIAS,
    read_arguments=_phimoe,
    stored=StoredNames(
        {
            **experts_by_number("mlp", "block_sparse_moe"),
            r"\.mlp\.router\.": ".block_sparse_moe.gate.",
        }
    ),
)


_LAGUNA_ROPES = {
    "full_attention": {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 1e4},
}
_LAGUNA_GATES = {"per-head": True, "per_head": True, "per-element": False, "per_element": False}


def _laguna_keys(config: Config) -> Config:
    """Return the config with the largest number of heads, and with the RoPE of both kinds."""
    if read_bool(config, "moe_apply_router_weight_on_input", False):
        refuse("moe_apply_router_weight_on_input", True, "false")
    if config.get("moe_router_logit_softcapping"):
        refuse("moe_router_logit_softcapping", config["moe_router_logit_softcapping"], "0")
    heads = _laguna_heads(config, read_int(config, "num_hidden_layers", high=4096))
    head_dim = read_int(config, "head_dim", 128)
    if not config.get("rope_parameters"):
        config = {**config, "rope_parameters": _LAGUNA_ROPES}
    full_config, local_rope = split_ropes(config, head_dim, 131072, theta=5e5, local_theta=1e4)
    head_sizes = {"num_attention_heads": max(heads), "head_dim": head_dim}
    return {**full_config, **head_sizes, "heads": heads, "local_rope": local_rope}


def _laguna(config: Config) -> dict[str, Any]:
    window = read_int(config, "sliding_window", 512, low=0)
    return {
        "parts": {
            "windows": read_windows(config, window, default=lambda _: False),
            "heads": config["heads"],
            "gate_per_head": _laguna_gates(config),
            **read_experts(config, count="num_experts", width="moe_intermediate_size"),
            "shared_width": read_int(config, "shared_expert_intermediate_size", high=1 << 24),
            "dense_layers": read_dense_layers(config, first=1),
            "expert_scale": read_float(config, "moe_routed_scaling_factor", 1.0),
            "local_rope": config["local_rope"],
        }
    }


def _laguna_heads(config: Config, layers: int) -> tuple[int, ...]:
    """Return the number of query heads of each layer."""
    key = "num_attention_heads_per_layer"
    heads_by_layer, heads = config.get(key), read_int(config, "num_attention_heads", high=65536)
    if heads_by_layer is None:
        return (heads,) * layers
    kv_heads = read_int(config, "num_key_value_heads", high=65536)
    if (
        not isinstance(heads_by_layer, list)
        or len(heads_by_layer) != layers
        or any(type(n) is not int or not 0 < n <= 65536 or n % kv_heads for n in heads_by_layer)
    ):
        refuse(key, heads_by_layer, f"{layers} multiples of num_key_value_heads, {kv_heads}")
    return tuple(heads_by_layer)


def _laguna_gates(config: Config) -> bool:
    """Return whether attention has one gate for each head, instead of one for each column."""
    gating = config.get("gating", True)
    by_layer = config.get("gating_types") or ["per-head" if gating is True else gating]
    if not isinstance(by_layer, list):
        refuse("gating_types", by_layer, "a list with the gates of each layer")
    kinds = {str(kind) for kind in by_layer}
    if len(kinds) != 1 or (kind := kinds.pop()) not in _LAGUNA_GATES:
        refuse("gating", gating, 'true, "per-head" or "per-element", alike in all layers')
    return _LAGUNA_GATES[kind]


def _laguna_attention(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add attention of h to x; softplus(linear(h)) multiplies its heads or columns."""
    prefix, d = f"model.layers.{layer}.self_attn", s.head_dim
    heads = s.parts["heads"][layer]
    qkv = heads_of(b, s, prefix, h, (heads, s.kv_heads))
    q_norm, k_norm = f"{prefix}.q_norm", f"{prefix}.k_norm"
    b.rope_store_kv(
        qkv, layer=layer, rope=layer_rope(s, layer), q_norm=q_norm, k_norm=k_norm, q_heads=heads
    )
    a = b.attention(qkv, layer=layer, window=layer_window(s, layer), q_heads=heads)
    gates = b.linear(h, f"{prefix}.g_proj", features=heads * (1 if s.parts["gate_per_head"] else d))
    b.soft_gate(gates, to=a)
    b.linear(a, f"{prefix}.o_proj", bias=s.out_bias, add_to=x, use="output")


def _laguna_mlp(b: Builder, s: ModelSpec, layer: int, h: ValueId, x: ValueId) -> None:
    """Add the layer's experts of h plus the shared expert to x, or else its plain MLP of h."""
    if layer in s.parts["dense_layers"]:
        dense_mlp(b, s, layer, h, x)
        return
    prefix = f"model.layers.{layer}.mlp"
    _biased_experts(b, s, prefix, h, x, "experts.e_score_correction_bias", "gate")
    gated_mlp(b, s, f"{prefix}.shared_expert", h, s.parts["shared_width"], to=x)


Laguna = DecoderRow(
    "Laguna XS.2 and M.1: layers differ in their number of heads. Source: modeling_laguna.",
    positions=131072,
    layers=partial(build_decoder, attention=_laguna_attention, mlp=_laguna_mlp),
    prepare=_laguna_keys,
    bias=ATTENTION_BIAS,
    read_arguments=_laguna,
    stored=StoredNames(
        {
            r"\.mlp\.gate\.e_score_": ".mlp.experts.e_score_",
            r"\.mlp\.shared_experts\.": ".mlp.shared_expert.",
        }
    ),
)


_DBRX_EXPERTS = "moe_num_experts"
# The matrices of all experts in published files, with the part of an expert that each has.
_DBRX_FLAT = dict(zip(("w1", "v1", "w2"), GATED_PARTS, strict=True))


def _dbrx_built(config: Config) -> BuiltTensors:
    """Return what divides the flat matrices of the experts."""
    experts = read_int(read_object(config, "ffn_config"), _DBRX_EXPERTS, 4, high=4096)
    return BuiltTensors("cpuserve.quant.flat_experts:FlatExperts", (experts, _DBRX_FLAT))


def _dbrx_keys(config: Config) -> Config:
    """Return the config with the keys of Llama."""
    attention, ffn = read_object(config, "attn_config"), read_object(config, "ffn_config")
    norm = ffn.get("moe_normalize_expert_weights", 1.0)
    if norm not in (None, 1):
        refuse("ffn_config.moe_normalize_expert_weights", norm, "1 or null")
    if (name := read_object(ffn, "ffn_act_fn").get("name", "silu")) != "silu":
        refuse("ffn_config.ffn_act_fn", name, "silu")
    if read_bool(config, "tie_word_embeddings", False):
        refuse("tie_word_embeddings", True, "false: DBRX has an output matrix of its own")
    config = without_nulls(config)
    if (theta := attention.get("rope_theta")) is not None:  # published configs have it here
        config = {"rope_theta": theta, **config}
    return {
        **config,
        "hidden_size": read_int(config, "d_model", high=1 << 20),
        "intermediate_size": read_int(ffn, "ffn_hidden_size", 3584, high=1 << 24),
        "num_attention_heads": read_int(config, "n_heads", high=65536),
        "num_key_value_heads": read_int(attention, "kv_n_heads", 1, high=65536),
        "num_hidden_layers": read_int(config, "n_layers", high=4096),
        "max_position_embeddings": read_int(config, "max_seq_len", 2048),
    }


def _dbrx(config: Config) -> dict[str, Any]:
    attention, ffn = read_object(config, "attn_config"), read_object(config, "ffn_config")
    numbers = {
        _DBRX_EXPERTS: read_int(ffn, _DBRX_EXPERTS, 4, high=4096),
        "num_experts_per_tok": read_int(ffn, "moe_top_k", 1),
        "width": config["intermediate_size"],
    }
    return {
        "parts": {
            **read_experts(numbers, count=_DBRX_EXPERTS, width="width"),
            "renormalize": ffn.get("moe_normalize_expert_weights", 1.0) is not None,
            "clip": read_clip(attention),
        }
    }


def _dbrx_layers(b: Builder, s: ModelSpec) -> None:
    x, features = b.embed("transformer.wte"), (s.q_heads + 2 * s.kv_heads) * s.head_dim
    for i in range(s.layers):
        prefix = f"transformer.blocks.{i}"
        h = b.layer_norm(x, f"{prefix}.norm_attn_norm.norm_1", bias=False)
        qkv = b.linear(h, f"{prefix}.norm_attn_norm.attn.Wqkv", features=features)
        clip_values(b, s, qkv)
        b.rope_store_kv(qkv, layer=i, rope=s.rope)
        b.linear(b.attention(qkv, layer=i), f"{prefix}.norm_attn_norm.attn.out_proj", add_to=x)
        h = b.layer_norm(x, f"{prefix}.norm_attn_norm.norm_2", bias=False)
        renormalize = s.parts["renormalize"]
        add_mixture(b, s, f"{prefix}.ffn", h, x, router="router.layer", renormalize=renormalize)
    h = b.layer_norm(x, "transformer.norm_f", bias=False)
    finish_decoder(b, s, h, embedding="transformer.wte")


Dbrx = DecoderRow(
    "DBRX 132B. Source: transformers modeling_dbrx.",
    positions=2048,
    layers=_dbrx_layers,
    prepare=_dbrx_keys,
    defaults={"layer_norm_epsilon": 1e-5},
    overrides={"head_dim": None, "hidden_act": "silu"},
    eps="layer_norm_epsilon",
    read_arguments=_dbrx,
    stored=StoredNames(published={r"(\.experts\.mlp\.(?:w[12]|v1))$": r"\1.weight"}),
    built=_dbrx_built,
)
