"""Families: models of images and text whose text part is of another family."""

from __future__ import annotations

from cpuserve.models.family import Whole

FAMILIES = (
    Whole(
        ("AyaVisionForConditionalGeneration",),
        "cohere2",
        tied=True,
        tower="cpuserve.models.aya_vision:AyaVisionTower",
        media={"aya_vision": "cpuserve.media.pictures.families.canvas:aya_vision"},
    ),
    Whole(("Cohere2VisionForConditionalGeneration",), "cohere2", tied=True),
    Whole(
        ("Cosmos3OmniForConditionalGeneration",),
        "qwen3_vl_text",
        tied=False,
        published={
            r"\.self_attn\.to_([qkv])\.": r".self_attn.\1_proj.",
            r"\.self_attn\.norm_([qk])\.": r".self_attn.\1_norm.",
            r"\.self_attn\.to_out\.": ".self_attn.o_proj.",
        },
        # Layers that make pictures, sounds and movements.
        unread=(
            r".*(?:\.add_[qkv]_proj\.|\.to_add_out\.|\.norm_added_[qk]\.|moe_gen).*",
            r"(?:(?:audio_|action_)?proj_(?:in|out)|time_embedder)\..*",
            r"(?:audio|action)_modality_embed",
        ),
    ),
    Whole(
        ("DeepseekVLForConditionalGeneration",),
        "llama",
        tied=True,
        tower="cpuserve.models.deepseek_vl:DeepseekVLTower",
        published={r"\.vision_model\.vision_model\.": ".vision_model."},
        media={"deepseek_vl": "cpuserve.media.pictures.families.deepseek_vl:deepseek_vl"},
    ),
    Whole(
        ("DeepseekVLHybridForConditionalGeneration",),
        "llama",
        tied=True,
        published={r"\.vision_model\.vision_model\.": ".vision_model."},
    ),
    Whole(
        ("DotsOCRForCausalLM",),
        "qwen2",
        tower="cpuserve.models.dots_ocr:DotsOcrTower",
        media={"dots_ocr": "cpuserve.media.pictures.families.qwen_vl:dots_ocr"},
    ),
    Whole(("FastVlmForConditionalGeneration",), "qwen2", tied=False),
    Whole(("GotOcr2ForConditionalGeneration",), "qwen2", tied=True),
    Whole(("Idefics2ForConditionalGeneration",), "mistral", tied=False),
    Whole(
        ("Idefics3ForConditionalGeneration",),
        "llama",
        tied=False,
        tower="cpuserve.models.siglip:Idefics3Tower",
        media={"idefics3": "cpuserve.media.pictures.families.idefics3:idefics3"},
    ),
    Whole(
        ("JanusForConditionalGeneration",),
        "llama",
        tied=True,
        tower="cpuserve.models.deepseek_vl:JanusTower",
        media={"janus": "cpuserve.media.pictures.families.deepseek_vl:janus"},
    ),
    Whole(("Ovis2ForConditionalGeneration",), "qwen2", tied=True),
    Whole(
        ("PaddleOCRVLForConditionalGeneration",),
        "paddleocr_vl_text",
        tied=True,
        tower="cpuserve.models.siglip:PaddleOcrTower",
        media={"paddleocr_vl": "cpuserve.media.pictures.families.qwen_vl:paddleocr_vl"},
    ),
    Whole(("PerceptionLMForConditionalGeneration",), "llama"),
    Whole(
        ("SmolVLMForConditionalGeneration",),
        "llama",
        tied=False,
        tower="cpuserve.models.siglip:Idefics3Tower",
        media={"smolvlm": "cpuserve.media.pictures.families.idefics3:idefics3"},
    ),
    Whole(("VideoLlama3ForConditionalGeneration",), "qwen2", tied=False),
)
