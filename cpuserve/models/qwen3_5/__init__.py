"""Qwen3-Next, Qwen3.5, 3.6 and 3.8, and models of images with Qwen3.5 as their text part."""

from __future__ import annotations

from cpuserve.models.family import MTP, Guesses, ModelFamily, TextType, TokenizerTables, Whole

FAMILIES = (
    ModelFamily(
        ("Qwen3_5ForCausalLM",),
        "cpuserve.models.qwen3_5.text:Qwen35",
        text_types={"qwen3_5_text": TextType()},
        wholes=(
            Whole(
                ("Qwen3_5ForConditionalGeneration",),
                "qwen3_5_text",
                tower="cpuserve.models.qwen3_5.tower:QWEN3_5",
                media={"qwen3_5": "cpuserve.media.pictures.families.qwen_vl:qwen_vl"},
                mmproj={"Qwen3_5ForCausalLM": "qwen3vl_merger"},
            ),
            Whole(("MiniCPMOcrForConditionalGeneration",), "qwen3_5_text", tied=True),
            Whole(("MiniCPMV4_6ForConditionalGeneration",), "qwen3_5_text", tied=False),
            Whole(("MiniCPMV4_7ForConditionalGeneration",), "qwen3_5_text", tied=False),
        ),
        gguf={"qwen35": "cpuserve.models.qwen3_5.gguf:DENSE"},
        guesses=Guesses(MTP),
        mtp_methods=("qwen3_5_mtp",),
        label="Qwen3.5",
        example_of="states",
        tokenizer=TokenizerTables(splits={"qwen35": "cpuserve.models.qwen3_5.tokenizer:SPLITS"}),
    ),
    ModelFamily(
        ("Qwen3_5MoeForCausalLM",),
        "cpuserve.models.qwen3_5.text:Qwen35Moe",
        text_types={"qwen3_5_moe_text": TextType()},
        wholes=(
            Whole(
                ("Qwen3_5MoeForConditionalGeneration",),
                "qwen3_5_moe_text",
                tower="cpuserve.models.qwen3_5.tower:QWEN3_5",
                media={"qwen3_5_moe": "cpuserve.media.pictures.families.qwen_vl:qwen_vl"},
                mmproj={"Qwen3_5MoeForCausalLM": "qwen3vl_merger"},
            ),
        ),
        gguf={"qwen35moe": "cpuserve.models.qwen3_5.gguf:SPARSE"},
        guesses=Guesses(MTP),
    ),
    ModelFamily(
        ("Qwen3NextForCausalLM",),
        "cpuserve.models.qwen3_5.text:Qwen3Next",
        gguf={"qwen3next": "cpuserve.models.qwen3_5.gguf:NEXT"},
        guesses=Guesses(MTP),
        mtp_methods=("qwen3_next_mtp",),
    ),
)
