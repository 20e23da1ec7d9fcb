"""Families: Bailing (Ling, Ring) and Sarvam."""

from __future__ import annotations

from cpuserve.models.family import FINAL, Guesses, ModelFamily, TextType, Whole

FAMILIES = (
    ModelFamily(
        ("BailingHybridForCausalLM",),
        "cpuserve.models.bailing:BailingHybrid",
        guesses=Guesses(FINAL),
        mtp_methods=("bailing_hybrid_mtp",),
    ),
    ModelFamily(("BailingMoeForCausalLM",), "cpuserve.models.bailing:BailingMoe"),
    ModelFamily(
        ("BailingMoeV2ForCausalLM",),
        "cpuserve.models.bailing:BailingMoeV2",
        guesses=Guesses(FINAL),
    ),
    ModelFamily(
        ("BailingMoeV3ForCausalLM",),
        "cpuserve.models.bailing:BailingMoeV3",
        text_types={
            "bailing_hybrid": TextType()  # Ling 3
        },
        wholes=(Whole(("BailingMoeV3VLForConditionalGeneration",), "bailing_hybrid"),),
        guesses=Guesses(FINAL),
        mtp_methods=("bailing_hybrid_v3_mtp",),
    ),
    ModelFamily(
        ("SarvamMLAForCausalLM",),
        "cpuserve.models.deepseek:SarvamMla",
        saved_as=(("DeepseekV3ForCausalLM", "sarvam_mla"),),
    ),
    ModelFamily(
        ("SarvamMoEForCausalLM",),
        "cpuserve.models.bailing:SarvamMoe",
        saved_as=(("Glm4MoeForCausalLM", "sarvam_moe"),),
    ),
)
