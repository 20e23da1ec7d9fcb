"""Families: LLaVA."""

from __future__ import annotations

from cpuserve.models.family import DENSE, Whole

FAMILIES = (
    Whole(
        ("LlavaForConditionalGeneration",),
        "llama",
        DENSE,
        tied=False,
        tower="cpuserve.models.llava:LlavaTower",
        media={"llava": "cpuserve.media.pictures.families.llava:llava"},
    ),
    Whole(
        ("LlavaNextForConditionalGeneration",),
        "llama",
        DENSE,
        tied=False,
        tower="cpuserve.models.llava:LlavaNextTower",
        media={"llava_next": "cpuserve.media.pictures.families.llava_next:llava_next"},
    ),
    Whole(("LlavaNextVideoForConditionalGeneration",), "llama", DENSE, tied=False),
    Whole(
        ("LlavaOnevisionForConditionalGeneration",),
        "qwen2",
        DENSE,
        tied=False,
        tower="cpuserve.models.llava:LlavaOnevisionTower",
        media={
            "llava_onevision": "cpuserve.media.pictures.families.llava_onevision:llava_onevision"
        },
    ),
    Whole(("VideoLlavaForConditionalGeneration",), "llama", tied=False),
    Whole(("VipLlavaForConditionalGeneration",), "llama", tied=False),
)
