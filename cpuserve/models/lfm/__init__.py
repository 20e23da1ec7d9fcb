"""Families: LFM, with short convolutions; its models of images and text."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, TextType, TokenizerTables, ToolTables, Whole, sizes

FAMILIES = (
    ModelFamily(
        ("Lfm2ForCausalLM", "LFM2ForCausalLM"),
        "cpuserve.models.lfm.text:Lfm2",
        text_types={
            "lfm2": TextType(sizes(65536, 2560, 12288, 32, 32, 128000, num_key_value_heads=8))
        },
        wholes=(
            Whole(
                ("Lfm2VlForConditionalGeneration",),
                "lfm2",
                ("lfm2_moe",),
                tied=True,
                tower="cpuserve.models.lfm.tower:Lfm2VlTower",
                media={"lfm2_vl": "cpuserve.models.lfm.pictures:lfm2_vl"},
                projectors={"lfm2": "cpuserve.models.lfm.projector:TOWER"},
            ),
        ),
        gguf={"lfm2": "cpuserve.models.lfm.gguf:DENSE"},
        label="LFM2",
        example_of="states",
        tokenizer=TokenizerTables(splits={"lfm2": "cpuserve.tokenizer.splits:LLAMA"}),
        tools=ToolTables(
            calls={"lfm2": "cpuserve.models.lfm.tools:CALLS"},
            hints={"lfm2": ("<|tool_list_start|>", "<|tool_call_start|>", "keep_past_thinking")},
        ),
    ),
    ModelFamily(
        ("Lfm2MoeForCausalLM",),
        "cpuserve.models.lfm.text:Lfm2Moe",
        text_types={"lfm2_moe": TextType()},
        gguf={"lfm2moe": "cpuserve.models.lfm.gguf:SPARSE"},
    ),
    ModelFamily(
        ("Lfm3ForCausalLM",),
        "cpuserve.models.lfm.text:Lfm3",
        text_types={"lfm3": TextType()},
        wholes=(
            Whole(
                ("Lfm3VlForConditionalGeneration",),
                "lfm3",
                tied=True,
                tower="cpuserve.models.lfm.tower:Lfm3VlTower",
                media={"lfm3_vl": "cpuserve.media.pictures.families.qwen_vl:qwen_vl"},
            ),
        ),
    ),
)
