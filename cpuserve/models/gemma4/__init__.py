"""Families: Gemma 4, with its models of images and text, and its assistants."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, TextType, TokenizerTables, ToolTables, Whole

# What the most rows of a picture (`max_soft_tokens`) can be.
BUDGETS = (70, 140, 280, 560, 1120)
FAMILIES = (
    ModelFamily(
        ("Gemma4ForCausalLM",),
        "cpuserve.models.gemma4.text:Gemma4",
        text_types={"gemma4_text": TextType()},
        wholes=(
            Whole(
                ("Gemma4ForConditionalGeneration",),
                "gemma4_text",
                tower="cpuserve.models.gemma4.tower:Gemma4Tower",
                media={"gemma4": "cpuserve.models.gemma4.pictures:gemma4"},
                projectors={"gemma4v": "cpuserve.models.gemma4.projector:TOWER"},
            ),
        ),
        gguf={
            "gemma4": "cpuserve.models.gemma4.gguf:TEXT",
            "gemma4-assistant": "cpuserve.models.gemma4.gguf:ASSISTANT",
        },
        assistants={
            "Gemma4AssistantForCausalLM": "cpuserve.models.gemma4.assistant:Gemma4Assistant"
        },
        mtp_methods=("gemma4_mtp",),
        own_keys=("per_layer_config",),
        label="Gemma 4",
        tokenizer=TokenizerTables(
            gguf={"gemma4": "cpuserve.models.gemma4.tokenizer:IN_GGUF"},
            splits={"gemma4": "cpuserve.tokenizer.splits:LINES"},
        ),
        tools=ToolTables(
            calls={"gemma4": "cpuserve.models.gemma4.tools:CALLS"},
            hints={"gemma4": ("<|tool_call>",)},
            thoughts={"gemma4": ("<|channel>thought", "<channel|>")},
        ),
    ),
    ModelFamily(
        ("Gemma4UnifiedForCausalLM",),
        "cpuserve.models.gemma4.text:Gemma4Unified",
        text_types={"gemma4_unified_text": TextType()},
        wholes=(
            Whole(
                ("Gemma4UnifiedForConditionalGeneration",),
                "gemma4_unified_text",
                # GGUF files of the unified model have a text part of the other kind.
                ("gemma4_text",),
                tower="cpuserve.models.gemma4.tower:Gemma4UnifiedTower",
                media={"gemma4_unified": "cpuserve.models.gemma4.pictures:gemma4_unified"},
                projectors={"gemma4uv": "cpuserve.models.gemma4.projector:UNIFIED"},
            ),
        ),
        assistants={
            "Gemma4UnifiedAssistantForCausalLM": (
                "cpuserve.models.gemma4.assistant:Gemma4UnifiedAssistant"
            )
        },
        own_keys=("per_layer_config",),
        label="Gemma 4",
    ),
)
