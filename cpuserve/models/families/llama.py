"""Families: Llama, and families that differ in numbers only."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, TextType, Whole, sizes

FAMILIES = (
    ModelFamily(("CwmForCausalLM",), "cpuserve.models.decoders:Cwm"),
    ModelFamily(
        ("IQuestCoderForCausalLM",),
        "cpuserve.models.decoders:IQuestCoder",
        saved_as=(("LlamaForCausalLM", "iquestcoder"),),
    ),
    ModelFamily(
        ("Llama4ForCausalLM",),
        "cpuserve.models.llama4:Llama4",
        text_types={
            "llama4_text": TextType(
                sizes(202048, 5120, 8192, 48, 40, 131072, intermediate_size_mlp=16384)
            )
        },
        wholes=(Whole(("Llama4ForConditionalGeneration",), "llama4_text", tied=False),),
    ),
    ModelFamily(
        ("LlamaForCausalLM", "LLaMAForCausalLM", "TeleChat3ForCausalLM", "XverseForCausalLM"),
        "cpuserve.models.decoders:Llama",
        text_types={
            "llama": TextType(sizes(32000, 4096, 11008, 32, 32, 2048)),
            "paddleocr_vl_text": TextType(
                sizes(
                    *(103424, 1024, 3072, 18, 16, 131072),
                    num_key_value_heads=2,
                    head_dim=128,
                    rms_norm_eps=1e-5,
                    rope_theta=5e5,
                    tie_word_embeddings=True,
                )
            ),
        },
        classifiers=("LlamaForSequenceClassification",),
        taggers=("LlamaForTokenClassification",),
    ),
)
