"""GGUF files of MiniMax 01, M2 and M3."""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.archs.experts import PARTS, experts, need_sigmoid
from cpuserve.loader.gguf.archs.llama_like import MIXTRAL
from cpuserve.loader.gguf.archs.record import GgufArch
from cpuserve.loader.gguf.keys import Keys


def _minimax_01(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for MiniMax 01; files have one factor for all residuals."""
    layers = keys.layers()
    recurrent = keys.raw("attention.recurrent_layers")
    if recurrent is None:
        interval = keys.count("full_attention_interval", 8)
        recurrent = [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(recurrent, list):
        keys.fail("attention.recurrent_layers", recurrent, "a list with a boolean for each layer")
    kinds = ("full_attention", "linear_attention")
    alpha = keys.real("residual_scale")
    return {
        **{f"{part}_alpha_factor": alpha for part in ("linear_attn", "full_attn", "mlp")},
        "num_local_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "lightning_output": "o_proj",
        "layer_types": [kinds[bool(is_so)] for is_so in recurrent[:layers]],
    }


def _minimax_m2(keys: Keys) -> dict[str, Any]:
    need_sigmoid(keys)
    settings = experts(keys)
    return {
        "num_local_experts": settings["num_experts"],
        "num_experts_per_tok": settings["num_experts_per_tok"],
        "intermediate_size": settings["moe_intermediate_size"],
    }


def _minimax_m3(keys: Keys) -> dict[str, Any]:
    """Return entries of config.json for MiniMax M3; layers with experts have an indexer."""
    need_sigmoid(keys)
    if not keys.flag("expert_weights_norm", True):
        keys.fail("expert_weights_norm", False, "true")
    settings, dense = experts(keys), keys.whole("leading_dense_block_count")
    width, layers = settings["moe_intermediate_size"], range(keys.layers())
    return {
        "num_local_experts": settings["num_experts"],
        "num_experts_per_tok": settings["num_experts_per_tok"],
        "intermediate_size": width,
        "dense_intermediate_size": keys.count("feed_forward_length"),
        "shared_intermediate_size": width * keys.count("expert_shared_count"),
        "routed_scaling_factor": keys.real("expert_weights_scale", 1.0),
        "mlp_layer_types": ["dense" if i < dense else "sparse" for i in layers],
        "layer_types": ["full_attention" if i < dense else "minimax_m3_sparse" for i in layers],
        "index_block_size": keys.count("attention.indexer.block_size"),
        "index_topk_blocks": keys.count("attention.indexer.top_k"),
    }


_MINIMAX = {**MIXTRAL.blocks, "exp_probs_b": "block_sparse_moe.e_score_correction_bias"}
_OF = ("proj", "norm")  # the tensors for queries and for keys in an indexer of MiniMax M3

ARCHS = {
    "minimax-01": GgufArch(
        "MiniMaxForCausalLM",
        "minimax",
        {
            **MIXTRAL.blocks,
            "attn_qkv": "self_attn.qkv_proj",
            "attn_norm_2": "self_attn.norm",
            "attn_gate": "self_attn.output_gate",
        },
        _minimax_01,
    ),
    "minimax-m2": GgufArch("MiniMaxM2ForCausalLM", "minimax_m2", _MINIMAX, _minimax_m2),
    "minimax-m3": GgufArch(
        "MiniMaxM3VLForCausalLM",
        "minimax_m3_vl_text",
        {
            **_MINIMAX,
            **{f"ffn_{p}_shexp": f"block_sparse_moe.shared_experts.{p}_proj" for p in PARTS},
            **{f"indexer.{part}_{n}": f"self_attn.index_{part}_{n}" for part in "qk" for n in _OF},
        },
        _minimax_m3,
        added_norms=True,
    ),
}
