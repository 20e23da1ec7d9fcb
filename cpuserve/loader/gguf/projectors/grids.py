"""Projectors of towers that read pictures of any size.

Source: the converters and tools/mtmd of llama.cpp.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

from cpuserve.loader.gguf.keys import Keys
from cpuserve.loader.gguf.projectors.record import (
    SIGLIP,
    Projector,
    embeddings,
    read_pixels,
    read_vision,
    shape_of,
)
from cpuserve.models.towers import PICTURES

_QWEN2_VL = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_q": "attn.qkv",
    "attn_k": "attn.qkv",
    "attn_v": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}
_QWEN25_VL = {
    **_QWEN2_VL,
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN2_TOP = {
    "v.patch_embd": "model.visual.patch_embed.proj",
    "v.post_ln": "model.visual.merger.ln_q",
    "mm.0": "model.visual.merger.mlp.0",
    "mm.2": "model.visual.merger.mlp.2",
}
_QWEN3_VL = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_up": "mlp.linear_fc1",
    "ffn_down": "mlp.linear_fc2",
}


_GLM4V = {
    "Glm4ForCausalLM": "Glm4vForConditionalGeneration",
    "Glm4MoeForCausalLM": "Glm4vMoeForConditionalGeneration",
}
_GLM = {
    **_QWEN25_VL,
    "attn_qkv": "attn.qkv",
    "attn_q_norm": "attn.q_norm",
    "attn_k_norm": "attn.k_norm",
}
_PIXTRAL_12B = {
    "architectures": {
        f"{name}ForCausalLM": "LlavaForConditionalGeneration" for name in ("Llama", "Mistral")
    },
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
}
_DOTS_OCR = {
    "ln1": "norm1",
    "ln2": "norm2",
    "attn_qkv": "attn.qkv",
    "attn_out": "attn.proj",
    "ffn_gate": "mlp.fc1",
    "ffn_up": "mlp.fc3",
    "ffn_down": "mlp.fc2",
}


def _dots_ocr(keys: Keys) -> dict[str, Any]:
    patch, merge = keys.count("patch_size"), keys.count("projector.scale_factor")
    return {
        "model_type": "dots_ocr",
        "vision_config": {
            "embed_dim": keys.count("embedding_length"),
            "hidden_size": keys.count("projection_dim"),
            "intermediate_size": keys.count("feed_forward_length"),
            "num_hidden_layers": keys.count("block_count"),
            "num_attention_heads": keys.count("attention.head_count"),
            "rms_norm_eps": keys.real("attention.layer_norm_epsilon"),
            "patch_size": patch,
            "spatial_merge_size": merge,
        },
        PICTURES: {**_any_size(keys, patch, merge, (1, 1)), **_pixel_limits(keys)},
    }


def _qwen2_vl(keys: Keys) -> dict[str, Any]:
    vision, merge = _grid_vision(keys), keys.count("spatial_merge_size", 2)
    # The converter writes the width of the text part as feed_forward_length.
    width, up = vision.pop("hidden_size"), keys.file.tensors.get("v.blk.0.ffn_up.weight")
    vision |= {"embed_dim": width, "mlp_ratio": max(up.shape) // width if up else 4}
    return {
        "model_type": "qwen2_vl",
        "vision_config": {**vision, "spatial_merge_size": merge},
        PICTURES: _any_size(keys, vision["patch_size"], merge, (4, 16384)),
    }


def _qwen25_vl(keys: Keys) -> dict[str, Any]:
    vision, merge = _grid_vision(keys), keys.count("spatial_merge_size", 2)
    every = keys.count("n_wa_pattern")
    vision |= {
        "spatial_merge_size": merge,
        "window_size": 112,  # of all published models; files do not have it
        "fullatt_block_indexes": list(range(every - 1, vision["depth"], every)),
    }
    return {
        "model_type": "qwen2_5_vl",
        "vision_config": vision,
        PICTURES: _any_size(keys, vision["patch_size"], merge, (4, 16384)),
    }


def _qwen25_omni(keys: Keys) -> dict[str, Any]:
    return {**_qwen25_vl(keys), "model_type": "qwen2_5_omni_thinker"}


def _grid_vision(keys: Keys) -> dict[str, Any]:
    """Return the numbers of read_vision, two of them under the names of Qwen as well."""
    vision = read_vision(keys)
    qwen_names = {"depth": vision["num_hidden_layers"], "num_heads": vision["num_attention_heads"]}
    return {**vision, **qwen_names}


def _qwen3_vl(keys: Keys) -> dict[str, Any]:
    vision, merge = _grid_vision(keys), keys.count("spatial_merge_size", 2)
    levels = keys.raw("is_deepstack_layers") or []
    if not isinstance(levels, list) or not all(isinstance(level, bool) for level in levels):
        keys.fail("is_deepstack_layers", levels, "a list of booleans")
    vision |= {
        "num_position_embeddings": (vision["image_size"] // vision["patch_size"]) ** 2,
        "spatial_merge_size": merge,
        "deepstack_visual_indexes": [i for i, level in enumerate(levels) if level],
    }
    return {
        "model_type": "qwen3_vl",
        "vision_config": vision,
        PICTURES: _any_size(keys, vision["patch_size"], merge, (64, 16384)),
    }


def _glm(keys: Keys) -> dict[str, Any]:
    """Return the settings of GLM-OCR, or of GLM-4.1V to 4.6V, with a table in the tower."""
    has_table = keys.has("v.position_embd.weight")
    vision, merge = _grid_vision(keys), keys.count("spatial_merge_size", 2)
    vision |= {
        "rms_norm_eps": vision["layer_norm_eps"],
        "attention_bias": keys.has("v.blk.0.attn_qkv.bias"),
        "out_hidden_size": keys.count("projection_dim"),
        "spatial_merge_size": merge,
    }
    return {
        "model_type": "glm4v" if has_table else "glm_ocr",
        **({"architectures": _GLM4V} if has_table else {}),
        "vision_config": vision,
        # Of the published models; each picture counts as two frames of a video.
        PICTURES: {
            **_any_size(keys, vision["patch_size"], merge, (16, 12288)),
            "temporal_patch_size": 2,
        },
    }


def _paddleocr(keys: Keys) -> dict[str, Any]:
    vision = read_vision(keys)
    places, patch = shape_of(keys, "v.position_embd.weight", 2)[0], vision["patch_size"]
    # The converter writes the root of the most pixels of a picture as image_size.
    vision |= {"image_size": isqrt(places) * patch, "spatial_merge_size": 2}
    return {
        "model_type": "paddleocr_vl",
        "vision_config": vision,
        PICTURES: {
            **_any_size(keys, patch, 2, (1, 1)),
            **_pixel_limits(keys),
        },
    }


def _pixel_limits(keys: Keys) -> dict[str, Any]:
    """Return the settings for the least and the most pixels of a picture; ModelError without."""
    least, most = (keys.count(f"image_{end}_pixels") for end in ("min", "max"))
    return {"size": {"shortest_edge": least, "longest_edge": most}}


def _pixtral(keys: Keys) -> dict[str, Any]:
    """Return the settings of Mistral 3, or of Pixtral 12B, which merges no patches."""
    vision = {**read_vision(keys), "model_type": "pixtral"}
    if vision["hidden_act"] == "gelu_pytorch_tanh":
        vision["hidden_act"] = "gelu"  # files have one key for both
    is_12b = not keys.has("mm.patch_merger.weight")
    return {
        "model_type": "llava" if is_12b else "mistral3",
        **(_PIXTRAL_12B if is_12b else {}),
        "spatial_merge_size": keys.count("spatial_merge_size", 1),
        "multimodal_projector_bias": keys.has("mm.1.bias"),
        "vision_config": vision,
        PICTURES: {
            **read_pixels(keys),
            "size": {"longest_edge": vision["image_size"]},
            "resample": 3,
        },
    }


def _light_on(keys: Keys) -> dict[str, Any]:
    return {**_pixtral(keys), "model_type": "lighton_ocr"}


def _any_size(keys: Keys, patch: int, merge: int, tokens: tuple[int, int]) -> dict[str, Any]:
    """Return the settings of pictures of any size.

    tokens: the least and the most of a picture in the published models, as files do not have them.
    """
    least, most = (count * (patch * merge) ** 2 for count in tokens)
    return {
        **read_pixels(keys),
        "patch_size": patch,
        "merge_size": merge,
        "size": {"shortest_edge": least, "longest_edge": most},
        "resample": 3,
    }


_PIXTRAL_TOP = {
    "v.patch_embd": "vision_tower.patch_conv",
    "v.pre_ln": "vision_tower.ln_pre",
    "mm.input_norm": "multi_modal_projector.norm",
    "mm.patch_merger": "multi_modal_projector.patch_merger.merging_layer",
    "mm.1": "multi_modal_projector.linear_1",
    "mm.2": "multi_modal_projector.linear_2",
}
_PIXTRAL = {
    "ln1": "attention_norm",
    "ln2": "ffn_norm",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_out": "attention.o_proj",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
PROJECTORS = {
    "qwen2vl_merger": Projector(
        {"Qwen2ForCausalLM": "Qwen2VLForConditionalGeneration"},
        _qwen2_vl,
        _QWEN2_TOP,
        "model.visual.blocks",
        _QWEN2_VL,
    ),
    "qwen2.5vl_merger": Projector(
        {"Qwen2ForCausalLM": "Qwen2_5_VLForConditionalGeneration"},
        _qwen25_vl,
        _QWEN2_TOP,
        "model.visual.blocks",
        _QWEN25_VL,
    ),
    "qwen2.5o": Projector(
        {"Qwen2ForCausalLM": "Qwen2_5OmniThinkerForConditionalGeneration"},
        _qwen25_omni,
        _QWEN2_TOP,
        "model.visual.blocks",
        {**_QWEN25_VL, **{f"attn_{part}": f"attn.{part}" for part in "qkv"}},
    ),
    "qwen3vl_merger": Projector(
        {
            "Qwen3ForCausalLM": "Qwen3VLForConditionalGeneration",
            "Qwen3MoeForCausalLM": "Qwen3VLMoeForConditionalGeneration",
        },
        _qwen3_vl,
        {
            "v.patch_embd": "model.visual.patch_embed.proj",
            "v.position_embd": "model.visual.pos_embed",
            "v.post_ln": "model.visual.merger.norm",
            "mm.0": "model.visual.merger.linear_fc1",
            "mm.2": "model.visual.merger.linear_fc2",
        },
        "model.visual.blocks",
        _QWEN3_VL,
        levels="model.visual.deepstack_merger_list",
        level={"norm": "norm", "fc1": "linear_fc1", "fc2": "linear_fc2"},
    ),
    "glm4v": Projector(
        {"Glm4ForCausalLM": "GlmOcrForConditionalGeneration"},
        _glm,
        {
            "v.norm_embd": "model.visual.post_conv_layernorm",
            "v.position_embd": "model.visual.embeddings.position_embedding",
            "v.patch_embd": "model.visual.patch_embed.proj",
            "v.post_ln": "model.visual.post_layernorm",
            "mm.patch_merger": "model.visual.downsample",
            "mm.model.fc": "model.visual.merger.proj",
            "mm.post_norm": "model.visual.merger.post_projection_norm",
            "mm.gate": "model.visual.merger.gate_proj",
            "mm.up": "model.visual.merger.up_proj",
            "mm.down": "model.visual.merger.down_proj",
        },
        "model.visual.blocks",
        _GLM,
    ),
    "paddleocr": Projector(
        {"LlamaForCausalLM": "PaddleOCRVLForConditionalGeneration"},
        _paddleocr,
        {
            **embeddings("visual.vision_model"),
            "mm.input_norm": "mlp_AR.pre_norm",
            "mm.1": "mlp_AR.linear_1",
            "mm.2": "mlp_AR.linear_2",
        },
        "visual.vision_model.encoder.layers",
        SIGLIP,
    ),
    "pixtral": Projector(
        {
            f"{name}ForCausalLM": "Mistral3ForConditionalGeneration"
            for name in ("Llama", "Mistral", "Ministral3")
        },
        _pixtral,
        _PIXTRAL_TOP,
        "vision_tower.transformer.layers",
        _PIXTRAL,
        interleaved=("attn_q", "attn_k"),
    ),
    "dots_ocr": Projector(
        {"Qwen2ForCausalLM": "DotsOCRForCausalLM"},
        _dots_ocr,
        {
            "v.patch_embd": "vision_tower.patch_embed.patchifier.proj",
            "v.pre_ln": "vision_tower.patch_embed.patchifier.norm",
            "mm.post_norm": "vision_tower.post_trunk_norm",
            "mm.input_norm": "vision_tower.merger.ln_q",
            "mm.0": "vision_tower.merger.mlp.0",
            "mm.2": "vision_tower.merger.mlp.2",
        },
        "vision_tower.blocks",
        _DOTS_OCR,
    ),
    "lightonocr": Projector(
        {"Qwen3ForCausalLM": "LightOnOcrForConditionalGeneration"},
        _light_on,
        _PIXTRAL_TOP,
        "vision_tower.transformer.layers",
        _PIXTRAL,
        interleaved=("attn_q", "attn_k"),
    ),
}
