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
    ),
    Whole(
        ("LlavaNextForConditionalGeneration",),
        "llama",
        DENSE,
        tied=False,
        tower="cpuserve.models.llava:LlavaNextTower",
    ),
    Whole(("LlavaNextVideoForConditionalGeneration",), "llama", DENSE, tied=False),
    Whole(
        ("LlavaOnevisionForConditionalGeneration",),
        "qwen2",
        DENSE,
        tied=False,
        tower="cpuserve.models.llava:LlavaOnevisionTower",
    ),
    Whole(("VideoLlavaForConditionalGeneration",), "llama", tied=False),
    Whole(("VipLlavaForConditionalGeneration",), "llama", tied=False),
)
