"""Families: Qwen."""

from __future__ import annotations

from cpuserve.models.family import Guesses, HeadNames, ModelFamily, TextType, Whole, sizes

# MiMo 7B is a Qwen2 with a head.
_MIMO_7B = HeadNames(
    {
        "model.layers.0.": "model.mtp_layers.0.",
        "guess.fc.": "model.mtp_layers.0.input_proj.",
        "guess.embedding_norm.": "model.mtp_layers.0.token_layernorm.",
        "guess.hidden_norm.": "model.mtp_layers.0.hidden_layernorm.",
        "model.norm.": "model.mtp_layers.0.final_layernorm.",
    }
)
_QWEN2_VL = TextType(
    sizes(
        *(152064, 8192, 29568, 80, 64, 32768),
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
    )
)

FAMILIES = (
    ModelFamily(
        ("Qwen2ForCausalLM", "MiMoForCausalLM"),
        "cpuserve.models.decoders:Qwen2",
        text_types={
            "qwen2": TextType(sizes(151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32)),
            "qwen2_5_omni_text": TextType(
                sizes(*(152064, 3584, 18944, 28, 28, 32768), num_key_value_heads=4, rope_theta=1e6)
            ),
            "qwen2_5_vl_text": _QWEN2_VL,
            "qwen2_vl_text": _QWEN2_VL,
        },
        wholes=(
            Whole(
                ("Qwen2VLForConditionalGeneration",),
                "qwen2_vl_text",
                tied=False,
                tower="cpuserve.models.qwen2_vl:Qwen2VLTower",
                media={"qwen2_vl": "cpuserve.media.pictures.families.qwen_vl:qwen_vl"},
            ),
            Whole(
                (
                    "Qwen2_5OmniForConditionalGeneration",
                    "Qwen2_5OmniModel",
                    "Qwen2_5OmniThinkerForConditionalGeneration",
                ),
                "qwen2_5_omni_text",
                tied=False,
                tower="cpuserve.models.qwen2_vl:QWEN2_5_OMNI",
                media={
                    "qwen2_5_omni": "cpuserve.media.pictures.families.qwen_vl:qwen2_5_omni",
                    "qwen2_5_omni_thinker": "cpuserve.media.pictures.families.qwen_vl:qwen2_5_omni",
                },
            ),
            Whole(
                ("Qwen2_5_VLForConditionalGeneration",),
                "qwen2_5_vl_text",
                tied=False,
                tower="cpuserve.models.qwen2_vl:QWEN2_5_VL",
                media={"qwen2_5_vl": "cpuserve.media.pictures.families.qwen_vl:qwen_vl"},
            ),
        ),
        classifiers=("Qwen2ForSequenceClassification",),
        taggers=("Qwen2ForTokenClassification",),
        guesses=Guesses(_MIMO_7B, hidden_first=True),
        mtp_methods=("mimo_mtp",),
    ),
    ModelFamily(("Qwen2MoeForCausalLM",), "cpuserve.models.mixtures:Qwen2Moe"),
    ModelFamily(
        ("Qwen3ForCausalLM",),
        "cpuserve.models.decoders:Qwen3",
        text_types={
            "qwen3": TextType(sizes(151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32)),
            "qwen3_vl_text": TextType(
                sizes(
                    *(151936, 4096, 22016, 32, 32, 128000),
                    num_key_value_heads=32,
                    head_dim=128,
                    rope_theta=5e5,
                )
            ),
        },
        wholes=(
            Whole(
                ("Qwen3VLForConditionalGeneration",),
                "qwen3_vl_text",
                tied=False,
                tower="cpuserve.models.qwen_vl:QWEN3_VL",
                media={"qwen3_vl": "cpuserve.media.pictures.families.qwen_vl:qwen_vl"},
            ),
        ),
        rerankers=("Qwen3ForSequenceClassification",),
        taggers=("Qwen3ForTokenClassification",),
        gguf_rerankers=True,
        judges=True,
    ),
    ModelFamily(
        ("Qwen3MoeForCausalLM",),
        "cpuserve.models.mixtures:Qwen3Moe",
        text_types={
            "qwen3_moe": TextType(),
            "qwen3_omni_moe_text": TextType(
                sizes(
                    *(3584, 2048, 18944, 28, 28, 32768),
                    num_key_value_heads=4,
                    rope_theta=1e6,
                    norm_topk_prob=True,
                    num_experts=128,
                    num_experts_per_tok=8,
                    moe_intermediate_size=768,
                )
            ),
            "qwen3_vl_moe_text": TextType(
                sizes(
                    *(151936, 2048, 5632, 24, 16, 128000),
                    num_key_value_heads=16,
                    head_dim=128,
                    rope_theta=5e5,
                    norm_topk_prob=True,
                    num_experts=60,
                    num_experts_per_tok=4,
                    moe_intermediate_size=1408,
                )
            ),
        },
        wholes=(
            Whole(
                (
                    "Qwen3OmniMoeForConditionalGeneration",
                    "Qwen3OmniMoeThinkerForConditionalGeneration",
                ),
                "qwen3_omni_moe_text",
                tied=False,
                tower="cpuserve.models.qwen_vl:QWEN3_OMNI",
                media={
                    "qwen3_omni_moe": "cpuserve.media.pictures.families.qwen_vl:qwen3_omni",
                    "qwen3_omni_moe_thinker": "cpuserve.media.pictures.families.qwen_vl:qwen3_omni",
                },
            ),
            Whole(
                ("Qwen3VLMoeForConditionalGeneration",),
                "qwen3_vl_moe_text",
                tied=False,
                tower="cpuserve.models.qwen_vl:QWEN3_VL",
                media={"qwen3_vl_moe": "cpuserve.media.pictures.families.qwen_vl:qwen_vl"},
            ),
        ),
    ),
    ModelFamily(
        ("Qwen4ExpForCausalLM",),
        "cpuserve.models.qwen4_exp:Qwen4Exp",
        text_types={"qwen4_exp_text": TextType()},
        wholes=(Whole(("Qwen4ExpForConditionalGeneration",), "qwen4_exp_text"),),
    ),
)
