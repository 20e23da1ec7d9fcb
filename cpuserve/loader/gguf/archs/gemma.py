"""GGUF files of Gemma 1 to 3, of EmbeddingGemma and of Muse Glimmer."""

from __future__ import annotations

from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys

SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


# The tensors of a block for per-layer embeddings.
LAYER_INPUTS = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}


LAYER_INPUTS_TOP = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


def _gemma(_keys: Keys) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh"}


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


def _gemma_embedding(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for EmbeddingGemma: by default, every sixth layer is global.

    In all other layers, a token attends to half of the window on either side.
    """
    return {
        **_gemma3(keys),
        "use_bidirectional_attention": True,
        "sliding_window_pattern": keys.count("attention.sliding_window_pattern", 6),
    }


def _gemma3n(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Gemma 3n; files stack the matrices between AltUp streams.

    The key activation_sparsity_scale has the cutoff of the gates in each layer,
    in standard deviations.
    """
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
    if cutoffs is not None:  # -inf means no cutoff
        from statistics import NormalDist

        shares = [NormalDist().cdf(cutoff) for cutoff in cutoffs]
        settings["activation_sparsity_pattern"] = shares
    return settings


def _query_scalar(keys: Keys, layers: int) -> int:
    """Return query_pre_attn_scalar: attention scores are divided by its square root.

    The value is the width of a head. In the largest model of the family it is hidden size / heads.
    Files do not store it. `layers` is the number of blocks of the largest model.
    """
    width, heads = keys.count("embedding_length"), keys.count("attention.head_count")
    if keys.count("block_count") == layers:
        return width // heads
    return keys.count("attention.key_length", width // heads)


def _muse_glimmer(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for Muse Glimmer; norms of queries have one factor for all."""
    kinds, base = keys.windows(), keys.real("rope.freq_base", 10000.0)
    scales: dict[str, set[float]] = {
        part: {
            number
            for layer in range(len(kinds))
            for number in keys.numbers(f"blk.{layer}.attn_{part}_norm.weight") or ()
        }
        for part in "qk"
    }
    if len(scales["q"]) != 1 or scales["k"] != {1.0} or not min(scales["q"]) > 0:
        msg = (
            f"GGUF {keys.file.path}: attn_q_norm must have the same number above 0 in all layers, "
            "and attn_k_norm must have 1"
        )
        raise ModelError(msg)
    return {
        "layer_types": kinds,
        "layer_rope_theta": [base if kind == "sliding_attention" else 0 for kind in kinds],
        "qk_scale_factor": scales["q"].pop(),
        "output_multiplier": keys.real("logit_scale"),
        "final_logit_softcapping": keys.raw("final_logit_softcapping"),
    }


ARCHS = {
    "muse-glimmer": GgufArch(
        "MuseGlimmerForCausalLM",
        "muse_glimmer_text",
        {**SANDWICH, "attn_gate": "self_attn.gate_proj"},
        _muse_glimmer,
        interleaved=True,
        added_norms=True,
        plain_last=True,
    ),
    "gemma": GgufArch("GemmaForCausalLM", "gemma", {}, _gemma, added_norms=True),
    "gemma2": GgufArch("Gemma2ForCausalLM", "gemma2", SANDWICH, _gemma2, added_norms=True),
    "gemma3": GgufArch("Gemma3ForCausalLM", "gemma3_text", SANDWICH, _gemma3, added_norms=True),
    "gemma-embedding": GgufArch(
        "Gemma3TextModel", "gemma3_text", SANDWICH, _gemma_embedding, added_norms=True
    ),
    "gemma3n": GgufArch(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        {
            **SANDWICH,
            **LAYER_INPUTS,
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
            **LAYER_INPUTS_TOP,
            "altup_proj": "model.altup_projections",
            "altup_unembd_proj": "model.altup_unembed_projections",
        },
        mixed=True,
    ),
}
