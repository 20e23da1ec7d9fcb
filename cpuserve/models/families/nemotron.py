"""Families: Nemotron."""

from __future__ import annotations

from cpuserve.models.family import AFTER, Guesses, HeadNames, ModelFamily, TextType, Whole

# An attention and experts, each a layer as in the model.
_NEMOTRON = HeadNames(
    {
        "model.layers.": "mtp.layers.",
        "guess.fc.": "mtp.layers.0.eh_proj.",
        "guess.embedding_norm.": "mtp.layers.0.enorm.",
        "guess.hidden_norm.": "mtp.layers.0.hnorm.",
        "model.norm_f.": "mtp.layers.{last}.final_layernorm.",
    }
)
# GGUF files have both layers of the head in one block.
_NEMOTRON_GGUF = HeadNames(
    {
        **AFTER,
        "model.layers.1.norm.": "model.layers.{}.post_attention_layernorm.",
        "model.layers.1.": "model.layers.{}.",
        "model.norm_f.": "model.layers.{}.shared_head.norm.",
    }
)

FAMILIES = (
    ModelFamily(("NemotronForCausalLM",), "cpuserve.models.decoders:Nemotron"),
    ModelFamily(
        ("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"),
        "cpuserve.models.nemotron_h:NemotronH",
        text_types={"nemotron_h": TextType()},
        wholes=(
            Whole(
                (
                    "NemotronH_Nano_Omni_Reasoning_V3",
                    "NemotronH_Nano_VL_V2",
                    "NemotronH_Omni_Reasoning_V3",
                    "NemotronH_Super_Omni_Reasoning_V3",
                ),
                "nemotron_h",
            ),
        ),
        guesses=Guesses(_NEMOTRON, gguf=_NEMOTRON_GGUF, described=True),
        mtp_methods=("nemotron_h_mtp",),
        label="Nemotron 3",
        example_of="states",
    ),
)
