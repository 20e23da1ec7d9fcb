"""GGUF files of DeepSeek V2 to V4, GLM 4 to 5.3, Hunyuan 3 and 4, Ling 3, MiMo V2, Step."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.experts import EXPERTS, PARTS, experts, need_sigmoid, shared
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys


def _glm4(keys: Keys) -> dict[str, Any]:
    """Return how many dimensions of a head have pairs that the converter moved apart, if any."""
    sections = keys.raw("rope.dimension_sections")
    return {"split_pairs": keys.count("rope.dimension_count")} if sections else {}


def _glm4_moe(keys: Keys) -> dict[str, Any]:
    need_sigmoid(keys)
    settings = experts(keys)
    return {
        **settings,
        "n_routed_experts": settings["num_experts"],
        "n_shared_experts": keys.count("expert_shared_count", 1),
        "first_k_dense_replace": keys.whole("leading_dense_block_count"),
        "n_group": keys.count("expert_group_count", 1),
        "topk_group": keys.count("expert_group_used_count", 1),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
    }


def _deepseek_moe(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for the first DeepSeek with experts."""
    settings = experts(keys)
    return {
        **settings,
        "n_routed_experts": settings["num_experts"],
        "n_shared_experts": keys.whole("expert_shared_count"),
        "first_k_dense_replace": keys.whole("leading_dense_block_count"),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
    }


