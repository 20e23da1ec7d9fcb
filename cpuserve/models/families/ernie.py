"""Families: ERNIE 4.5."""

from __future__ import annotations

from cpuserve.models.family import Guesses, HeadNames, ModelFamily, TextType, Whole, sizes

# The model has the last norm.
_ERNIE = HeadNames(
    {
        "model.layers.0.": "model.mtp_block.0.",
        "guess.fc.": "model.mtp_linear_proj.0.",
        "guess.embedding_norm.": "model.mtp_emb_norm.0.",
        "guess.hidden_norm.": "model.mtp_hidden_norm.0.",
    }
)

FAMILIES = (
    ModelFamily(
        ("Ernie4_5_MoeForCausalLM",),
        "cpuserve.models.ernie4_5:Ernie45Moe",
        guesses=Guesses(_ERNIE, dense=True),
        mtp_methods=("ernie_mtp",),
    ),
    ModelFamily(
        ("Ernie4_5_VLMoeForCausalLM",),
        "cpuserve.models.ernie4_5:Ernie45VlMoe",
        text_types={
            "ernie4_5_vl_moe_text": TextType(
                sizes(103424, 2560, 12288, 28, 20, 131072, num_key_value_heads=4, rope_theta=5e5),
                splits_width=True,
            )
        },
        wholes=(
            Whole(("Ernie4_5_VLMoeForConditionalGeneration",), "ernie4_5_vl_moe_text", tied=True),
        ),
    ),
    ModelFamily(
        ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"), "cpuserve.models.ernie4_5:Ernie45"
    ),
)
