"""Projectors of Gemma 4. Source: the converters and tools/mtmd of llama.cpp."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.keys import Keys
from cpuserve.loader.gguf.projectors.record import Projector, read_pixels, read_vision, shape_of
from cpuserve.models.towers import PICTURES

_BLOCKS = {
    "ln1": "input_layernorm",
    "ln2": "pre_feedforward_layernorm",
    "attn_post_norm": "post_attention_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj.linear",
    "attn_k": "self_attn.k_proj.linear",
    "attn_v": "self_attn.v_proj.linear",
    "attn_out": "self_attn.o_proj.linear",
    "ffn_gate": "mlp.gate_proj.linear",
    "ffn_up": "mlp.up_proj.linear",
    "ffn_down": "mlp.down_proj.linear",
}
# The widths of E2B and E4B, where each token of a picture sees only the tokens before it.
_CAUSAL_WIDTHS = (1536, 2560)


def _tower(keys: Keys) -> dict[str, Any]:
    vision, merge = read_vision(keys), keys.count("projector.scale_factor", 3)
    heads = vision["num_attention_heads"]
    (q, _), (k, _) = (shape_of(keys, f"v.blk.0.attn_{part}.weight", 2) for part in "qk")
    vision |= {
        "hidden_activation": "gelu_pytorch_tanh",  # of all published models; files do not have it
        "num_key_value_heads": k * heads // q,
        "head_dim": q // heads,
        "rms_norm_eps": vision["layer_norm_eps"],
        "pooling_kernel_size": merge,
        "position_embedding_size": shape_of(keys, "v.position_embd.weight", 3)[1],
        "use_clipped_linears": keys.has("v.blk.0.attn_q.input_max"),
        "standardize": keys.has("v.std_bias"),
    }
    # As in llama.cpp: files do not say in which models a token of a picture sees all of it.
    sees_whole_picture = keys.count("projection_dim") not in _CAUSAL_WIDTHS
    return {
        "model_type": "gemma4",
        "vision_config": vision,
        "text_config": {"use_bidirectional_attention": "vision" if sees_whole_picture else None},
        PICTURES: {
            **read_pixels(keys),
            "patch_size": vision["patch_size"],
            "pooling_kernel_size": merge,
            "max_soft_tokens": 280,
            "resample": 3,
        },
    }


def _unified(keys: Keys) -> dict[str, Any]:
    merge, width = keys.count("projector.scale_factor", 3), keys.count("embedding_length")
    _, table, _ = shape_of(keys, "v.position_embd.weight", 3)
    sizes = {"patch_size": keys.count("patch_size"), "pooling_kernel_size": merge}
    return {
        "model_type": "gemma4_unified",
        "vision_config": {
            **sizes,
            "mm_embed_dim": width,
            "output_proj_dims": width,
            "mm_posemb_size": table,
            "rms_norm_eps": keys.real("attention.layer_norm_epsilon"),
        },
        "text_config": {"use_bidirectional_attention": "vision"},
        PICTURES: {**read_pixels(keys), **sizes, "max_soft_tokens": 280, "resample": 3},
    }


TOWER = Projector(
    {"Gemma4ForCausalLM": "Gemma4ForConditionalGeneration"},
    _tower,
    {
        "v.patch_embd": "vision_tower.patch_embedder.input_proj",
        "v.position_embd.weight": "vision_tower.patch_embedder.position_embedding_table",
        "v.std_bias": "vision_tower.std_bias",
        "v.std_scale": "vision_tower.std_scale",
        "mm.input_projection": "model.embed_vision.embedding_projection",
    },
    "vision_tower.encoder.layers",
    _BLOCKS,
    channels_last=("v.patch_embd.weight",),
)
UNIFIED = Projector(
    {"Gemma4ForCausalLM": "Gemma4UnifiedForConditionalGeneration"},
    _unified,
    {
        "v.patch_norm.1": "model.vision_embedder.patch_ln1",
        "v.patch_embd": "model.vision_embedder.patch_dense",
        "v.patch_norm.2": "model.vision_embedder.patch_ln2",
        "v.position_embd.weight": "model.vision_embedder.pos_embedding",
        "v.patch_norm.3": "model.vision_embedder.pos_norm",
        "mm.input_projection": "model.embed_vision.embedding_projection",
    },
    "",
    {},
    channels_last=("v.patch_embd.weight", "v.patch_norm.1.weight", "v.patch_norm.1.bias"),
    turned=("v.position_embd.weight",),
)
