"""Families: Gemma."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, TextType, Whole

FAMILIES = (
    ModelFamily(
        ("Gemma2ForCausalLM",),
        "cpuserve.models.gemma:Gemma2",
        classifiers=("Gemma2ForSequenceClassification",),
        taggers=("Gemma2ForTokenClassification",),
    ),
    ModelFamily(
        ("Gemma3ForCausalLM",),
        "cpuserve.models.gemma:Gemma3",
        text_types={"gemma3_text": TextType()},
        wholes=(
            Whole(
                ("Gemma3ForConditionalGeneration",),
                "gemma3_text",
                tower="cpuserve.models.siglip:Gemma3Tower",
                published={r"\.mm_input_projection_weight$": ".mm_input_projection.weight"},
                media={"gemma3": "cpuserve.media.pictures.families.gemma3:gemma3"},
            ),
        ),
    ),
    ModelFamily(
        ("Gemma3nForCausalLM",),
        "cpuserve.models.gemma3n:Gemma3n",
        text_types={"gemma3n_text": TextType()},
        wholes=(Whole(("Gemma3nForConditionalGeneration",), "gemma3n_text"),),
    ),
    ModelFamily(("Gemma3TextModel",), "cpuserve.models.gemma:Gemma3Embedding"),
    ModelFamily(("GemmaForCausalLM",), "cpuserve.models.gemma:Gemma"),
    ModelFamily(("VaultGemmaForCausalLM",), "cpuserve.models.gemma:VaultGemma"),
)
