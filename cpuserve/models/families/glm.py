"""Families: GLM."""

from __future__ import annotations

from cpuserve.models.family import NEXTN, Guesses, ModelFamily, TextType, Whole, sizes

FAMILIES = (
    ModelFamily(
        ("Glm4ForCausalLM",),
        "cpuserve.models.glm4:Glm4",
        text_types={
            "glm4v_text": TextType(
                sizes(
                    *(151552, 4096, 13696, 40, 32, 32768),
                    num_key_value_heads=2,
                    rms_norm_eps=1e-5,
                    partial_rotary_factor=1.0,
                    attention_bias=True,
                ),
                splits_width=True,
            ),
            "glm_ocr_text": TextType(
                sizes(
                    *(59392, 1024, 4096, 16, 16, 131072),
                    num_key_value_heads=8,
                    rms_norm_eps=1e-5,
                    partial_rotary_factor=1.0,
                    attention_bias=False,
                ),
                splits_width=True,
            ),
        },
        wholes=(
            Whole(
                ("Glm46VForConditionalGeneration",),
                "glm4v_text",
                ("glm4v_moe_text",),
                tied=False,
                tower="cpuserve.models.glm_ocr:Glm4vTower",
                media={"glm46v": "cpuserve.media.pictures.families.qwen_vl:glm_ocr"},
            ),
            Whole(
                ("Glm4vForConditionalGeneration",),
                "glm4v_text",
                tied=False,
                tower="cpuserve.models.glm_ocr:Glm4vTower",
                media={"glm4v": "cpuserve.media.pictures.families.qwen_vl:glm_ocr"},
            ),
            Whole(
                ("GlmOcrForConditionalGeneration",),
                "glm_ocr_text",
                tied=False,
                tower="cpuserve.models.glm_ocr:GlmOcrTower",
                media={"glm_ocr": "cpuserve.media.pictures.families.qwen_vl:glm_ocr"},
            ),
        ),
    ),
    ModelFamily(
        ("Glm4MoeForCausalLM",),
        "cpuserve.models.glm4:Glm4Moe",
        text_types={
            "glm4v_moe_text": TextType(
                sizes(
                    *(151424, 4096, 10944, 46, 96, 65536),
                    num_key_value_heads=8,
                    rms_norm_eps=1e-5,
                    partial_rotary_factor=0.5,
                    attention_bias=True,
                    moe_intermediate_size=1408,
                    num_experts_per_tok=8,
                    n_shared_experts=1,
                    n_routed_experts=128,
                    routed_scaling_factor=1.0,
                    n_group=1,
                    topk_group=1,
                    first_k_dense_replace=1,
                    norm_topk_prob=True,
                ),
                splits_width=True,
            )
        },
        wholes=(
            Whole(
                ("Glm4vMoeForConditionalGeneration",),
                "glm4v_moe_text",
                tied=False,
                tower="cpuserve.models.glm_ocr:Glm4vTower",
                media={"glm4v_moe": "cpuserve.media.pictures.families.qwen_vl:glm_ocr"},
            ),
        ),
        guesses=Guesses(NEXTN),
        mtp_methods=("glm4_moe_mtp",),
    ),
    ModelFamily(
        ("Glm4MoeLiteForCausalLM",),
        "cpuserve.models.deepseek:Glm4MoeLite",
        shared_gguf={"Glm4MoeLiteForCausalLM": "deepseek2"},
        guesses=Guesses(NEXTN),
        mtp_methods=("glm4_moe_lite_mtp",),
    ),
    ModelFamily(
        ("Glm5NextForCausalLM",),
        "cpuserve.models.glm5_next:Glm5Next",
        text_types={"glm5_next_text": TextType()},
        wholes=(Whole(("Glm5NextForConditionalGeneration",), "glm5_next_text"),),
    ),
    ModelFamily(("GlmForCausalLM",), "cpuserve.models.glm4:Glm"),
    ModelFamily(
        ("GlmMoeDsaForCausalLM",),
        "cpuserve.models.deepseek:GlmMoeDsa",
        guesses=Guesses(NEXTN),
    ),
    ModelFamily(("SolarOpenForCausalLM",), "cpuserve.models.glm4:SolarOpen"),
)
