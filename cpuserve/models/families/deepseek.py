"""Families: DeepSeek, and families with its latent attention."""

from __future__ import annotations

from cpuserve.models.family import NEXTN, Guesses, HeadNames, ModelFamily, TextType

_V4 = HeadNames(
    {
        "model.layers.0.": "mtp.0.",
        "guess.e_proj.": "mtp.0.e_proj.",
        "guess.h_proj.": "mtp.0.h_proj.",
        "guess.embedding_norm.": "mtp.0.enorm.",
        "guess.hidden_norm.": "mtp.0.hnorm.",
        "model.hc_head.hc_": "mtp.0.hc_head_",
        "model.norm.": "mtp.0.norm.",
    }
)
_LONGCAT = HeadNames(
    {
        "model.layers.0.mlp.": "model.mtp.layers.0.transformer_layer.mlp.",
        "model.layers.0.": "model.mtp.layers.0.",
        "guess.fc.": "model.mtp.layers.0.eh_proj.",
        "guess.embedding_norm.": "model.mtp.layers.0.enorm.m.",
        "guess.hidden_norm.": "model.mtp.layers.0.hnorm.m.",
        "model.norm.": "model.mtp.norm.",
        "model.embed_tokens.": "model.mtp.embed_tokens.",
    }
)

FAMILIES = (
    ModelFamily(("AXK1ForCausalLM",), "cpuserve.models.deepseek:AxK1"),
    ModelFamily(("AXK2ForCausalLM",), "cpuserve.models.axk2:AxK2"),
    ModelFamily(("DeepseekForCausalLM",), "cpuserve.models.mixtures:DeepseekMoe"),
    ModelFamily(
        ("DeepseekV2ForCausalLM",),
        "cpuserve.models.deepseek:DeepseekV2",
        shared_gguf={"DeepseekV2ForCausalLM": "deepseek2"},
    ),
    ModelFamily(
        ("DeepseekV32ForCausalLM",),
        "cpuserve.models.deepseek:DeepseekV32",
        guesses=Guesses(NEXTN),
    ),
    ModelFamily(
        ("DeepseekV3ForCausalLM",),
        "cpuserve.models.deepseek:DeepseekV3",
        text_types={"deepseek_v3": TextType()},
        guesses=Guesses(NEXTN),
        mtp_methods=("deepseek_mtp",),
    ),
    ModelFamily(
        ("DeepseekV4ForCausalLM",),
        "cpuserve.models.deepseek_v4:DeepseekV4",
        guesses=Guesses(_V4, gguf=None),
        mtp_methods=("deepseek_v4_mtp",),
    ),
    ModelFamily(
        ("LongcatFlashForCausalLM",),
        "cpuserve.models.longcat:LongcatFlash",
        guesses=Guesses(_LONGCAT),
        mtp_methods=("longcat_flash_mtp",),
    ),
    ModelFamily(("MiniCPM3ForCausalLM",), "cpuserve.models.deepseek:MiniCpm3"),
    ModelFamily(("YoutuForCausalLM",), "cpuserve.models.deepseek:Youtu"),
)
