"""Families: InternVL."""

from __future__ import annotations

from cpuserve.models.family import DENSE, Whole

FAMILIES = (
    Whole(
        ("InternVLChatModel",),
        "qwen2",
        (*DENSE, "internlm2", "qwen3_moe", "gpt_oss"),
        tower="cpuserve.models.internvl:InternVLChatTower",
        media={"internvl_chat": "cpuserve.media.pictures.families.canvas:internvl_chat"},
    ),
    Whole(
        ("InternVLForConditionalGeneration",),
        "qwen2",
        (*DENSE, "qwen3_moe", "gpt_oss"),
        tied=True,
        tower="cpuserve.models.internvl:INTERNVL",
        media={"internvl": "cpuserve.media.pictures.families.canvas:internvl"},
    ),
    Whole(
        ("QianfanOCRForConditionalGeneration",),
        "qwen3",
        tied=False,
        tower="cpuserve.models.internvl:QIANFAN",
        published={r"^language_model\.model\.encoder\.layers\.": "model.layers."},
        media={"qianfan_ocr": "cpuserve.media.pictures.families.canvas:internvl"},
    ),
)
