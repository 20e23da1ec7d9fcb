"""Kimi: Kimi Linear, Kimi-VL and Kimi K2.5."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, TokenizerTables, ToolTables, Whole

FAMILIES = (
    ModelFamily(
        ("KimiLinearForCausalLM",),
        "cpuserve.models.kimi.text:KimiLinear",
        gguf={"kimi-linear": "cpuserve.models.kimi.gguf:LINEAR"},
        refused_gguf={"kimi-k3": "of its kind, Kimi Linear and Kimi K2 (deepseek2) run"},
        # Kimi K2 and Kimi-VL, whose text parts are of DeepSeek, have the same.
        tokenizer=TokenizerTables(
            files={"tiktoken.model": "cpuserve.models.kimi.tokenizer:read_tokenizer"},
            splits={"kimi-k2": "cpuserve.models.kimi.tokenizer:SPLITS"},
        ),
        tools=ToolTables(
            calls={"kimi_k2": "cpuserve.models.kimi.tools:CALLS"},
            hints={"kimi_k2": ("<|tool_calls_section_begin|>",)},
            thoughts={"kimi_k2": ("<think>", "</think>")},
        ),
    ),
    Whole(
        ("KimiK25ForConditionalGeneration", "Kimi_K25ForConditionalGeneration"),
        "deepseek_v3",
        called={"kimi_k2": "deepseek_v3"},
        tower="cpuserve.models.kimi.tower:KimiK25Tower",
        published={r"^language_model\.model\.blocks\.": "model.layers."},
        media={"kimi_k25": "cpuserve.models.kimi.pictures:kimi_k25"},
        projectors={"kimik25": "cpuserve.models.kimi.projector:K25"},
    ),
    Whole(
        ("KimiVLForConditionalGeneration",),
        "deepseek_v3",
        tower="cpuserve.models.kimi.tower:KimiVLTower",
        media={"kimi_vl": "cpuserve.models.kimi.pictures:kimi_vl"},
        projectors={"kimivl": "cpuserve.models.kimi.projector:VL"},
    ),
)
