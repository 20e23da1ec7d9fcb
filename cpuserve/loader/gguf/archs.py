"""The architectures of GGUF files: the model family of each, its tensors and its metadata.

To add one, add an entry to ARCHS. Tensors and keys follow the gguf package and the llama.cpp
converters; tests/loader/test_gguf_archs.py writes each architecture and reads it back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

from cpuserve.errors import ModelError

if TYPE_CHECKING:
    from cpuserve.loader.gguf.file import GgufFile


class Keys:
    """Typed access to the metadata of one architecture; errors name the key and its value."""

    def __init__(self, file: GgufFile, arch: str, *, mixed: bool = False) -> None:
        """mixed: layers may differ in size; for a number of each layer the first counts."""
        self.file = file
        self.arch = arch
        self.mixed = mixed

    def raw(self, key: str) -> Any:
        """Value of "<arch>.<key>", None if absent."""
        return self.file.value(f"{self.arch}.{key}")

    def count(self, key: str, default: int | None = None, *, some: bool = False) -> int:
        """A positive integer; without a default the key is required.

        some: there may be one for each layer, which is 0 for layers without it.
        """
        value = self.raw(key)
        if value is None and default is not None:
            return default
        if self.mixed and isinstance(value, list):
            return self.of_layer(key, 0)
        if isinstance(value, list) and len(kinds := set(value) - ({0} if some else set())) == 1:
            value = kinds.pop()
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.fail(key, value, "a positive integer (the same for all layers)")
        return value

    def of_layer(self, key: str, layer: int) -> int:
        """The same for one layer, where layers may differ."""
        value = self.raw(key)
        if isinstance(value, list):
            value = value[layer] if layer < len(value) else None
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            self.fail(key, self.raw(key), "a positive integer for each layer")
        return value

    def whole(self, key: str) -> int:
        """An integer from 0 on; 0 if the key is absent."""
        value = self.raw(key)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self.fail(key, value, "an integer that is not negative")
        return value

    def layers(self) -> int:
        """The number of blocks without the last ones that guess further tokens."""
        blocks, guessers = self.count("block_count"), self.whole("nextn_predict_layers")
        if guessers >= blocks:
            self.fail("nextn_predict_layers", guessers, f"less than block_count, {blocks}")
        return blocks - guessers

    def real(self, key: str, default: float | None = None) -> float:
        """A finite positive number; without a default the key is required."""
        value = self.raw(key)
        if value is None and default is not None:
            return default
        real = isinstance(value, int | float) and not isinstance(value, bool)
        if not real or not 0 < value < float("inf"):
            self.fail(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(key, value, "true or false")
        return value

    def layer_types(self, recurrent: str, attention: str) -> list[str]:
        """The kind of each layer; a layer without KV heads has no attention."""
        heads = self.raw("attention.head_count_kv")
        if not isinstance(heads, list):
            return [attention] * self.layers()
        return [attention if count else recurrent for count in heads[: self.layers()]]

    def windows(self) -> list[str]:
        """The kind of each layer, by whether it has a window."""
        windows = self.raw("attention.sliding_window_pattern")
        if not isinstance(windows, list) or not all(isinstance(w, bool) for w in windows):
            self.fail("attention.sliding_window_pattern", windows, "a list of booleans")
        return [("full_attention", "sliding_attention")[w] for w in windows]

    def numbers(self, tensor: str) -> list[float] | None:
        """The numbers of a small F32 tensor; None if the file has no such tensor."""
        found = self.file.tensors.get(tensor)
        return None if found is None else [float(v) for v in self.file.numbers(found)]

    def has(self, tensor: str) -> bool:
        """Whether the file has this tensor."""
        return tensor in self.file.tensors

    def fail(self, key: str, value: Any, wanted: str) -> NoReturn:
        """Raise the ModelError for "<arch>.<key>"."""
        is_what = "is missing" if value is None else f"is {value!r:.60}"
        msg = f"GGUF {self.file.path}: {self.arch}.{key} {is_what}; it must be {wanted}"
        raise ModelError(msg)


def _nothing(_: Keys) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class GgufArch:
    """How files of one architecture become a Hugging Face model.

    family: its entry of "architectures". blocks, top: Hugging Face names of a block's tensors, and
    of those outside of blocks, where they differ from Llama's; layers: what comes before the number
    of a block. settings: entries of config.json that not all architectures have.
    eps: the config's key for the epsilon of norms; layer_norm: whether they are layer norms.
    interleaved: the converter reorders q and k rows for ggml's "normal" RoPE (pairs 2j, 2j + 1).
    added_norms: it adds 1 to the weights of norms, which the family stores without; not to those
    of gated delta nets. tiled: it reorders value heads of gated delta nets. yarn: parameters of the
    family's YaRN that files do not have. mixed: layers differ in size, as `settings` says.
    """

    family: str
    model_type: str
    blocks: Mapping[str, str] = field(default_factory=dict)
    settings: Callable[[Keys], dict[str, Any]] = _nothing
    eps: str = "rms_norm_eps"
    layer_norm: bool = False
    interleaved: bool = False
    added_norms: bool = False
    tiled: bool = False
    yarn: Mapping[str, Any] = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)
    layers: str = "model.layers"
    mixed: bool = False


_PARTS = ("gate", "up", "down")
_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in _PARTS},
}
_DELTA = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",  # Qwen3-Next's until December 2025
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_GRANITE_MOE = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{f"ffn_{p}_exps": f"block_sparse_moe.experts.{p}_proj" for p in _PARTS},
    "ffn_gate_shexp": "shared_mlp.gate_proj",
    "ffn_up_shexp": "shared_mlp.up_proj",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_FALCON = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_FALCON_TOP = {"token_embd": "transformer.word_embeddings", "output_norm": "transformer.ln_f"}
_SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


# Gemma 3n and 4 have inputs of each layer.
_INPUTS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_INPUTS_TOP = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


def _experts(keys: Keys) -> dict[str, Any]:
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
    }


def _shared(name: str) -> dict[str, str]:
    return {f"ffn_{part}_shexp": f"mlp.{name}.{part}_proj" for part in _PARTS}


_GATED_SHARED = {
    **_shared("shared_expert"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}


def _shared_experts(keys: Keys) -> dict[str, Any]:
    shared = keys.count("expert_shared_feed_forward_length")
    return {**_experts(keys), "shared_expert_intermediate_size": shared}


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    return {
        **_shared_experts(keys),
        "norm_topk_prob": False,
        "qkv_bias": keys.has("blk.0.attn_q.bias"),
    }


def _delta(keys: Keys) -> dict[str, Any]:
    """The settings of gated delta nets, and which layers have them."""
    values = keys.count("ssm.time_step_rank")
    width = keys.count("ssm.inner_size")
    if width % values:
        keys.fail("ssm.inner_size", width, f"a multiple of ssm.time_step_rank, {values}")
    settings: dict[str, Any] = {
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": width // values,
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "full_attention_interval": keys.count("full_attention_interval", 4),
    }
    kinds = keys.raw("attention.recurrent_layers")
    if kinds is None:
        return settings
    if not isinstance(kinds, list) or not all(isinstance(kind, bool) for kind in kinds):
        keys.fail("attention.recurrent_layers", kinds, "a list of booleans")
    names = ("full_attention", "linear_attention")
    return {**settings, "layer_types": [names[k] for k in kinds[: keys.layers()]]}


def _qwen35(keys: Keys) -> dict[str, Any]:
    return {**_delta(keys), "linear_value_heads_tiled": True}


def _qwen35_moe(keys: Keys) -> dict[str, Any]:
    return {**_qwen35(keys), **_shared_experts(keys)}


def _qwen3_next(keys: Keys) -> dict[str, Any]:
    split = any(name.endswith(".attn_qkv.weight") for name in keys.file.tensors)
    return {**_delta(keys), **_shared_experts(keys), "linear_in_proj_split": split}


def _need_sigmoid(keys: Keys) -> None:
    if keys.raw("expert_gating_func") not in (None, 2):
        keys.fail("expert_gating_func", keys.raw("expert_gating_func"), "2, the sigmoid")


def _glm4_moe(keys: Keys) -> dict[str, Any]:
    _need_sigmoid(keys)
    settings = _experts(keys)
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


def _deepseek2(keys: Keys) -> dict[str, Any]:
    """DeepSeek V2 has a softmax, V3 and GLM-4.7-Flash a sigmoid and a bias that chooses.

    Files from before May 2025 have one matrix kv_b, and the widths of a head's keys and values
    where others have the compressed row.
    """
    if keys.raw("attention.temperature_scale"):
        wanted = "absent: queries scaled by their positions are not supported"
        keys.fail("attention.temperature_scale", keys.raw("attention.temperature_scale"), wanted)
    biased = any(name.endswith(".exp_probs_b.bias") for name in keys.file.tensors)
    gating = keys.raw("expert_gating_func")
    if gating not in (None, *_GATING):
        keys.fail("expert_gating_func", gating, "1, the softmax, or 2, the sigmoid")
    rotary = keys.count("rope.dimension_count")
    mla = "" if keys.raw("attention.key_length_mla") is None else "_mla"
    key = keys.count(f"attention.key_length{mla}")
    if key <= rotary:
        keys.fail(f"attention.key_length{mla}", key, f"more than rope.dimension_count, {rotary}")
    settings = _experts(keys)
    groups = keys.count("expert_group_count", 1)
    q_rank = keys.raw("attention.q_lora_rank") is not None
    return {
        **settings,
        **_GATING[gating or 1 + biased],
        "q_lora_rank": keys.count("attention.q_lora_rank") if q_rank else None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotary,
        "qk_nope_head_dim": key - rotary,
        "v_head_dim": keys.count(f"attention.value_length{mla}"),
        "kv_b_split": not keys.has("blk.0.attn_kv_b.weight"),
        "n_routed_experts": settings["num_experts"],
        "n_shared_experts": keys.count("expert_shared_count"),
        "first_k_dense_replace": keys.whole("leading_dense_block_count"),
        "topk_method": "greedy" if groups == 1 else "group_limited_greedy",
        "n_group": groups,
        "topk_group": keys.count("expert_group_used_count", 1),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


# Families by expert_gating_func.
_GATING = {
    1: {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"},
    2: {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"},
}


def _gemma2(keys: Keys) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(keys, 46),
        "attn_logit_softcapping": keys.real("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(keys, 62),
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 10000.0),
        "rope_theta": keys.real("rope.freq_base", 1e6),
    }


def _gemma3n(keys: Keys) -> dict[str, Any]:
    """Matrices between streams are stacks; the cutoffs of gates are in standard deviations."""
    cutoffs, widths = keys.raw("activation_sparsity_scale"), keys.raw("feed_forward_length")
    if cutoffs is not None and not (
        isinstance(cutoffs, list) and all(isinstance(c, int | float) for c in cutoffs)
    ):
        keys.fail("activation_sparsity_scale", cutoffs, "a list of numbers")
    inputs, low = (
        keys.file.tensors.get(n) for n in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight")
    )
    settings: dict[str, Any] = {
        "layer_types": keys.windows(),
        "rope_theta": keys.real("rope.freq_base", 1e6),
        "rope_local_base_freq": keys.real("rope.freq_base_swa", 1e4),
        "final_logit_softcapping": keys.real("final_logit_softcapping", 30.0),
        "num_kv_shared_layers": keys.whole("attention.shared_kv_layers"),
        "hidden_size_per_layer_input": keys.count("embedding_length_per_layer_input", 256),
        "altup_num_inputs": keys.count("altup.num_inputs", 4),
        "altup_active_idx": keys.whole("altup.active_idx"),
        "altup_stacked": True,
    }
    if isinstance(widths, list):
        settings["intermediate_size"] = widths
    if inputs is not None:
        settings["vocab_size_per_layer_input"] = inputs.shape[0]
    if low is not None:
        settings["laurel_rank"] = low.shape[0]
    if cutoffs is not None:  # -inf: no cutoff
        from statistics import NormalDist

        shares = [NormalDist().cdf(cutoff) for cutoff in cutoffs]
        settings["activation_sparsity_pattern"] = shares
    return settings


def _gemma4(keys: Keys) -> dict[str, Any]:
    """Heads and MLPs differ between layers; rope_freqs.weight is of global layers alone."""
    kinds = keys.windows()
    own_kinds, shared = set(kinds), keys.whole("attention.shared_kv_layers")
    if own_kinds != {"full_attention", "sliding_attention"}:
        keys.fail("attention.sliding_window_pattern", own_kinds, "of both kinds of layers")
    wide = kinds.index("full_attention")
    widths = keys.raw("feed_forward_length")
    twice = isinstance(widths, list) and widths[-1] == 2 * widths[0]
    factors = keys.numbers("rope_freqs.weight")
    theta = keys.real("rope.freq_base", 1e6)
    full = {"rope_type": "freq_factors", "freq_factors": factors, "rope_theta": theta}
    local = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 1e4)}
    settings: dict[str, Any] = {
        "layer_types": kinds,
        "head_dim": keys.count("attention.key_length_swa"),
        "global_head_dim": keys.count("attention.key_length"),
        "num_key_value_heads": keys.of_layer(
            "attention.head_count_kv", kinds.index("sliding_attention")
        ),
        "num_global_key_value_heads": keys.of_layer("attention.head_count_kv", wide),
        "attention_k_eq_v": not keys.has(f"blk.{wide}.attn_v.weight"),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": twice,
        "hidden_size_per_layer_input": keys.whole("embedding_length_per_layer_input"),
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "rope_scaling": None,
        "final_logit_softcapping": keys.raw("final_logit_softcapping"),
    }
    inputs = keys.file.tensors.get("per_layer_token_embd.weight")
    if inputs is not None:
        settings["vocab_size_per_layer_input"] = inputs.shape[0]
    if keys.raw("expert_count"):
        experts = _experts(keys)
        settings |= {**experts, "top_k_experts": experts["num_experts_per_tok"]}
        settings["enable_moe_block"] = True
    return settings


def _query_scalar(keys: Keys, layers: int) -> int:
    """The width that scales scores: the width of a head, but in the largest model width / heads.

    Files do not store it; the largest model is known by its number of layers.
    """
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    if keys.count("block_count") == layers:
        return width // heads
    return keys.count("attention.key_length", width // heads)


def _phi3(keys: Keys) -> dict[str, Any]:
    factors = {kind: keys.numbers(f"rope_factors_{kind}.weight") for kind in ("long", "short")}
    if not all(factors.values()):
        return {}
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
        **{f"{kind}_factor": values for kind, values in factors.items()},
    }
    if keys.raw("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = keys.real("rope.scaling.attn_factor")
    return {"rope_scaling": scaling}


def _granite(keys: Keys) -> dict[str, Any]:
    return {
        "embedding_multiplier": keys.real("embedding_scale", 1.0),
        "residual_multiplier": keys.real("residual_scale", 1.0),
        "attention_multiplier": keys.real("attention.scale"),
        "logits_scaling": keys.real("logit_scale", 1.0),
    }


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    return {
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "sliding_window": keys.count("attention.sliding_window", 128),
    }


def _granite_moe(keys: Keys) -> dict[str, Any]:
    return {
        **_granite(keys),
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "shared_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
        "mlp_input_split": True,
    }


def _granite_hybrid(keys: Keys) -> dict[str, Any]:
    """Without experts, all MLPs have the width of the shared MLP."""
    experts, width = keys.whole("expert_count"), keys.count("embedding_length")
    shared = "expert_shared_feed_forward_length" if experts else "feed_forward_length"
    inner = keys.count("ssm.inner_size")
    if inner % width:
        keys.fail("ssm.inner_size", inner, f"a multiple of embedding_length, {width}")
    return {
        **_granite(keys),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "shared_intermediate_size": keys.count(shared),
        "mlp_input_split": True,
        "layer_types": keys.layer_types("mamba", "attention"),
        "position_embedding_type": "rope" if keys.flag("rope.scaling.finetuned", True) else None,
        "mamba_expand": inner // width,
        "mamba_n_heads": keys.count("ssm.time_step_rank"),
        "mamba_n_groups": keys.count("ssm.group_count", 1),
        "mamba_d_state": keys.count("ssm.state_size"),
        "mamba_d_conv": keys.count("ssm.conv_kernel"),
        "mamba_conv_bias": any(name.endswith("ssm_conv1d.bias") for name in keys.file.tensors),
    }


def _lfm2(keys: Keys) -> dict[str, Any]:
    return {
        "layer_types": keys.layer_types("conv", "full_attention"),
        "conv_L_cache": keys.count("shortconv.l_cache"),
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_moe(keys: Keys) -> dict[str, Any]:
    _need_sigmoid(keys)
    return {
        **_lfm2(keys),
        **_experts(keys),
        "num_dense_layers": keys.whole("leading_dense_block_count"),
        "use_expert_bias": any("exp_probs_b" in name for name in keys.file.tensors),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
    }


def _stablelm(keys: Keys) -> dict[str, Any]:
    return {
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "use_qkv_bias": keys.has("blk.0.attn_q.bias"),
    }


def _mellum(keys: Keys) -> dict[str, Any]:
    has_window = keys.raw("attention.sliding_window")
    kinds = keys.windows() if has_window else ["full_attention"] * keys.layers()
    local = keys.real("rope.freq_base_swa", keys.real("rope.freq_base", 10000.0))
    return {
        **_experts(keys),
        "norm_topk_prob": True,
        "layer_types": kinds,
        "rope_parameters": {"sliding_attention": {"rope_theta": local}},
    }


def _gpt_neox(keys: Keys) -> dict[str, Any]:
    return {
        "use_parallel_residual": keys.flag("use_parallel_residual", True),
        "attention_bias": keys.has("blk.0.attn_qkv.bias"),
        "hidden_act": "gelu",
    }


def _gpt2(keys: Keys) -> dict[str, Any]:
    return {
        "n_embd": keys.count("embedding_length"),
        "n_layer": keys.count("block_count"),
        "n_head": keys.count("attention.head_count"),
        "n_inner": keys.count("feed_forward_length"),
        "n_positions": keys.count("context_length"),
        "conv1d_transposed": True,
    }


def _falcon(keys: Keys) -> dict[str, Any]:
    two = keys.has("blk.0.attn_norm_2.weight")
    return {
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 2 if two else 1,
        "num_kv_heads": keys.count("attention.head_count_kv", 1),
        "ffn_hidden_size": keys.count("feed_forward_length"),
        "bias": keys.has("blk.0.attn_qkv.bias"),
        "activation": "gelu",
    }


def _starcoder2(keys: Keys) -> dict[str, Any]:
    return {"use_bias": keys.has("blk.0.attn_q.bias"), "hidden_act": "gelu_pytorch_tanh"}


def _olmo2(keys: Keys) -> dict[str, Any]:
    """OLMo 3 has a sliding window; without a pattern in the file, three of four layers use it."""
    if not keys.raw("attention.sliding_window"):
        return {}
    three = {"architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3"}
    windows = keys.raw("attention.sliding_window_pattern")
    return three if windows is None else {**three, "layer_types": keys.windows()}


def _olmoe(keys: Keys) -> dict[str, Any]:
    if keys.raw("attention.clamp_kqv"):
        keys.fail("attention.clamp_kqv", keys.raw("attention.clamp_kqv"), "absent")
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "norm_topk_prob": keys.flag("expert_weights_norm", False),
    }


def _cohere(keys: Keys) -> dict[str, Any]:
    return {"logit_scale": keys.real("logit_scale")}


def _bert(keys: Keys) -> dict[str, Any]:
    """Files of RoBERTa have no rows before position 0, so they are files of BERT."""
    types = keys.file.tensors.get("token_types.weight")
    return {"hidden_act": "gelu", "type_vocab_size": 1 if types is None else types.shape[0]}


def _modern_bert(keys: Keys) -> dict[str, Any]:
    """Every third layer, from the first one on, attends to all tokens, unless a key differs."""
    return {
        "local_attention": keys.count("attention.sliding_window", 128),
        "global_attn_every_n_layers": keys.count("attention.sliding_window_pattern", 3),
        "rope_theta": keys.real("rope.freq_base", 160000.0),
        "local_rope_theta": keys.real("rope.freq_base_swa", 10000.0),
        "attention_bias": keys.has("blk.0.attn_qkv.bias"),
        "mlp_bias": keys.has("blk.0.ffn_up.bias"),
        "norm_bias": keys.has("output_norm.bias"),
    }


def _gemma_embedding(keys: Keys) -> dict[str, Any]:
    """Every sixth layer attends to all tokens; the others to half of the window on either side."""
    return {
        **_gemma3(keys),
        "use_bidirectional_attention": True,
        "sliding_window_pattern": keys.count("attention.sliding_window_pattern", 6),
    }


def _nomic_bert(keys: Keys) -> dict[str, Any]:
    return {**_bert(keys), "hidden_act": "silu"}


ARCHS = {
    "bert": GgufArch(
        "BertModel",
        "bert",
        {
            "attn_q": "attention.self.query",
            "attn_k": "attention.self.key",
            "attn_v": "attention.self.value",
            "attn_output": "attention.output.dense",
            "attn_output_norm": "attention.output.LayerNorm",
            "ffn_up": "intermediate.dense",
            "ffn_down": "output.dense",
            "layer_output_norm": "output.LayerNorm",
        },
        _bert,
        eps="layer_norm_eps",
        layer_norm=True,
        top={
            "token_embd": "embeddings.word_embeddings",
            "token_embd_norm": "embeddings.LayerNorm",
            "token_types": "embeddings.token_type_embeddings",
            "position_embd": "embeddings.position_embeddings",
        },
        layers="encoder.layer",
    ),
    "modern-bert": GgufArch(
        "ModernBertModel",
        "modernbert",
        {
            "attn_norm": "attn_norm",
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.Wo",
            "ffn_norm": "mlp_norm",
            "ffn_up": "mlp.Wi",
            "ffn_down": "mlp.Wo",
        },
        _modern_bert,
        eps="norm_eps",
        layer_norm=True,
        top={
            "token_embd": "model.embeddings.tok_embeddings",
            "token_embd_norm": "model.embeddings.norm",
            "output_norm": "model.final_norm",
        },
    ),
    "nomic-bert": GgufArch(
        "NomicBertModel",
        "nomic_bert",
        {
            "attn_qkv": "attn.Wqkv",
            "attn_output": "attn.out_proj",
            "attn_output_norm": "norm1",
            "ffn_gate": "mlp.fc12",
            "ffn_up": "mlp.fc11",
            "ffn_down": "mlp.fc2",
            "layer_output_norm": "norm2",
        },
        _nomic_bert,
        eps="layer_norm_eps",
        layer_norm=True,
        top={
            "token_embd": "embeddings.word_embeddings",
            "token_embd_norm": "emb_ln",
            "token_types": "embeddings.token_type_embeddings",
        },
        layers="encoder.layers",
    ),
    "llama": GgufArch("LlamaForCausalLM", "llama", interleaved=True),
    "qwen2": GgufArch("Qwen2ForCausalLM", "qwen2"),
    "qwen2moe": GgufArch(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {**_EXPERTS, **_GATED_SHARED},
        _qwen2_moe,
    ),
    "qwen3": GgufArch("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": GgufArch(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        _EXPERTS,
        lambda keys: {**_experts(keys), "norm_topk_prob": True},
    ),
    "qwen35": GgufArch(
        "Qwen3_5ForCausalLM", "qwen3_5_text", _DELTA, _qwen35, added_norms=True, tiled=True
    ),
    "qwen35moe": GgufArch(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        {**_DELTA, **_EXPERTS, **_GATED_SHARED},
        _qwen35_moe,
        added_norms=True,
        tiled=True,
    ),
    "qwen3next": GgufArch(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {**_DELTA, **_EXPERTS, **_GATED_SHARED},
        _qwen3_next,
        added_norms=True,
    ),
    "gemma2": GgufArch("Gemma2ForCausalLM", "gemma2", _SANDWICH, _gemma2, added_norms=True),
    "gemma3": GgufArch("Gemma3ForCausalLM", "gemma3_text", _SANDWICH, _gemma3, added_norms=True),
    "gemma-embedding": GgufArch(
        "Gemma3TextModel", "gemma3_text", _SANDWICH, _gemma_embedding, added_norms=True
    ),
    "gemma3n": GgufArch(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        {
            **_SANDWICH,
            **_INPUTS,
            "altup_correct_coef": "altup.correction_coefs",
            "altup_correct_scale": "altup.correct_output_scale",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        _gemma3n,
        top={
            **_INPUTS_TOP,
            "altup_proj": "model.altup_projections",
            "altup_unembd_proj": "model.altup_unembed_projections",
        },
        mixed=True,
    ),
    "gemma4": GgufArch(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            **_SANDWICH,
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
            "layer_output_scale": "layer_scalar",
            **_INPUTS,
            "ffn_gate_inp": "router.proj",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_gate_up_exps": "experts.gate_up_proj",
            "ffn_gate_exps": "experts.gate_proj",
            "ffn_up_exps": "experts.up_proj",
            "ffn_down_exps": "experts.down_proj",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        _gemma4,
        top=_INPUTS_TOP,
        mixed=True,
    ),
    "phi3": GgufArch(
        "Phi3ForCausalLM",
        "phi3",
        {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        _phi3,
    ),
    "granite": GgufArch("GraniteForCausalLM", "granite", settings=_granite, interleaved=True),
    "granitemoe": GgufArch(
        "GraniteMoeForCausalLM",
        "granitemoe",
        _GRANITE_MOE,
        _granite_moe,
        interleaved=True,
    ),
    "granitehybrid": GgufArch(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **_GRANITE_MOE,
            "ffn_gate": "shared_mlp.gate_proj",
            "ffn_up": "shared_mlp.up_proj",
            "ffn_down": "shared_mlp.output_linear",
            "ssm_in": "mamba.in_proj",
            "ssm_conv1d": "mamba.conv1d",
            "ssm_dt": "mamba.dt_bias",
            "ssm_a": "mamba.A_log",
            "ssm_d": "mamba.D",
            "ssm_norm": "mamba.norm",
            "ssm_out": "mamba.out_proj",
        },
        _granite_hybrid,
        interleaved=True,
    ),
    "lfm2": GgufArch("Lfm2ForCausalLM", "lfm2", _LFM2, _lfm2, eps="norm_eps"),
    "lfm2moe": GgufArch(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        {
            **_LFM2,
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.w1",
            "ffn_up_exps": "feed_forward.experts.w3",
            "ffn_down_exps": "feed_forward.experts.w2",
            "exp_probs_b": "feed_forward.expert_bias",
        },
        _lfm2_moe,
        eps="norm_eps",
    ),
    "smollm3": GgufArch("SmolLM3ForCausalLM", "smollm3", interleaved=True),
    "glm4": GgufArch(
        "Glm4ForCausalLM",
        "glm4",
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        },
    ),
    "glm4moe": GgufArch(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            **_EXPERTS,
            **_shared("shared_experts"),
            "post_attention_norm": "post_attention_layernorm",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
        _glm4_moe,
    ),
    "deepseek2": GgufArch(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {
            **_EXPERTS,
            **_shared("shared_experts"),
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
            "attn_k_b": "self_attn.k_b_proj",
            "attn_v_b": "self_attn.v_b_proj",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
        _deepseek2,
    ),
    "gpt-oss": GgufArch(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **_EXPERTS,
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
    "mellum": GgufArch("MellumForCausalLM", "mellum", _EXPERTS, _mellum),
    "gptneox": GgufArch(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h",
        },
        _gpt_neox,
        eps="layer_norm_eps",
        layer_norm=True,
        top={
            "token_embd": "gpt_neox.embed_in",
            "output_norm": "gpt_neox.final_layer_norm",
            "output": "embed_out",
        },
        layers="gpt_neox.layers",
    ),
    "gpt2": GgufArch(
        "GPT2LMHeadModel",
        "gpt2",
        {
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        _gpt2,
        eps="layer_norm_epsilon",
        layer_norm=True,
        top={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
        },
        layers="transformer.h",
    ),
    "falcon": GgufArch(
        "FalconForCausalLM",
        "falcon",
        _FALCON,
        _falcon,
        eps="layer_norm_epsilon",
        layer_norm=True,
        top=_FALCON_TOP,
        layers="transformer.h",
    ),
    "starcoder2": GgufArch(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        _starcoder2,
        eps="norm_epsilon",
        layer_norm=True,
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
    "olmoe": GgufArch("OlmoeForCausalLM", "olmoe", _EXPERTS, _olmoe),
    "command-r": GgufArch(
        "CohereForCausalLM", "cohere", settings=_cohere, eps="layer_norm_eps", layer_norm=True
    ),
    "cohere2": GgufArch(
        "Cohere2ForCausalLM", "cohere2", settings=_cohere, eps="layer_norm_eps", layer_norm=True
    ),
}


# Files call Mixtral "llama"; only it has experts.
_MIXTRAL = GgufArch(
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


# Falcon 40B and 180B; their files have a norm for attention and another for the MLP.
_FALCON_TWO_NORMS = replace(
    ARCHS["falcon"], blocks={**_FALCON, "attn_norm": "ln_mlp", "attn_norm_2": "ln_attn"}
)


def arch_of(file: GgufFile) -> tuple[Keys, GgufArch]:
    """The metadata of a file's architecture, and its entry.

    Raises:
        ModelError: there is no entry; it lists those that there are.
    """
    name = file.value("general.architecture")
    if not isinstance(name, str) or name not in ARCHS:
        msg = (
            f"GGUF {file.path}: architecture {name!r:.60} is not supported; "
            f"supported: {', '.join(ARCHS)}"
        )
        raise ModelError(msg)
    if name == "llama" and file.value("llama.expert_count"):
        return Keys(file, name), _MIXTRAL
    if name == "falcon" and "blk.0.attn_norm_2.weight" in file.tensors:
        return Keys(file, name), _FALCON_TWO_NORMS
    return Keys(file, name, mixed=ARCHS[name].mixed), ARCHS[name]
