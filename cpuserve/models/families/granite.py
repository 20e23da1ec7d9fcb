"""Families: Granite, and families that scale as it does."""

from __future__ import annotations

from cpuserve.models.family import ModelFamily, TextType, Whole, sizes

FAMILIES = (
    ModelFamily(
        ("GraniteForCausalLM",),
        "cpuserve.models.granite:Granite",
        text_types={
            "granite4_vision_text": TextType(
                sizes(
                    *(32000, 4096, 11008, 32, 32, 2048),
                    embedding_multiplier=1.0,
                    logits_scaling=1.0,
                    residual_multiplier=1.0,
                    attention_multiplier=1.0,
                )
            ),
            "granite_docling_text": TextType(
                sizes(
                    *(133800, 1024, 2048, 28, 16, 32768),
                    num_key_value_heads=4,
                    rms_norm_eps=1e-5,
                    tie_word_embeddings=True,
                    embedding_multiplier=12.0,
                    logits_scaling=4.0,
                    residual_multiplier=0.263,
                    attention_multiplier=0.015625,
                )
            ),
        },
        wholes=(
            Whole(("Granite4VisionForConditionalGeneration",), "granite4_vision_text", tied=False),
            Whole(
                ("GraniteDoclingForConditionalGeneration",),
                "granite_docling_text",
                tied=True,
                tower="cpuserve.models.granite_docling:GraniteDoclingTower",
                media={
                    "granite_docling": "cpuserve.media.pictures.families.canvas:granite_docling"
                },
            ),
        ),
    ),
    ModelFamily(
        ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
        "cpuserve.models.granite:GraniteMoe",
        shared_gguf={"GraniteMoeSharedForCausalLM": "granitemoe"},
    ),
    ModelFamily(
        ("GraniteMoeHybridForCausalLM",),
        "cpuserve.models.granite:GraniteMoeHybrid",
        label="Granite 4",
        example_of="states",
    ),
    ModelFamily(("GraniteMoeSWAForCausalLM",), "cpuserve.models.granite:GraniteMoeSwa"),
    ModelFamily(("GraniteSWAForCausalLM",), "cpuserve.models.granite:GraniteSwa"),
    ModelFamily(
        ("HyperCLOVAXForCausalLM",),
        "cpuserve.models.granite:HyperClovaX",
        text_types={"hyperclovax": TextType(sizes(32000, 4096, 11008, 32, 32, 2048))},
        wholes=(
            Whole(
                ("HCXVisionV2ForCausalLM", "HyperCLOVAXVisionV2ForConditionalGeneration"),
                "hyperclovax",
                tied=True,
            ),
        ),
    ),
    ModelFamily(("MiniCPMForCausalLM",), "cpuserve.models.granite:MiniCpm"),
)
