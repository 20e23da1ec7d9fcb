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
    ModelFamily(
        ("Gemma4ForCausalLM",),
        "cpuserve.models.gemma4:Gemma4",
        text_types={"gemma4_text": TextType()},
        wholes=(
            Whole(
                ("Gemma4ForConditionalGeneration",),
                "gemma4_text",
                tower="cpuserve.models.gemma4_tower:Gemma4Tower",
                media={"gemma4": "cpuserve.media.pictures.families.gemma4:gemma4"},
            ),
        ),
        assistants={"Gemma4AssistantForCausalLM": 1536},
    ),
    ModelFamily(
        ("Gemma4UnifiedForCausalLM",),
        "cpuserve.models.gemma4:Gemma4Unified",
        text_types={"gemma4_unified_text": TextType()},
        wholes=(
            Whole(
                ("Gemma4UnifiedForConditionalGeneration",),
                "gemma4_unified_text",
                # GGUF files of the unified model have a text part of the other kind.
                ("gemma4_text",),
                tower="cpuserve.models.gemma4_tower:Gemma4UnifiedTower",
                media={"gemma4_unified": "cpuserve.media.pictures.families.gemma4:gemma4_unified"},
            ),
        ),
        assistants={"Gemma4UnifiedAssistantForCausalLM": 3840},
    ),
    ModelFamily(("GemmaForCausalLM",), "cpuserve.models.gemma:Gemma"),
    ModelFamily(("VaultGemmaForCausalLM",), "cpuserve.models.gemma:VaultGemma"),
)
