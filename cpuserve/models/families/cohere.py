"""Families: Cohere (Command, Aya, Compass)."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, TextType, Whole, sizes

FAMILIES = (
    ModelFamily(
        ("Cohere2ForCausalLM",),
        "cpuserve.models.cohere:Cohere2",
        text_types={"cohere2": TextType(sizes(256000, 8192, 22528, 40, 64, 8192))},
    ),
    ModelFamily(("Cohere2MoeForCausalLM",), "cpuserve.models.cohere:Cohere2Moe"),
    ModelFamily(
        ("CohereCompassForCausalLM",),
        "cpuserve.models.cohere:CohereCompass",
        text_types={"cohere_compass_text": TextType(sizes(256000, 8192, 22528, 40, 64, 8192))},
        wholes=(
            Whole(("CohereCompassForConditionalGeneration",), "cohere_compass_text", tied=False),
        ),
    ),
    ModelFamily(("CohereForCausalLM",), "cpuserve.models.cohere:Cohere"),
)
