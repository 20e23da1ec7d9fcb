"""Families: Step."""

from __future__ import annotations

from cpuserve.models.family import AFTER, Guesses, HeadNames, ModelFamily, TextType, Whole, sizes

# Its first head; the others guess later tokens.
_STEP = HeadNames(
    {
        **AFTER,
        "model.norm.": "model.layers.{}.transformer.shared_head.norm.",
        "lm_head.": "model.layers.{}.transformer.shared_head.output.",
    }
)

FAMILIES = (
    ModelFamily(
        ("Step3p5ForCausalLM",),
        "cpuserve.models.step3:Step35",
        text_types={"step3p5": TextType(sizes(128815, 4096, 11264, 45, 64, 128000))},
        wholes=(Whole(("Step3p7ForConditionalGeneration",), "step3p5"),),
        guesses=Guesses(_STEP),
        mtp_methods=("step3p5_mtp",),
        # transformers writes there what other keys say as well.
        own_keys=("per_layer_config",),
    ),
)
