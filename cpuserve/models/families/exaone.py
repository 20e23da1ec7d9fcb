"""Families: EXAONE."""

from __future__ import annotations

from cpuserve.models.family import MTP, Guesses, ModelFamily, TextType, Whole, sizes

FAMILIES = (
    ModelFamily(
        ("Exaone4ForCausalLM",),
        "cpuserve.models.exaone4:Exaone4",
        text_types={"exaone4": TextType(sizes(102400, 4096, 16384, 32, 32, 2048))},
        wholes=(Whole(("Exaone4_5_ForConditionalGeneration",), "exaone4", tied=False),),
    ),
    ModelFamily(
        ("ExaoneForCausalLM",),
        "cpuserve.models.decoders:Exaone",
        saved_as=(("LlamaForCausalLM", "exaone"),),
    ),
    ModelFamily(
        ("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
        "cpuserve.models.exaone4:ExaoneMoe",
        guesses=Guesses(MTP),
        mtp_methods=("exaone_moe_mtp",),
    ),
)
