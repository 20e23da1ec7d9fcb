"""GGUF files of Llama, and of families that differ from Llama only in a few settings."""

from __future__ import annotations

from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.archs.deepseek import LATENT, latent_settings
from cpuserve.loader.gguf.archs.experts import EXPERTS, PARTS, experts, need_sigmoid, shared
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys


def longrope(keys: Keys) -> dict[str, Any]:
    """Return the RoPE of a file that has two sets of factors; {} if it has none."""
    factors = {kind: keys.numbers(f"rope_factors_{kind}.weight") for kind in ("long", "short")}
    if not all(factors.values()):
        return {}
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": keys.count(
            "rope.scaling.original_context_length", keys.count("context_length")
        ),
        **{f"{kind}_factor": values for kind, values in factors.items()},
    }
    if keys.raw("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = keys.real("rope.scaling.attn_factor")
    return {"rope_scaling": scaling}


def _nanbeige(keys: Keys) -> dict[str, Any]:
    """Return no settings; Nanbeige is Llama, but its layers may run several times."""
    if (loops := keys.count("num_loops", 1)) > 1:
        want = "1, since layers that run several times are not supported. Llama and Qwen3 run"
        keys.fail("num_loops", loops, want)
    return {}


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    return {
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "sliding_window": keys.count("attention.sliding_window", 128),
    }


def _stablelm(keys: Keys) -> dict[str, Any]:
    return {
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "use_qkv_bias": keys.has("blk.0.attn_q.bias"),
        "qk_layernorm": keys.has("blk.0.attn_q_norm.weight"),
        "joined_head_norms": True,
    }


def _mellum(keys: Keys) -> dict[str, Any]:
    has_window = keys.raw("attention.sliding_window")
    kinds = keys.windows() if has_window else ["full_attention"] * keys.layers()
    local = keys.real("rope.freq_base_swa", keys.real("rope.freq_base", 10000.0))
    return {
        **experts(keys),
        "norm_topk_prob": True,
        "layer_types": kinds,
        "rope_parameters": {"sliding_attention": {"rope_theta": local}},
    }


def _olmo2(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for OLMo 3, if the file has a sliding window, or for OLMo 2.

    If a file has no sliding_window_pattern, three of four layers use the window.
    """
    if not keys.raw("attention.sliding_window"):
        return {}
    three = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    windows = keys.raw("attention.sliding_window_pattern")
    return three if windows is None else {**three, "layer_types": keys.windows()}


def _olmo(keys: Keys) -> dict[str, Any]:
    return {"clip_qkv": keys.raw("attention.clamp_kqv")}


def _relu2(_keys: Keys) -> dict[str, Any]:
    return {"hidden_act": "relu2"}


def _jais2(keys: Keys) -> dict[str, Any]:
    return {**_relu2(keys), "mlp_bias": keys.has("blk.0.ffn_up.bias")}


def _exaone_moe(keys: Keys) -> dict[str, Any]:
    need_sigmoid(keys)
    return {
        **experts(keys),
        **_exaone4(keys),
        "num_shared_experts": keys.count("expert_shared_count"),
        "first_k_dense_replace": keys.whole("leading_dense_block_count"),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


def _olmoe(keys: Keys) -> dict[str, Any]:
    return {
        **_olmo(keys),
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


def _cohere(keys: Keys) -> dict[str, Any]:
    return {
        "logit_scale": keys.real("logit_scale"),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
    }


def _ernie(keys: Keys) -> dict[str, Any]:
    return {"use_bias": keys.has("blk.0.attn_q.bias")}


def _ernie_moe(keys: Keys) -> dict[str, Any]:
    settings = experts(keys)
    return {
        **settings,
        **_ernie(keys),
        "moe_num_shared_experts": keys.whole("expert_shared_count"),
        "moe_layer_start_index": keys.whole("leading_dense_block_count"),
        "moe_layer_interval": keys.count("interleave_moe_layer_step", 1),
        "flat_expert_bias": True,
    }


def _afmoe(keys: Keys) -> dict[str, Any]:
    need_sigmoid(keys)
    return {
        **experts(keys),
        "num_shared_experts": keys.whole("expert_shared_count"),
        "num_dense_layers": keys.whole("leading_dense_block_count"),
        "route_scale": keys.real("expert_weights_scale", 1.0),
        "mup_enabled": True,
    }


def _exaone4(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for EXAONE 4; only its large model has sliding windows."""
    if not keys.raw("attention.sliding_window"):
        return {"sliding_window": None}
    return {"layer_types": keys.windows()}


def _apertus(keys: Keys) -> dict[str, Any]:
    """Return the parameters of xIELU for each layer, which files have as metadata."""
    layers = range(keys.layers())
    params = []
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        values = keys.file.value(f"xielu.{name}")
        values = [values] * len(layers) if isinstance(values, float) else values
        if not isinstance(values, list) or len(values) != len(layers):
            msg = f"GGUF {keys.file.path}: xielu.{name} must be a number for each of the layers"
            raise ModelError(msg)
        params.append([float(v) for v in values])
    return {"hidden_act": "xielu", "xielu": tuple(zip(*params, strict=True))}


def _cohere2_moe(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Cohere 2 with experts.

    In all files, the result is the mean of the routed and the shared experts.
    The first layers have a dense MLP; they have a RoPE even if they have no window.
    """
    shared_count = keys.whole("expert_shared_count")
    settings = experts(keys)
    width = settings["moe_intermediate_size"]
    shared_width = keys.count("expert_shared_feed_forward_length", max(shared_count, 1) * width)
    if shared_count and shared_width != shared_count * width:
        want = f"{shared_count * width}, the width of all shared experts"
        keys.fail("expert_shared_feed_forward_length", shared_width, want)
    need_sigmoid(keys)
    dense = keys.file.tensors.get("blk.0.ffn_up.weight")
    return {
        **settings,
        **_cohere(keys),
        "intermediate_size": width,
        "prefix_dense_intermediate_size": width if dense is None else dense.shape[0],
        "num_shared_experts": shared_count,
        "expert_selection_fn": "sigmoid",
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
        "first_k_dense_replace": keys.whole("leading_dense_block_count"),
        "layer_types": keys.windows(),
    }


def _laguna(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Laguna.

    The number of rows of attn_gate shows whether each head or each column has its own gate.
    """
    need_sigmoid(keys)
    layers, settings = range(keys.layers()), experts(keys)
    dense = keys.whole("leading_dense_block_count")
    heads = [keys.of_layer("attention.head_count", i) for i in layers]
    gate = keys.file.tensors.get("blk.0.attn_gate.weight")
    head_dim = keys.count("attention.key_length")
    kinds = ["full_attention"] * len(layers)
    if keys.raw("attention.sliding_window"):
        pattern = keys.raw("attention.sliding_window_pattern")
        interval = pattern if isinstance(pattern, int) else 4
        kinds = ["sliding_attention" if i % interval else "full_attention" for i in layers]
        if isinstance(pattern, list):
            kinds = keys.windows()
    local = keys.count("rope.dimension_count_swa", keys.count("rope.dimension_count"))
    return {
        **settings,
        "num_attention_heads_per_layer": heads,
        "gating": "per-head" if gate is None or gate.shape[0] == heads[0] else "per-element",
        "layer_types": kinds,
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in layers],
        "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
        "moe_routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "partial_rotary_factor": None,
        "rope_parameters": {
            "full_attention": {
                "partial_rotary_factor": keys.count("rope.dimension_count") / head_dim
            },
            "sliding_attention": {
                "rope_theta": keys.real("rope.freq_base_swa", keys.real("rope.freq_base")),
                "partial_rotary_factor": local / head_dim,
            },
        },
    }


def _hunyuan_moe(keys: Keys) -> dict[str, Any]:
    settings = experts(keys)
    width = settings["moe_intermediate_size"]
    return {
        **settings,
        "moe_topk": settings["num_experts_per_tok"],
        "intermediate_size": keys.count("expert_shared_feed_forward_length", width),
    }


def _llama4(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Llama 4; llama.cpp has constants for the others.

    There, sections have 8192 positions unless the window is 0, and q and k have norms unless there
    are 128 experts.
    """
    settings = experts(keys)
    has_no_window = keys.raw("attention.sliding_window") == 0
    return {
        "intermediate_size": settings["moe_intermediate_size"],
        "intermediate_size_mlp": keys.count("feed_forward_length"),
        "num_local_experts": settings["num_experts"],
        "num_experts_per_tok": settings["num_experts_per_tok"],
        "interleave_moe_layer_step": keys.count("interleave_moe_layer_step", 1),
        "attention_chunk_size": None if has_no_window else 8192,
        "no_rope_layers": [1] * keys.layers() if has_no_window else None,
        "use_qk_norm": settings["num_experts"] != 128,
    }


def _bailing_moe2(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Ling 2."""
    need_sigmoid(keys)
    return {
        **experts(keys),
        "num_shared_experts": keys.whole("expert_shared_count"),
        "first_k_dense_replace": keys.whole("leading_dense_block_count"),
        "n_group": keys.count("expert_group_count", 1),
        "topk_group": keys.count("expert_group_used_count", 1),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "use_qk_norm": keys.has("blk.0.attn_q_norm.weight"),
        "use_qkv_bias": keys.has("blk.0.attn_qkv.bias"),
    }


def _bailing_moe(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Ling 1; the converter splits queries, keys and values."""
    return {
        **experts(keys),
        "num_shared_experts": keys.whole("expert_shared_count"),
        "first_k_dense_replace": keys.whole("leading_dense_block_count"),
        "norm_topk_prob": keys.flag("expert_weights_norm", True),
        "use_qk_norm": False,
        "use_qkv_bias": keys.has("blk.0.attn_q.bias"),
        "split_qkv": True,
    }


def _minicpm3(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for MiniCPM 3; llama.cpp has constants for the multipliers.

    Files do not have the width of values: it is the width of the model for each head.
    """
    rotary, key = keys.count("rope.dimension_count"), keys.count("attention.key_length")
    if key <= rotary:
        keys.fail("attention.key_length", key, f"more than rope.dimension_count, {rotary}")
    return {
        "q_lora_rank": keys.count("attention.q_lora_rank"),
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "scale_emb": 12.0,
        "scale_depth": 1.4,
        "dim_model_base": 256,
        **longrope(keys),
    }


def _phimoe(keys: Keys) -> dict[str, Any]:
    return {
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "lm_head_bias": keys.has("output.bias"),
        **longrope(keys),
    }


def _scaled(keys: Keys) -> dict[str, Any]:
    """Return the RoPE parameters that scale queries; files of other models do not scale them."""
    rope: dict[str, Any] = {}
    if keys.raw("rope.scaling.type") in (None, "none"):
        rope["rope_type"] = "default"
    if keys.raw("attention.temperature_scale"):
        original = keys.count("rope.scaling.original_context_length")
        length = keys.count("attention.temperature_length", original)
        if length != original:
            keys.fail("attention.temperature_length", length, f"{original}, as the RoPE's length")
        rope["original_max_position_embeddings"] = original
        rope["llama_4_scaling_beta"] = keys.real("attention.temperature_scale")
    return {"rope_parameters": rope}


def _mistral4(keys: Keys) -> dict[str, Any]:
    settings = latent_settings(keys)
    if keys.raw("expert_gating_func") not in (None, 1):
        keys.fail("expert_gating_func", keys.raw("expert_gating_func"), "1, the softmax")
    return {**settings, **_scaled(keys)}


# GGUF files call Mixtral "llama" as well; of these two, only Mixtral has experts.
MIXTRAL = GgufArch(
    "MixtralForCausalLM",
    "mixtral",
    {
        "ffn_gate_inp": "block_sparse_moe.gate",
        "ffn_gate_exps": "block_sparse_moe.experts.w1",
        "ffn_up_exps": "block_sparse_moe.experts.w3",
        "ffn_down_exps": "block_sparse_moe.experts.w2",
    },
    lambda keys: {
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
    },
    interleaved=True,
)
_LATENT_ALONE = {name: hf for name, hf in LATENT.items() if "self_attn" in hf}
# The norms for queries and keys of Hunyuan.
_HUNYUAN = {
    "attn_q_norm": "self_attn.query_layernorm",
    "attn_k_norm": "self_attn.key_layernorm",
}
_EXAONE_MLP = {"gate": "fc_0", "up": "fc_1", "down": "proj"}
ARCHS = {
    "llama": GgufArch(
        "LlamaForCausalLM",
        "llama",
        interleaved=True,
        variant=lambda arch, keys: MIXTRAL if keys.raw("expert_count") else arch,
    ),
    # The converter splits the matrix that InternLM 2 has for queries, keys and values.
    "internlm2": GgufArch("LlamaForCausalLM", "llama", interleaved=True),
    "nanbeige": GgufArch("LlamaForCausalLM", "llama", {}, _nanbeige, interleaved=True),
    "mistral3": GgufArch("Ministral3ForCausalLM", "ministral3", {}, _scaled, interleaved=True),
    "mistral4": GgufArch("Mistral4ForCausalLM", "mistral4", LATENT, _mistral4),
    "phi3": GgufArch(
        "Phi3ForCausalLM",
        "phi3",
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        longrope,
    ),
    "smollm3": GgufArch("SmolLM3ForCausalLM", "smollm3", interleaved=True),
    "gpt-oss": GgufArch(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **EXPERTS,
            "ffn_gate_inp": "mlp.router",
            "attn_sinks": "self_attn.sinks",
            "post_attention_norm": "post_attention_layernorm",
        },
        _gpt_oss,
        yarn={"truncate": False},
    ),
    "stablelm": GgufArch(
        "StableLmForCausalLM",
        "stablelm",
        settings=_stablelm,
        eps="layer_norm_eps",
        layer_norm=True,
    ),
    "orion": GgufArch("OrionForCausalLM", "orion", layer_norm=True),
    "pangu-embedded": GgufArch(
        "PanguEmbeddedForCausalLM",
        "PanguEmbedded",
        settings=lambda keys: {
            "qkv_bias": keys.has("blk.0.attn_q.bias"),
            "bias": keys.has("blk.0.attn_output.bias"),
        },
    ),
    # GLM-4-9B and GLM-Edge; llama.cpp reads ChatGLM 3 as the same architecture.
    "chatglm": GgufArch("GlmForCausalLM", "glm", {"ffn_up": "mlp.gate_up_proj"}),
    "xverse": GgufArch("XverseForCausalLM", "xverse", interleaved=True),
    "exaone": GgufArch(
        "ExaoneForCausalLM",
        "exaone",
        {
            "attn_norm": "ln_1",
            "ffn_norm": "ln_2",
            **{f"attn_{part}": f"attn.attention.{part}_proj" for part in "qkv"},
            "attn_output": "attn.attention.out_proj",
            **{f"ffn_{part}": f"mlp.c_{at}" for part, at in _EXAONE_MLP.items()},
        },
        top={"token_embd": "transformer.wte", "output_norm": "transformer.ln_f"},
        layers="transformer.h",
    ),
    "mellum": GgufArch("MellumForCausalLM", "mellum", EXPERTS, _mellum),
    "olmo": GgufArch("OlmoForCausalLM", "olmo", {}, _olmo, layer_norm=True, interleaved=True),
    "nemotron": GgufArch(
        "NemotronForCausalLM",
        "nemotron",
        {},
        _relu2,
        eps="norm_eps",
        layer_norm=True,
        added_norms=True,
    ),
    "jais2": GgufArch(
        "Jais2ForCausalLM", "jais2", {}, _jais2, eps="layer_norm_eps", layer_norm=True
    ),
    "bitnet": GgufArch(
        "BitNetForCausalLM",
        "bitnet",
        {"attn_sub_norm": "self_attn.attn_sub_norm", "ffn_sub_norm": "mlp.ffn_sub_norm"},
    ),
    "exaone-moe": GgufArch(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        {
            **EXPERTS,
            **shared("shared_experts"),
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
        _exaone_moe,
    ),
    "olmo2": GgufArch(
        "Olmo2ForCausalLM",
        "olmo2",
        {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _olmo2,
    ),
    "olmoe": GgufArch("OlmoeForCausalLM", "olmoe", EXPERTS, _olmoe),
    "command-r": GgufArch(
        "CohereForCausalLM", "cohere", settings=_cohere, eps="layer_norm_eps", layer_norm=True
    ),
    "cohere2": GgufArch(
        "Cohere2ForCausalLM", "cohere2", settings=_cohere, eps="layer_norm_eps", layer_norm=True
    ),
    "arcee": GgufArch(
        "ArceeForCausalLM", "arcee", settings=lambda _: {"hidden_act": "relu2"}, interleaved=True
    ),
    "seed_oss": GgufArch(
        "SeedOssForCausalLM", "seed_oss", {"post_attention_norm": "post_attention_layernorm"}
    ),
    "paddleocr": GgufArch("LlamaForCausalLM", "llama"),
    "ernie4_5": GgufArch("Ernie4_5ForCausalLM", "ernie4_5", settings=_ernie),
    "ernie4_5-moe": GgufArch(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {
            **EXPERTS,
            **shared("shared_experts"),
            "exp_probs_b": "mlp.moe_statics.e_score_correction_bias",
        },
        _ernie_moe,
    ),
    "afmoe": GgufArch(
        "AfmoeForCausalLM",
        "afmoe",
        {
            **EXPERTS,
            **shared("shared_experts"),
            "ffn_gate_inp": "mlp.router.gate",
            "exp_probs_b": "mlp.expert_bias",
            "attn_gate": "self_attn.gate_proj",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_mlp_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        _afmoe,
    ),
    "exaone4": GgufArch(
        "Exaone4ForCausalLM",
        "exaone4",
        {
            "post_attention_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        _exaone4,
    ),
    "cohere2moe": GgufArch(
        "Cohere2MoeForCausalLM",
        "cohere2_moe",
        {**EXPERTS, **shared("shared_experts")},
        _cohere2_moe,
        eps="layer_norm_eps",
        layer_norm=True,
    ),
    "laguna": GgufArch(
        "LagunaForCausalLM",
        "laguna",
        {
            **EXPERTS,
            **shared("shared_expert"),
            "attn_gate": "self_attn.g_proj",
            "exp_probs_b": "mlp.experts.e_score_correction_bias",
        },
        _laguna,
        mixed=True,
    ),
    "apertus": GgufArch(
        "ApertusForCausalLM",
        "apertus",
        {"attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        _apertus,
    ),
    "hunyuan-dense": GgufArch("HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", _HUNYUAN),
    "hunyuan-moe": GgufArch(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        {**EXPERTS, **shared("shared_mlp"), "ffn_gate_inp": "mlp.gate.wg", **_HUNYUAN},
        _hunyuan_moe,
    ),
    "llama4": GgufArch(
        "Llama4ForCausalLM",
        "llama4_text",
        {
            "ffn_gate_inp": "feed_forward.router",
            **{f"ffn_{part}": f"feed_forward.{part}_proj" for part in PARTS},
            **{f"ffn_{part}_exps": f"feed_forward.experts.{part}_proj" for part in PARTS},
            **{f"ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in PARTS},
        },
        _llama4,
    ),
    "bailingmoe2": GgufArch(
        "BailingMoeV2ForCausalLM",
        "bailing_moe_v2",
        {
            **EXPERTS,
            **shared("shared_experts"),
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "attn_q_norm": "attention.query_layernorm",
            "attn_k_norm": "attention.key_layernorm",
            "exp_probs_b": "mlp.gate.expert_bias",
        },
        _bailing_moe2,
        top={"token_embd": "model.word_embeddings"},
    ),
    "bailingmoe": GgufArch(
        "BailingMoeForCausalLM",
        "bailing_moe",
        {
            **EXPERTS,
            **shared("shared_experts"),
            **{f"attn_{part}": f"attention.{part}_proj" for part in "qkv"},
            "attn_output": "attention.dense",
        },
        _bailing_moe,
        top={"token_embd": "model.word_embeddings"},
        interleaved=True,
    ),
    "minicpm3": GgufArch("MiniCPM3ForCausalLM", "minicpm3", _LATENT_ALONE, _minicpm3),
    "phimoe": GgufArch("PhimoeForCausalLM", "phimoe", MIXTRAL.blocks, _phimoe),
}