def _dots1(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for experts as in GLM 4, without a sliding window."""
    settings = _glm4_moe(keys)
    return {**settings, "sliding_window": None}


# The model family by the value of the key expert_gating_func: 1 is a softmax, 2 a sigmoid.
_GATING = {
    1: {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"},
    2: {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
}


def _deepseek2(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for latent attention and the router.

    The router of DeepSeek V2 is a softmax; the router of V3 and GLM-4.7-Flash is a sigmoid with
    a bias. Files from before May 2025 have one matrix kv_b, and the widths of a head are key_length
    and value_length. In newer files, these widths are key_length_mla and value_length_mla.
    """
    biased = any(name.endswith(".exp_probs_b.bias") for name in keys.file.tensors)
    gating = keys.raw("expert_gating_func")
    if gating not in (None, *_GATING):
        keys.fail("expert_gating_func", gating, "1, the softmax, or 2, the sigmoid")
    if keys.raw("attention.temperature_scale"):
        want = "absent: queries scaled by their positions are not supported"
        keys.fail("attention.temperature_scale", keys.raw("attention.temperature_scale"), want)
    return {**latent_settings(keys), **_GATING[gating or 1 + biased]}


def _deepseek32(keys: Keys) -> dict[str, Any]:
    need_sigmoid(keys)
    return {**latent_settings(keys), **_indexer(keys)}


def _indexer(keys: Keys) -> dict[str, Any]:
    return {
        "index_n_heads": keys.count("attention.indexer.head_count"),
        "index_head_dim": keys.count("attention.indexer.key_length"),
        "index_topk": keys.count("attention.indexer.top_k"),
    }


def _glm_dsa(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for GLM-5; layers without an indexer share one."""
    has_indexer = [keys.has(f"blk.{i}.indexer.attn_k.weight") for i in range(keys.layers())]
    return {
        **_deepseek32(keys),
        "indexer_types": ["full" if is_full else "shared" for is_full in has_indexer],
    }


def _deepseek4(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for DeepSeek V4.

    The converter of llama.cpp leaves the block for multi-token prediction out. Files of other
    converters say in their metadata that they have it, although they do not.
    """
    if keys.raw("expert_gating_func") not in (None, 4):
        want = "4, the square root of the softplus"
        keys.fail("expert_gating_func", keys.raw("expert_gating_func"), want)
    if not keys.flag("expert_weights_norm", True):
        keys.fail("expert_weights_norm", False, "true")
    limit = _limit_of_all(keys)
    layers, ratios = keys.layers(), keys.raw("attention.compress_ratios")
    if not keys.has(f"blk.{layers}.nextn.eh_proj.weight"):
        layers = keys.count("block_count")
    if not isinstance(ratios, list) or len(ratios) < layers:
        keys.fail("attention.compress_ratios", ratios, "a list with a number for each layer")
    settings = experts(keys)
    return {
        **settings,
        **_streams(keys),
        "num_hidden_layers": layers,
        "n_routed_experts": settings["num_experts"],
        "n_shared_experts": keys.count("expert_shared_count"),
        "routed_scaling_factor": keys.real("expert_weights_scale"),
        "swiglu_limit": limit,
        "num_hash_layers": keys.whole("hash_layer_count"),
        "hc_sinkhorn_iters": keys.count("hyper_connection.sinkhorn_iterations"),
        "partial_rotary_factor": None,
        "qk_rope_head_dim": keys.count("rope.dimension_count"),
        "compress_rope_theta": keys.real("attention.compress_rope_freq_base"),
        "compress_ratios": ratios,
        "q_lora_rank": keys.count("attention.q_lora_rank"),
        "o_groups": keys.count("attention.output_group_count"),
        "o_lora_rank": keys.count("attention.output_lora_rank"),
        **_indexer(keys),
    }


def _streams(keys: Keys) -> dict[str, Any]:
    return {
        "hc_mult": keys.count("hyper_connection.count"),
        "hc_eps": keys.real("hyper_connection.epsilon"),
    }


def _limit_of_all(keys: Keys) -> float:
    """Return the limit of the gated values of chosen and of shared experts."""
    limit, shared_limit = _limit(keys, "swiglu_clamp_exp"), keys.raw("swiglu_clamp_shexp")
    if shared_limit is not None and _limit(keys, "swiglu_clamp_shexp") != limit:
        keys.fail("swiglu_clamp_shexp", shared_limit, "equal to swiglu_clamp_exp")
    return limit


def _limit(keys: Keys, key: str) -> float:
    """Return the limit of the gated values of experts, which is the same for all layers."""
    found = keys.raw(key)
    limits = set(found) if isinstance(found, list) else {found}
    limit = limits.pop() if len(limits) == 1 else None
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not limit > 0:
        keys.fail(key, found, "one number above 0 for all layers")
    return float(limit)


def _hy_v4(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Hunyuan 4; files without an indexer read all keys."""
    settings = {
        **_streams(keys),
        "hc_magnitude": keys.real("hyper_connection.magnitude"),
        "swiglu_limit": _limit(keys, "swiglu_clamp_exp"),
    }
    if keys.raw("attention.indexer.top_k") is None:
        need_sigmoid(keys)
        return {**latent_settings(keys), **settings, "index_topk": keys.count("context_length")}
    return {**_glm_dsa(keys), **settings}


def _hy_v3(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Hunyuan 3; files have the width of all shared experts."""
    need_sigmoid(keys)
    if not keys.flag("expert_weights_norm", True):
        keys.fail("expert_weights_norm", False, "true")
    settings = experts(keys)
    width = settings["moe_intermediate_size"]
    shared_width = keys.count("expert_shared_feed_forward_length", width)
    if shared_width % width:
        want = f"a multiple of expert_feed_forward_length, {width}"
        keys.fail("expert_shared_feed_forward_length", shared_width, want)
    return {
        **settings,
        "num_shared_experts": shared_width // width,
        "mlp_layer_types": _routed_layers(keys),
        "router_scaling_factor": keys.real("expert_weights_scale", 1.0),
    }


def _glm5_next(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for GLM-5.3-Flash: layers without KV heads have delta nets."""
    need_sigmoid(keys)
    has_indexer = [keys.has(f"blk.{i}.indexer.attn_k.weight") for i in range(keys.layers())]
    return {
        **latent_settings(keys, turns=False),
        **_streams(keys),
        **row_delta_settings(keys),
        **_indexer(keys),
        "linear_lower_bound": keys.raw("kda.gate_lower_bound"),
        "mlp_layer_types": _routed_layers(keys),
        "hc_sinkhorn_iters": keys.count("hyper_connection.sinkhorn_iterations"),
        "swiglu_limit": _limit_of_all(keys),
        "index_kpool": keys.count("attention.indexer.kpool"),
        "index_kpool_always_select_tail": keys.flag("attention.indexer.kpool_select_tail", True),
        "indexer_types": ["full" if is_full else "shared" for is_full in has_indexer],
    }


def row_delta_settings(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json: which layers have delta nets, and their sizes."""
    return {
        "layer_types": keys.layer_types("linear_attention", "full_attention"),
        "linear_num_heads": keys.count("attention.head_count"),
        "linear_head_dim": keys.count("kda.head_dim"),
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
    }


def _bailing_moe3(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Ling 3: layers without KV heads have delta nets."""
    need_sigmoid(keys)
    settings = latent_settings(keys)
    width = settings["moe_intermediate_size"] * settings["n_shared_experts"]
    shared_width = keys.count("expert_shared_feed_forward_length", width)
    if shared_width != width:
        want = f"{width}, the width of all shared experts"
        keys.fail("expert_shared_feed_forward_length", shared_width, want)
    bound = keys.raw("kda.gate_lower_bound")
    if not isinstance(bound, float) or not bound < 0:
        keys.fail("kda.gate_lower_bound", bound, "a number below 0")
    limits = ("exp", "expert"), ("shexp", "share_expert")
    return {
        **settings,
        **{f"{of}_swiglu_limit_list": keys.raw(f"swiglu_clamp_{at}") for at, of in limits},
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "layer_types": keys.layer_types("linear_attention", "full_attention"),
        "head_dim": keys.count("kda.head_dim"),
        "short_conv_kernel_size": keys.count("ssm.conv_kernel"),
        "kda_safe_gate": keys.flag("kda.safe_gate", True),
        "kda_lower_bound": bound,
        # Files of Ling 3 VL have sections of the RoPE, which pair a column with one half a head on.
        "rope_interleave": keys.raw("rope.dimension_sections") is None,
    }


def latent_settings(keys: Keys, *, turns: bool = True) -> dict[str, Any]:
    """Return entries of config.json: the widths of latent attention and the numbers of experts.

    turns: whether there is a RoPE.
    """
    rotary = keys.count("rope.dimension_count") if turns else 0
    mla = "" if keys.raw("attention.key_length_mla") is None else "_mla"
    key = keys.count(f"attention.key_length{mla}")
    if key <= rotary:
        keys.fail(f"attention.key_length{mla}", key, f"more than rope.dimension_count, {rotary}")
    settings = experts(keys)
    groups = keys.count("expert_group_count", 1)
    q_rank = keys.raw("attention.q_lora_rank") is not None
    return {
        **settings,
        "q_lora_rank": keys.count("attention.q_lora_rank") if q_rank else None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": keys.count(f"attention.value_length{mla}"),
        "kv_b_split": not any(name.endswith(".attn_kv_b.weight") for name in keys.file.tensors),
        "n_routed_experts": settings["num_experts"],
        "n_shared_experts": keys.count("expert_shared_count"),
        "first_k_dense_replace": keys.whole("leading_dense_block_count"),
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
        "n_group": groups,
        "topk_group": keys.count("expert_group_used_count", 1),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


def _by_kind(keys: Keys, key: str, kinds: list[str]) -> dict[str, int]:
    """Return the number of heads of each kind of layer; all layers of a kind must have as many."""
    values_by_kind: dict[str, int] = {}
    for i, kind in enumerate(kinds):
        heads = keys.of_layer(key, i)
        if values_by_kind.setdefault(kind, heads) != heads:
            keys.fail(key, keys.raw(key), "the same for all layers of a kind")
    return {
        "full_attention": values_by_kind[kinds[0]],
        "sliding_attention": values_by_kind[kinds[0]],
        **values_by_kind,
    }


def _routed_layers(keys: Keys) -> list[str]:
    routed = [keys.has(f"blk.{i}.ffn_gate_inp.weight") for i in range(keys.layers())]
    return ["sparse" if is_routed else "dense" for is_routed in routed]


def _local_theta(keys: Keys) -> float:
    return keys.real("rope.freq_base_swa", keys.real("rope.freq_base", 10000.0))


def _mimo2(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for MiMo V2; the files of Flash have no scale of values."""
    need_sigmoid(keys)
    kinds, settings = keys.windows(), experts(keys)
    kv_heads = _by_kind(keys, "attention.head_count_kv", kinds)
    share = keys.count("rope.dimension_count") / keys.count("attention.key_length")
    has_value_scale = keys.raw("attention.value_scale") is not None
    return {
        **settings,
        "n_routed_experts": settings["num_experts"],
        "num_key_value_heads": kv_heads["full_attention"],
        "swa_num_key_value_heads": kv_heads["sliding_attention"],
        "v_head_dim": keys.count("attention.value_length"),
        "attention_value_scale": keys.real("attention.value_scale") if has_value_scale else None,
        "layer_types": kinds,
        "mlp_layer_types": _routed_layers(keys),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "partial_rotary_factor": share,
        "swa_rope_theta": _local_theta(keys),
    }


def _step35(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Step 3.5; llama.cpp rotates half of full layers' heads."""
    need_sigmoid(keys)
    kinds, settings, rotary = keys.windows(), experts(keys), keys.count("rope.dimension_count")
    if not keys.flag("expert_weights_norm", True):
        keys.fail("expert_weights_norm", False, "true")
    heads = _by_kind(keys, "attention.head_count", kinds)
    kv_heads = set(_by_kind(keys, "attention.head_count_kv", kinds).values())
    if len(kv_heads) > 1:
        want = "the same for all layers"
        keys.fail("attention.head_count_kv", keys.raw("attention.head_count_kv"), want)
    full_rope: dict[str, Any] = {"rope_theta": keys.real("rope.freq_base")}
    if factors := keys.numbers("rope_freqs.weight"):
        full_rope |= {"rope_type": "freq_factors", "freq_factors": factors[: rotary // 4]}
    local = {"rope_theta": _local_theta(keys), "partial_rotary_factor": 1.0}
    limits = {
        key: keys.raw(f"swiglu_clamp_{name}")
        for key, name in (("swiglu_limits", "exp"), ("swiglu_limits_shared", "shexp"))
    }
    return {
        **{key: value and value[: keys.layers()] for key, value in limits.items()},
        "moe_num_experts": settings["num_experts"],
        "moe_top_k": settings["num_experts_per_tok"],
        "moe_intermediate_size": settings["moe_intermediate_size"],
        "share_expert_dim": keys.count("expert_shared_feed_forward_length"),
        "moe_router_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "moe_gate_up_joined": any("ffn_gate_up_exps" in name for name in keys.file.tensors),
        "mlp_layer_types": _routed_layers(keys),
        "num_attention_heads": heads["full_attention"],
        "num_sliding_attention_heads": heads["sliding_attention"],
        "layer_types": kinds,
        "rope_theta": None,
        "rope_scaling": None,
        "partial_rotary_factor": None,
        "rope_parameters": {
            "full_attention": {**full_rope, "partial_rotary_factor": 0.5},
            "sliding_attention": local,
        },
    }


# The tensors of latent attention and of the experts, in layers with latent attention.
LATENT = {
    **EXPERTS,
    **shared("shared_experts"),
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
}

_STREAMS = ("fn", "base", "scale")
# Tensors of residual streams that are no weights of a module.
_MODULES = ("hc_attn_layer.hc", "hc_mlp_layer.hc", "hc_head", "hc_attn", "hc_ffn", "hc_head.hc")
_BARE_STREAMS = tuple(f"{module}_{part}" for module in _MODULES for part in _STREAMS)

# The tensors of the indexer of DeepSeek V3.2.
_INDEXER = {
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
}

_POOL = "self_attn.indexer.index_kpool_compress"  # of GLM-5.3-Flash

# The tensors of the residual streams, the gates and the sinks of Hunyuan 4.
_HY_V4 = {
    **LATENT,
    **_INDEXER,
    "attn_gate": "self_attn.linear_gate",
    "attn_sinks": "self_attn.learnable_sink_param",
    **{f"hc_attn_{part}": f"hc_attn_layer.hc_{part}" for part in _STREAMS},
    **{f"hc_ffn_{part}": f"hc_mlp_layer.hc_{part}" for part in _STREAMS},
}

# The parts of DeepSeek V4's compressors, and the tensors of its layers.
_POOLS = {"kv": "wkv", "gate": "wgate", "ape": "ape", "norm": "norm"}
_DEEPSEEK4 = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn_q_a": "attn.wq_a",
    "attn_q_a_norm": "attn.q_norm",
    "attn_q_b": "attn.wq_b",
    "attn_kv": "attn.wkv",
    "attn_kv_a_norm": "attn.kv_norm",
    "attn_output_a": "attn.wo_a",
    "attn_output_b": "attn.wo_b",
    "attn_sinks": "attn.attn_sink",
    "indexer.attn_q_b": "attn.indexer.wq_b",
    "indexer.proj": "attn.indexer.weights_proj",
    **{
        f"{at}_compressor_{part}": f"{module}.compressor.{hf}"
        for at, module in (("attn", "attn"), ("indexer", "attn.indexer"))
        for part, hf in _POOLS.items()
    },
    **{f"hc_{at}_{part}": f"hc_{at}_{part}" for at in ("attn", "ffn") for part in _STREAMS},
    "ffn_gate_inp": "ffn.gate",
    "ffn_gate_tid2eid": "ffn.gate.tid2eid",
    "exp_probs_b": "ffn.gate",
    **{
        f"ffn_{part}_{kind}": f"ffn.{hf}.{w}"
        for kind, hf in (("exps", "experts"), ("shexp", "shared_experts"))
        for part, w in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}

# The tensors of delta nets with a decay for each row of a state.
ROW_DELTA = {
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
# The tensors of the delta nets, of latent attention with gates, and of the experts of Ling 3.
_BAILING = {
    **{name: hf.replace("self_attn.", "attention.") for name, hf in LATENT.items()},
    **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
    **{f"ssm_conv1d_{part}": f"attention.{part}_conv1d" for part in "qkv"},
    "attn_output": "attention.dense",
    "attn_gate": "attention.g_proj",
    "ssm_f_a": "attention.f_proj",
    "ssm_g_a": "attention.g_proj",
    "ssm_beta": "attention.b_proj",
    "ssm_a": "attention.A_log",
    "ssm_dt": "attention.dt_bias",
    "ssm_norm": "attention.o_norm",
    "exp_probs_b": "mlp.gate.expert_bias",
}

ARCHS = {
    "glm5-next": GgufArch(
        "Glm5NextForCausalLM",
        "glm5_next_text",
        {
            **LATENT,
            **_INDEXER,
            **ROW_DELTA,
            **{f"indexer_compressor_{part}": f"{_POOL}_{part}" for part in ("ape", "gate")},
            **{f"hc_{at}_{part}": f"hc_{at}_{part}" for at in ("attn", "ffn") for part in _STREAMS},
        },
        _glm5_next,
        still=True,
        bare=(*_BARE_STREAMS, f"{_POOL}_ape", f"{_POOL}_gate"),
    ),
    "bailingmoe3": GgufArch(
        "BailingHybridForCausalLM",
        "bailing_hybrid",
        _BAILING,
        _bailing_moe3,
        top={"token_embd": "model.word_embeddings"},
        positive_rates=True,
    ),
    "hy_v3": GgufArch(
        "HYV3ForCausalLM",
        "hy_v3",
        {
            **EXPERTS,
            **shared("shared_mlp"),
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b": "mlp.expert_bias",
        },
        _hy_v3,
    ),
    "hy_v4": GgufArch(
        "HYV4ForCausalLM",
        "hy_v4",
        _HY_V4,
        _hy_v4,
        top={f"output_hc_{part}": f"model.hc_head.hc_head_{part}" for part in _STREAMS},
        bare=(*_BARE_STREAMS, ".learnable_sink_param"),
    ),
    "glm4": GgufArch(
        "Glm4ForCausalLM",
        "glm4",
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
        _glm4,
    ),
    "glm4moe": GgufArch(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            **EXPERTS,
            **shared("shared_experts"),
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
        _glm4_moe,
    ),
    "deepseek": GgufArch(
        "DeepseekForCausalLM",
        "deepseek",
        {**EXPERTS, **shared("shared_experts")},
        _deepseek_moe,
        interleaved=True,
    ),
    "dots1": GgufArch(
        "Dots1ForCausalLM",
        "dots1",
        {
            **EXPERTS,
            **shared("shared_experts"),
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
        _dots1,
    ),
    "deepseek32": GgufArch(
        "DeepseekV32ForCausalLM", "deepseek_v32", {**LATENT, **_INDEXER}, _deepseek32
    ),
    "deepseek4": GgufArch(
        "DeepseekV4ForCausalLM",
        "deepseek_v4",
        _DEEPSEEK4,
        _deepseek4,
        top={f"output_hc_{part}": f"model.hc_head.hc_{part}" for part in _STREAMS},
        bare=(*_BARE_STREAMS, ".attn_sink", ".compressor.ape", ".gate.tid2eid"),
    ),
    "mimo2": GgufArch(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        {
            **EXPERTS,
            "attn_sinks": "self_attn.sinks",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
        _mimo2,
        mixed=True,
        narrow=True,
    ),
    "step35": GgufArch(
        "Step3p5ForCausalLM",
        "step3p5",
        {
            "attn_gate": "self_attn.g_proj",
            "ffn_gate_inp": "moe.gate",
            **{f"ffn_{part}_exps": f"moe.{part}_proj" for part in PARTS},
            "ffn_gate_up_exps": "moe.gate_up_proj",
            **{f"ffn_{part}_shexp": f"share_expert.{part}_proj" for part in PARTS},
            "exp_probs_b": "moe.router_bias",
        },
        _step35,
        added_norms=True,
        mixed=True,
    ),
    "glm-dsa": GgufArch("GlmMoeDsaForCausalLM", "glm_moe_dsa", {**LATENT, **_INDEXER}, _glm_dsa),
    "deepseek2": GgufArch(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        LATENT,
        _deepseek2,
    ),
}
