"""Kimi: Kimi Linear, Kimi-VL and Kimi K2.5."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, Whole

FAMILIES = (
    ModelFamily(("KimiLinearForCausalLM",), "cpuserve.models.kimi.text:KimiLinear"),
    Whole(
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        "deepseek_v3",
        ("kimi_k2",),
        tower="cpuserve.models.kimi.tower:KimiK25Tower",
        published={r"^language_model\.model\.blocks\.": "model.layers."},
        media={"kimi_k25": "cpuserve.media.pictures.families.kimi_vl:kimi_k25"},
    ),
    Whole(
        ("KimiVLForConditionalGeneration",),
        "deepseek_v3",
        tower="cpuserve.models.kimi.tower:KimiVLTower",
        media={"kimi_vl": "cpuserve.media.pictures.families.kimi_vl:kimi_vl"},
    ),
)
