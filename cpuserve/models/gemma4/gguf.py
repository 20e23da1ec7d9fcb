"""GGUF files of Gemma 4 and of its assistants."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.experts import experts
from cpuserve.loader.gguf.archs.gemma import LAYER_INPUTS, LAYER_INPUTS_TOP, SANDWICH
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys


def _text(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Gemma 4, where sizes differ by layer.

    The factors in rope_freqs.weight apply only to global layers.
    """
    kinds = keys.windows()
    own_kinds, shared_layers = set(kinds), keys.whole("attention.shared_kv_layers")
    if own_kinds != {"full_attention", "sliding_attention"}:
        keys.fail("attention.sliding_window_pattern", own_kinds, "of both kinds of layers")
    full_layer = kinds.index("full_attention")
    widths = keys.raw("feed_forward_length")
    has_double_width = isinstance(widths, list) and widths[-1] == 2 * widths[0]
    factors = keys.numbers("rope_freqs.weight")
    theta = keys.real("rope.freq_base", 1e6)
    full_rope = {"rope_type": "freq_factors", "freq_factors": factors, "rope_theta": theta}
    local = {"rope_type": "default", "rope_theta": keys.real("rope.freq_base_swa", 1e4)}
    settings: dict[str, Any] = {
        "layer_types": kinds,
        "head_dim": keys.count("attention.key_length_swa"),
        "global_head_dim": keys.count("attention.key_length"),
        "num_key_value_heads": keys.of_layer(
            "attention.head_count_kv", kinds.index("sliding_attention")
        ),
        "num_global_key_value_heads": keys.of_layer("attention.head_count_kv", full_layer),
        "attention_k_eq_v": not keys.has(f"blk.{full_layer}.attn_v.weight"),
        "num_kv_shared_layers": shared_layers,
        "use_double_wide_mlp": has_double_width,
        "hidden_size_per_layer_input": keys.whole("embedding_length_per_layer_input"),
        "rope_parameters": {"full_attention": full_rope, "sliding_attention": local},
        "rope_scaling": None,
        "final_logit_softcapping": keys.raw("final_logit_softcapping"),
    }
    inputs = keys.file.tensors.get("per_layer_token_embd.weight")
    if inputs is not None:
        settings["vocab_size_per_layer_input"] = inputs.shape[0]
    if keys.raw("expert_count"):
        mixture = experts(keys)
        settings |= {**mixture, "top_k_experts": mixture["num_experts_per_tok"]}
        settings["enable_moe_block"] = True
    return settings


def _assistant(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for an assistant of Gemma 4, as of a model of its own."""
    return {**_text(keys), "backbone_hidden_size": keys.count("embedding_length_out")}


TEXT = GgufArch(
    "Gemma4ForCausalLM",
    "gemma4_text",
    {
        **SANDWICH,
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
        "layer_output_scale": "layer_scalar",
        **LAYER_INPUTS,
        "ffn_gate_inp": "router.proj",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_gate_up_exps": "experts.gate_up_proj",
        "ffn_gate_exps": "experts.gate_proj",
        "ffn_up_exps": "experts.up_proj",
        "ffn_down_exps": "experts.down_proj",
        "ffn_down_exps.scale": "router.per_expert_scale",
    },
    _text,
    top=LAYER_INPUTS_TOP,
    mixed=True,
)
ASSISTANT = GgufArch(
    "Gemma4AssistantForCausalLM",
    "gemma4_assistant",
    {**SANDWICH, "layer_output_scale": "layer_scalar"},
    _assistant,
    top={
        "nextn.pre_projection": "pre_projection",
        "nextn.post_projection": "post_projection",
    },
    mixed=True,
    guesses=True,
)
