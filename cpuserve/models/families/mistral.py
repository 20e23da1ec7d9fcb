"""Families: Mistral."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, TextType, Whole, sizes

FAMILIES = (
    ModelFamily(
        ("Ministral3ForCausalLM",),
        "cpuserve.models.ministral3:Ministral3",
        text_types={"ministral3": TextType()},
    ),
    ModelFamily(("MinistralForCausalLM",), "cpuserve.models.decoders:Ministral"),
    ModelFamily(
        ("Mistral4ForCausalLM",),
        "cpuserve.models.ministral3:Mistral4",
        text_types={"mistral4": TextType()},
    ),
    ModelFamily(
        ("MistralForCausalLM",),
        "cpuserve.models.decoders:Mistral",
        text_types={
            "mistral": TextType(sizes(32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8))
        },
        classifiers=("MistralForSequenceClassification",),
        taggers=("MistralForTokenClassification",),
        shared_gguf={"MistralForCausalLM": "llama"},
    ),
    ModelFamily(
        ("MixtralForCausalLM",),
        "cpuserve.models.mixtures:Mixtral",
        shared_gguf={"MixtralForCausalLM": "llama"},
    ),
    Whole(
        ("LightOnOCRForConditionalGeneration", "LightOnOcrForConditionalGeneration"),
        "qwen3",
        tied=True,
        tower="cpuserve.models.pixtral:Mistral3Tower",
        published={
            r"^model\.vision_encoder\.": "vision_tower.",
            r"^model\.vision_projection\.": "multi_modal_projector.",
        },
        media={"lighton_ocr": "cpuserve.media.pictures.families.pixtral:mistral3"},
    ),
    Whole(
        ("Mistral3ForConditionalGeneration",),
        "mistral",
        ("ministral3", "mistral4", "llama"),
        tower="cpuserve.models.pixtral:Mistral3Tower",
        media={"mistral3": "cpuserve.media.pictures.families.pixtral:mistral3"},
    ),
)
