"""Families: MiniMax."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, TextType, Whole, sizes

FAMILIES = (
    ModelFamily(
        ("MiniMaxForCausalLM", "MiniMaxM1ForCausalLM", "MiniMaxText01ForCausalLM"),
        "cpuserve.models.minimax:MiniMax",
    ),
    ModelFamily(("MiniMaxM2ForCausalLM",), "cpuserve.models.mixtures:MiniMaxM2"),
    ModelFamily(
        ("MiniMaxM3VLForCausalLM", "MiniMaxM3SparseForCausalLM"),
        "cpuserve.models.minimax_m3:MiniMaxM3",
        text_types={
            "minimax_m3_vl_text": TextType(
                sizes(
                    *(200064, 6144, 3072, 60, 64, 524288),
                    num_key_value_heads=4,
                    num_local_experts=128,
                    num_experts_per_tok=4,
                )
            )
        },
        wholes=(
            Whole(("MiniMaxM3SparseForConditionalGeneration",), "minimax_m3_vl_text", tied=False),
        ),
    ),
)
