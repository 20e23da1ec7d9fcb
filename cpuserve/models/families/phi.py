"""Families: Phi."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, TextType, sizes

FAMILIES = (
    ModelFamily(
        ("Phi3ForCausalLM",),
        "cpuserve.models.decoders:Phi3",
        text_types={"phi3": TextType(sizes(32064, 3072, 8192, 32, 32, 4096))},
    ),
    ModelFamily(("PhiForCausalLM",), "cpuserve.models.plain:Phi"),
    ModelFamily(("PhimoeForCausalLM", "PhiMoEForCausalLM"), "cpuserve.models.mixtures:PhiMoe"),
)
