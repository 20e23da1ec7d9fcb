"""Families: MiMo V2."""

from __future__ import annotations

from cpuserve.models.family import Guesses, HeadNames, ModelFamily

# Its first head; the others guess later tokens.
_MIMO = HeadNames(
    {
        "model.layers.0.post_attention_layernorm.": "model.mtp.layers.0.pre_mlp_layernorm.",
        "model.layers.0.": "model.mtp.layers.0.",
        "guess.fc.": "model.mtp.layers.0.eh_proj.",
        "guess.embedding_norm.": "model.mtp.layers.0.enorm.",
        "guess.hidden_norm.": "model.mtp.layers.0.hnorm.",
        "model.norm.": "model.mtp.layers.0.final_layernorm.",
    }
)

FAMILIES = (
    ModelFamily(
        ("MiMoV2FlashForCausalLM",),
        "cpuserve.models.mimo_v2:MiMoV2Flash",
        guesses=Guesses(_MIMO, dense=True),
        mtp_methods=("mimo_v2_mtp",),
    ),
    ModelFamily(("MiMoV2ForCausalLM",), "cpuserve.models.mimo_v2:MiMoV2"),
)
