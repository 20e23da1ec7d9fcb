"""Models of images and text: cpuserve serves the part for text, which has a config of its own.

Published configs leave out what their class in transformers has by default, so the defaults of
these classes are here, where the readers of the text models have others or none.
Source: the configuration classes of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cpuserve.base.errors import ModelError
from cpuserve.models.config import read_int, read_object

# The config of the text part: the key of transformers, and the key of InternVL's own code.
KEYS = ("text_config", "llm_config")
# The config of the part of Qwen-Omni that reads and writes texts, which has a text config.
THINKER = "thinker_config"


@dataclass(frozen=True, slots=True)
class TextPart:
    """The text model that a `model_type` means.

    architecture: the text model that computes the same.
    defaults: values of keys that a published config may leave out.
    splits_width: whether the heads share hidden_size if the config has no head_dim; else the
      reader of the text model has the default.
    """

    architecture: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    splits_width: bool = False


@dataclass(frozen=True, slots=True)
class Whole:
    """A model of images and text.

    text: the model_type of its text part, if the config has none.
    others: further model types that its text part may have.
    tied: tie_word_embeddings, if no part of the config has it; None: the default of the text model.
    """

    text: str
    others: tuple[str, ...] = ()
    tied: bool | None = None


def _sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, positions: int, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": positions,
        **more,
    }


_QWEN2_VL = TextPart(
    "Qwen2ForCausalLM",
    _sizes(
        *(152064, 8192, 29568, 80, 64, 32768),
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
    ),
)
TEXT_TYPES = {
    "apertus1p5_text": TextPart(
        "Apertus1p5TextForCausalLM", _sizes(266752, 4096, 14336, 32, 32, 65536, hidden_act="xielu")
    ),
    "aria_text": TextPart("AriaTextForCausalLM", _sizes(32000, 4096, 4096, 32, 32, 2048)),
    "bailing_hybrid": TextPart("BailingMoeV3ForCausalLM"),  # Ling 3
    "cohere_compass_text": TextPart(
        "CohereCompassForCausalLM", _sizes(256000, 8192, 22528, 40, 64, 8192)
    ),
    "cohere2": TextPart("Cohere2ForCausalLM", _sizes(256000, 8192, 22528, 40, 64, 8192)),
    "deepseek_v3": TextPart("DeepseekV3ForCausalLM"),
    "ernie4_5_vl_moe_text": TextPart(
        "Ernie4_5_VLMoeForCausalLM",
        _sizes(103424, 2560, 12288, 28, 20, 131072, num_key_value_heads=4, rope_theta=5e5),
        splits_width=True,
    ),
    "exaone4": TextPart("Exaone4ForCausalLM", _sizes(102400, 4096, 16384, 32, 32, 2048)),
    "gemma3_text": TextPart("Gemma3ForCausalLM"),
    "gemma3n_text": TextPart("Gemma3nForCausalLM"),
    "gemma4_text": TextPart("Gemma4ForCausalLM"),
    "gemma4_unified_text": TextPart("Gemma4UnifiedForCausalLM"),
    "glm4v_text": TextPart(
        "Glm4ForCausalLM",
        _sizes(
            *(151552, 4096, 13696, 40, 32, 32768),
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            partial_rotary_factor=1.0,
            attention_bias=True,
        ),
        splits_width=True,
    ),
    "glm4v_moe_text": TextPart(
        "Glm4MoeForCausalLM",
        _sizes(
            *(151424, 4096, 10944, 46, 96, 65536),
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            partial_rotary_factor=0.5,
            attention_bias=True,
            moe_intermediate_size=1408,
            num_experts_per_tok=8,
            n_shared_experts=1,
            n_routed_experts=128,
            routed_scaling_factor=1.0,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            norm_topk_prob=True,
        ),
        splits_width=True,
    ),
    "glm5_next_text": TextPart("Glm5NextForCausalLM"),
    "glm_ocr_text": TextPart(
        "Glm4ForCausalLM",
        _sizes(
            *(59392, 1024, 4096, 16, 16, 131072),
            num_key_value_heads=8,
            rms_norm_eps=1e-5,
            partial_rotary_factor=1.0,
            attention_bias=False,
        ),
        splits_width=True,
    ),
    "gpt_oss": TextPart("GptOssForCausalLM"),
    "granite4_vision_text": TextPart(
        "GraniteForCausalLM",
        _sizes(
            *(32000, 4096, 11008, 32, 32, 2048),
            embedding_multiplier=1.0,
            logits_scaling=1.0,
            residual_multiplier=1.0,
            attention_multiplier=1.0,
        ),
    ),
    "granite_docling_text": TextPart(
        "GraniteForCausalLM",
        _sizes(
            *(133800, 1024, 2048, 28, 16, 32768),
            num_key_value_heads=4,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            embedding_multiplier=12.0,
            logits_scaling=4.0,
            residual_multiplier=0.263,
            attention_multiplier=0.015625,
        ),
    ),
    "hunyuan_vl_text": TextPart(
        "HunYuanDenseV1ForCausalLM", _sizes(290943, 4096, 11008, 32, 32, 2048)
    ),
    "hy_v4_vl_text": TextPart(
        "HYV4ForCausalLM",
        _sizes(
            *(120832, 6144, 18432, 78, 64, 262144),
            moe_intermediate_size=2048,
            q_lora_rank=2048,
            index_n_heads=32,
            shares_norm_eps=True,
        ),
    ),
    "hyperclovax": TextPart("HyperCLOVAXForCausalLM", _sizes(32000, 4096, 11008, 32, 32, 2048)),
    "internlm2": TextPart("InternLM2ForCausalLM"),
    "kimi_k2": TextPart("DeepseekV3ForCausalLM"),
    "lfm2": TextPart(
        "Lfm2ForCausalLM", _sizes(65536, 2560, 12288, 32, 32, 128000, num_key_value_heads=8)
    ),
    "lfm2_moe": TextPart("Lfm2MoeForCausalLM"),
    "lfm3": TextPart("Lfm3ForCausalLM"),
    "llama": TextPart("LlamaForCausalLM", _sizes(32000, 4096, 11008, 32, 32, 2048)),
    "llama4_text": TextPart(
        "Llama4ForCausalLM",
        _sizes(202048, 5120, 8192, 48, 40, 131072, intermediate_size_mlp=16384),
    ),
    "minimax_m3_vl_text": TextPart(
        "MiniMaxM3VLForCausalLM",
        _sizes(
            *(200064, 6144, 3072, 60, 64, 524288),
            num_key_value_heads=4,
            num_local_experts=128,
            num_experts_per_tok=4,
        ),
    ),
    "ministral3": TextPart("Ministral3ForCausalLM"),
    "mistral": TextPart(
        "MistralForCausalLM", _sizes(32000, 4096, 14336, 32, 32, 131072, num_key_value_heads=8)
    ),
    "mistral4": TextPart("Mistral4ForCausalLM"),
    "molmo2_text": TextPart(
        "Molmo2ForCausalLM", _sizes(151936, 4096, 12288, 36, 32, 36864, num_key_value_heads=8)
    ),
    "muse_glimmer_text": TextPart(
        "MuseGlimmerForCausalLM",
        _sizes(202048, 6656, 19968, 52, 32, 131072, num_key_value_heads=2, head_dim=128),
    ),
    "nemotron_h": TextPart("NemotronHForCausalLM"),
    "paddleocr_vl_text": TextPart(
        "LlamaForCausalLM",
        _sizes(
            *(103424, 1024, 3072, 18, 16, 131072),
            num_key_value_heads=2,
            head_dim=128,
            rms_norm_eps=1e-5,
            rope_theta=5e5,
            tie_word_embeddings=True,
        ),
    ),
    "phi3": TextPart("Phi3ForCausalLM", _sizes(32064, 3072, 8192, 32, 32, 4096)),
    "qwen2": TextPart(
        "Qwen2ForCausalLM", _sizes(151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32)
    ),
    "qwen2_5_omni_text": TextPart(
        "Qwen2ForCausalLM",
        _sizes(*(152064, 3584, 18944, 28, 28, 32768), num_key_value_heads=4, rope_theta=1e6),
    ),
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": TextPart(
        "Qwen3ForCausalLM", _sizes(151936, 4096, 22016, 32, 32, 32768, num_key_value_heads=32)
    ),
    "qwen3_5_moe_text": TextPart("Qwen3_5MoeForCausalLM"),
    "qwen3_5_text": TextPart("Qwen3_5ForCausalLM"),
    "qwen3_moe": TextPart("Qwen3MoeForCausalLM"),
    "qwen3_omni_moe_text": TextPart(
        "Qwen3MoeForCausalLM",
        _sizes(
            *(3584, 2048, 18944, 28, 28, 32768),
            num_key_value_heads=4,
            rope_theta=1e6,
            norm_topk_prob=True,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
    ),
    "qwen3_vl_moe_text": TextPart(
        "Qwen3MoeForCausalLM",
        _sizes(
            *(151936, 2048, 5632, 24, 16, 128000),
            num_key_value_heads=16,
            head_dim=128,
            rope_theta=5e5,
            norm_topk_prob=True,
            num_experts=60,
            num_experts_per_tok=4,
            moe_intermediate_size=1408,
        ),
    ),
    "qwen3_vl_text": TextPart(
        "Qwen3ForCausalLM",
        _sizes(
            *(151936, 4096, 22016, 32, 32, 128000),
            num_key_value_heads=32,
            head_dim=128,
            rope_theta=5e5,
        ),
    ),
    "qwen4_exp_text": TextPart("Qwen4ExpForCausalLM"),
    "step3p5": TextPart("Step3p5ForCausalLM", _sizes(128815, 4096, 11264, 45, 64, 128000)),
}
# Text models that published models of these kinds have.
_DENSE = ("llama", "mistral", "qwen2", "qwen3", "phi3")
TEXT_PARTS = {
    "Apertus1p5ForConditionalGeneration": Whole("apertus1p5_text", tied=False),
    "AriaForConditionalGeneration": Whole("aria_text", tied=False),
    "AyaVisionForConditionalGeneration": Whole("cohere2", tied=True),
    "BailingMoeV3VLForConditionalGeneration": Whole("bailing_hybrid"),
    "Cohere2VisionForConditionalGeneration": Whole("cohere2", tied=True),
    "CohereCompassForConditionalGeneration": Whole("cohere_compass_text", tied=False),
    "Cosmos3OmniForConditionalGeneration": Whole("qwen3_vl_text", tied=False),
    "DeepseekVLForConditionalGeneration": Whole("llama", tied=True),
    "DeepseekVLHybridForConditionalGeneration": Whole("llama", tied=True),
    "DotsOCRForCausalLM": Whole("qwen2"),  # published files
    "Ernie4_5_VLMoeForConditionalGeneration": Whole("ernie4_5_vl_moe_text", tied=True),
    "Exaone4_5_ForConditionalGeneration": Whole("exaone4", tied=False),
    "FastVlmForConditionalGeneration": Whole("qwen2", tied=False),
    "Gemma3ForConditionalGeneration": Whole("gemma3_text"),
    "Gemma3nForConditionalGeneration": Whole("gemma3n_text"),
    "Gemma4ForConditionalGeneration": Whole("gemma4_text"),
    # GGUF files of the unified model have a text part of the other kind.
    "Gemma4UnifiedForConditionalGeneration": Whole("gemma4_unified_text", ("gemma4_text",)),
    "Glm46VForConditionalGeneration": Whole("glm4v_text", ("glm4v_moe_text",), tied=False),
    "Glm4vForConditionalGeneration": Whole("glm4v_text", tied=False),
    "Glm4vMoeForConditionalGeneration": Whole("glm4v_moe_text", tied=False),
    "Glm5NextForConditionalGeneration": Whole("glm5_next_text"),
    "GlmOcrForConditionalGeneration": Whole("glm_ocr_text", tied=False),
    "GotOcr2ForConditionalGeneration": Whole("qwen2", tied=True),
    "Granite4VisionForConditionalGeneration": Whole("granite4_vision_text", tied=False),
    "GraniteDoclingForConditionalGeneration": Whole("granite_docling_text", tied=True),
    "HCXVisionV2ForCausalLM": Whole("hyperclovax", tied=True),  # published files
    "HunYuanVLForConditionalGeneration": Whole("hunyuan_vl_text", tied=True),
    "HYV4VLForConditionalGeneration": Whole("hy_v4_vl_text", tied=False),
    "HyperCLOVAXVisionV2ForConditionalGeneration": Whole("hyperclovax", tied=True),
    "Idefics2ForConditionalGeneration": Whole("mistral", tied=False),
    "Idefics3ForConditionalGeneration": Whole("llama", tied=False),
    "InternVLChatModel": Whole("qwen2", (*_DENSE, "internlm2", "qwen3_moe", "gpt_oss")),
    "InternVLForConditionalGeneration": Whole(
        "qwen2", (*_DENSE, "qwen3_moe", "gpt_oss"), tied=True
    ),
    "JanusForConditionalGeneration": Whole("llama", tied=True),
    "KimiVLForConditionalGeneration": Whole("deepseek_v3"),
    "KimiK25ForConditionalGeneration": Whole("deepseek_v3", ("kimi_k2",)),  # published files
    "Kimi_K25ForConditionalGeneration": Whole("deepseek_v3", ("kimi_k2",)),
    "Lfm2VlForConditionalGeneration": Whole("lfm2", ("lfm2_moe",), tied=True),
    "Lfm3VlForConditionalGeneration": Whole("lfm3", tied=True),
    "LightOnOCRForConditionalGeneration": Whole("qwen3", tied=True),
    "LightOnOcrForConditionalGeneration": Whole("qwen3", tied=True),
    "Llama4ForConditionalGeneration": Whole("llama4_text", tied=False),
    "LlavaForConditionalGeneration": Whole("llama", _DENSE, tied=False),
    "LlavaNextForConditionalGeneration": Whole("llama", _DENSE, tied=False),
    "LlavaNextVideoForConditionalGeneration": Whole("llama", _DENSE, tied=False),
    "LlavaOnevisionForConditionalGeneration": Whole("qwen2", _DENSE, tied=False),
    "MiniCPMOcrForConditionalGeneration": Whole("qwen3_5_text", tied=True),
    "MiniCPMV4_6ForConditionalGeneration": Whole("qwen3_5_text", tied=False),
    "MiniCPMV4_7ForConditionalGeneration": Whole("qwen3_5_text", tied=False),
    "MiniMaxM3SparseForConditionalGeneration": Whole("minimax_m3_vl_text", tied=False),
    "Mistral3ForConditionalGeneration": Whole("mistral", ("ministral3", "mistral4", "llama")),
    "Molmo2ForConditionalGeneration": Whole("molmo2_text", tied=False),
    "MuseGlimmerForConditionalGeneration": Whole("muse_glimmer_text"),
    "NemotronH_Nano_Omni_Reasoning_V3": Whole("nemotron_h"),  # published files
    "NemotronH_Nano_VL_V2": Whole("nemotron_h"),
    "NemotronH_Omni_Reasoning_V3": Whole("nemotron_h"),
    "NemotronH_Super_Omni_Reasoning_V3": Whole("nemotron_h"),
    "Ovis2ForConditionalGeneration": Whole("qwen2", tied=True),
    "PaddleOCRVLForConditionalGeneration": Whole("paddleocr_vl_text", tied=True),
    "PerceptionLMForConditionalGeneration": Whole("llama"),
    "QianfanOCRForConditionalGeneration": Whole("qwen3", tied=False),
    "Qwen2VLForConditionalGeneration": Whole("qwen2_vl_text", tied=False),
    "Qwen2_5OmniForConditionalGeneration": Whole("qwen2_5_omni_text", tied=False),
    "Qwen2_5OmniModel": Whole("qwen2_5_omni_text", tied=False),  # published files
    "Qwen2_5OmniThinkerForConditionalGeneration": Whole("qwen2_5_omni_text", tied=False),
    "Qwen2_5_VLForConditionalGeneration": Whole("qwen2_5_vl_text", tied=False),
    "Qwen3OmniMoeForConditionalGeneration": Whole("qwen3_omni_moe_text", tied=False),
    "Qwen3OmniMoeThinkerForConditionalGeneration": Whole("qwen3_omni_moe_text", tied=False),
    "Qwen3VLForConditionalGeneration": Whole("qwen3_vl_text", tied=False),
    "Qwen3VLMoeForConditionalGeneration": Whole("qwen3_vl_moe_text", tied=False),
    "Qwen3_5ForConditionalGeneration": Whole("qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": Whole("qwen3_5_moe_text"),
    "Qwen4ExpForConditionalGeneration": Whole("qwen4_exp_text"),
    "SmolVLMForConditionalGeneration": Whole("llama", tied=False),
    "Step3p7ForConditionalGeneration": Whole("step3p5"),
    "VideoLlama3ForConditionalGeneration": Whole("qwen2", tied=False),
    "VideoLlavaForConditionalGeneration": Whole("llama", tied=False),
    "VipLlavaForConditionalGeneration": Whole("llama", tied=False),
}


def text_architectures(whole: str) -> list[str]:
    """Return the architectures that the text part of `whole` may have, the usual one first."""
    found = TEXT_PARTS[whole]
    return list(dict.fromkeys(TEXT_TYPES[k].architecture for k in (found.text, *found.others)))


def text_type(whole: str, architecture: str) -> str:
    """Return the model_type of a text part of `whole` that is of this architecture."""
    found = TEXT_PARTS[whole]
    kinds = (found.text, *found.others)
    return next(k for k in kinds if TEXT_TYPES[k].architecture == architecture)


def text_part(whole: str, config: Mapping[str, Any]) -> TextPart:
    """Return the text part of a model of images and text.

    Raises:
        ModelError: its text part is of a model type that this model is not known to have.
    """
    found = TEXT_PARTS[whole]
    kind = str(_own(config).get("model_type") or found.text)
    if kind in (found.text, *found.others):
        return TEXT_TYPES[kind]
    if not found.others and kind not in TEXT_TYPES:
        return TEXT_TYPES[found.text]  # the class has this part only, whatever an older file says
    known = ", ".join(dict.fromkeys((found.text, *found.others)))
    msg = (
        f"config.json: the text part of {whole} is of type {kind}, but cpuserve runs this model "
        f"with: {known}"
    )
    raise ModelError(msg)


def text_config(whole: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text part, as if it were the config of a text model.

    Ids of special tokens, and the dtype, may be only in the outer config. Its tie_word_embeddings
    has priority, because the head belongs to the whole model. In the configs of the first models
    (Qwen2-VL), the keys of the text part and of other parts are in one object.
    """
    part, own = text_part(whole, config), _own(config)
    config = {**config, **read_object(config, THINKER)}
    tied = config.get("tie_word_embeddings")
    if tied is None and not own.keys() & {"tie_word_embeddings", "tie_embedding"}:
        tied = TEXT_PARTS[whole].tied
    outer = {k: v for k, v in config.items() if v is not None}
    # A null of the text part is a value (no sliding window), unless the outer config has the key.
    own = {k: v for k, v in own.items() if v is not None or k not in outer}
    merged = {**part.defaults, **outer, **own}
    if part.splits_width and merged.get("head_dim") is None:
        heads = read_int(merged, "num_attention_heads")
        merged["head_dim"] = read_int(merged, "hidden_size") // heads
    return {**merged, **({} if tied is None else {"tie_word_embeddings": tied})}


def _own(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of the text part; {} if the config has no such object."""
    config = read_object(config, THINKER) or config
    return next((found for key in KEYS if (found := read_object(config, key))), {})
