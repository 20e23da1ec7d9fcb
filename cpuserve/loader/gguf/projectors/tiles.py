"""Projectors of towers over square tiles, and of LLaVA and Janus.

Source: the converters and tools/mtmd of llama.cpp.
"""

from __future__ import annotations

from typing import Any

from cpuserve.loader.gguf.keys import Keys
from cpuserve.loader.gguf.projectors.record import (
    SIGLIP,
    Projector,
    embeddings,
    read_pixels,
    read_vision,
)
from cpuserve.models.towers import PICTURES

_INTERNVL = {
    "ln1": "layernorm_before",
    "ln2": "layernorm_after",
    "attn_q": "attention.q_proj",
    "attn_k": "attention.k_proj",
    "attn_v": "attention.v_proj",
    "attn_q_norm": "attention.q_norm",
    "attn_k_norm": "attention.k_norm",
    "attn_out": "attention.projection_layer",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
    "ls1.weight": "lambda_1",
    "ls2.weight": "lambda_2",
}
# InternViT-6B: files do not say that its norms are RMS norms.
_RMS = (3200, 45)


def _idefics3(keys: Keys) -> dict[str, Any]:
    image = keys.count("image_size")
    return {
        "model_type": "idefics3",
        "scale_factor": keys.count("projector.scale_factor"),
        "vision_config": read_vision(keys),
        # A file without the longest side is of a time when llama.cpp made one tile of a picture.
        PICTURES: {
            **read_pixels(keys),
            "size": {"longest_edge": keys.count("preproc_image_size", image)},
            "max_image_size": {"longest_edge": image},
            "resample": 1,
        },
    }


def _gemma3(keys: Keys) -> dict[str, Any]:
    vision = read_vision(keys)
    image, merge = vision["image_size"], keys.count("projector.scale_factor", 4)
    side = image // vision["patch_size"] // merge
    return {
        "model_type": "gemma3",
        "mm_tokens_per_image": side**2,
        "vision_config": vision,
        PICTURES: {**read_pixels(keys), "size": {"height": image, "width": image}, "resample": 2},
    }


def _internvl(keys: Keys) -> dict[str, Any]:
    vision, merge = read_vision(keys), keys.count("projector.scale_factor", 2)
    image = vision["image_size"]
    if vision["hidden_act"] == "gelu_pytorch_tanh":
        vision["hidden_act"] = "gelu"  # files have one key for both
    rms = (vision["hidden_size"], vision["num_hidden_layers"]) == _RMS
    vision |= {
        "attention_bias": keys.has("v.blk.0.attn_q.bias"),
        "use_qk_norm": keys.has("v.blk.0.attn_q_norm.weight"),
        "norm_type": "rms_norm" if rms else "layer_norm",
    }
    return {
        "model_type": "internvl",
        "downsample_ratio": 1 / merge,
        "vision_config": vision,
        PICTURES: {
            **read_pixels(keys),
            "size": {"height": image, "width": image},
            "min_patches": keys.count("preproc_min_tiles", 1),
            "max_patches": keys.count("preproc_max_tiles", 12),
            "resample": 3,
        },
    }


_LLAVA_TEXTS = [f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Phi3")]
_LLAVA_NEXT = "LlavaNextForConditionalGeneration"


def _llava(keys: Keys) -> dict[str, Any]:
    """Return the settings of LLaVA 1.5 and 1.6; files end with the layer that is projected."""
    vision = read_vision(keys)
    image, layers = vision["image_size"], vision["num_hidden_layers"]
    canvases, joined = keys.raw("image_grid_pinpoints"), keys.raw("mm_patch_merge_type")
    known = (None, "flat") if canvases is None else ("spatial_unpad",)
    if joined not in known:
        keys.fail("mm_patch_merge_type", joined, "spatial_unpad with tiles, and flat without")
    if (read := keys.raw("feature_layer")) not in (None, [layers]):
        keys.fail("feature_layer", read, f"[{layers}]")
    tiles = {} if canvases is None else {"image_grid_pinpoints": _pairs(keys, canvases)}
    wholes = {"architectures": dict.fromkeys(_LLAVA_TEXTS, _LLAVA_NEXT)}
    return {
        "model_type": "llava_next" if tiles else "llava",
        **(wholes if tiles else {}),
        **tiles,
        "vision_feature_layer": -1,
        "multimodal_projector_bias": keys.has("mm.0.bias"),
        "vision_config": {**vision, "model_type": "clip_vision_model"},
        PICTURES: {
            **read_pixels(keys),
            **tiles,
            "size": {"shortest_edge": image},
            "crop_size": {"height": image, "width": image},
            "resample": 3,
        },
    }


def _pairs(keys: Keys, canvases: object) -> list[list[int]]:
    """Return the sizes of canvases, which a file has one after another."""
    numbers = canvases if isinstance(canvases, list) else []
    if not numbers or len(numbers) % 2 or not all(isinstance(each, int) for each in numbers):
        keys.fail("image_grid_pinpoints", canvases, "a list of pairs of sides in pixels")
    return [numbers[at : at + 2] for at in range(0, len(numbers), 2)]


_MOST_DEPTH = 8  # matrices of the projector of Janus


def _janus(keys: Keys) -> dict[str, Any]:
    vision = read_vision(keys)
    image = vision["image_size"]
    if vision["hidden_act"] == "gelu_pytorch_tanh":
        vision["hidden_act"] = "gelu"  # files have one key for both
    depth = sum(keys.has(f"mm.{i}.weight") for i in range(_MOST_DEPTH))
    # The width is the ratio times the hidden size, without its fraction.
    ratio = (vision["intermediate_size"] + 0.5) / vision["hidden_size"]
    vision |= {"mlp_ratio": ratio, "depth": depth, "projection_dim": keys.count("projection_dim")}
    return {
        "model_type": "janus",
        "vision_config": vision,
        PICTURES: {**read_pixels(keys), "size": {"height": image, "width": image}, "resample": 3},
    }


PROJECTORS = {
    "idefics3": Projector(
        {"LlamaForCausalLM": "Idefics3ForConditionalGeneration"},
        _idefics3,
        {
            **embeddings("model.vision_model"),
            "mm.model.fc": "model.connector.modality_projection.proj",
        },
        "model.vision_model.encoder.layers",
        SIGLIP,
    ),
    "gemma3": Projector(
        {"Gemma3ForCausalLM": "Gemma3ForConditionalGeneration"},
        _gemma3,
        {
            **embeddings("vision_tower"),
            "mm.soft_emb_norm": "multi_modal_projector.mm_soft_emb_norm",
            "mm.input_projection": "multi_modal_projector.mm_input_projection",
        },
        "vision_tower.encoder.layers",
        SIGLIP,
        added=("mm.soft_emb_norm.weight",),
    ),
    "internvl": Projector(
        {
            f"{name}ForCausalLM": "InternVLForConditionalGeneration"
            for name in ("Qwen2", "Qwen3", "Qwen3Moe", "Llama", "Mistral", "Phi3", "GptOss")
        },
        _internvl,
        {
            "v.class_embd": "vision_tower.embeddings.cls_token",
            "v.patch_embd": "vision_tower.embeddings.patch_embeddings.projection",
            "v.position_embd.weight": "vision_tower.embeddings.position_embeddings",
            "v.post_ln": "vision_tower.layernorm",
            "mm.model.mlp.0": "multi_modal_projector.layer_norm",
            "mm.model.mlp.1": "multi_modal_projector.linear_1",
            "mm.model.mlp.3": "multi_modal_projector.linear_2",
        },
        "vision_tower.encoder.layer",
        _INTERNVL,
    ),
    "janus_pro": Projector(
        {"LlamaForCausalLM": "JanusForConditionalGeneration"},
        _janus,
        {
            **embeddings("model.vision_model"),
            "mm.0": "model.aligner.fc1",
            **{f"mm.{i}": f"model.aligner.hidden_layers.{i - 1}" for i in range(1, _MOST_DEPTH)},
        },
        "model.vision_model.encoder.layers",
        {**SIGLIP, "attn_out": "self_attn.projection_layer"},
    ),
    "mlp": Projector(
        dict.fromkeys(_LLAVA_TEXTS, "LlavaForConditionalGeneration"),
        _llava,
        {
            "model.image_newline": "image_newline",
            **embeddings("vision_tower"),
            "v.class_embd": "vision_tower.embeddings.class_embedding",
            "v.pre_ln": "vision_tower.pre_layrnorm",
            "mm.0": "multi_modal_projector.linear_1",
            "mm.2": "multi_modal_projector.linear_2",
        },
        "vision_tower.encoder.layers",
        SIGLIP,
        width="mm.2.weight",
    ),
}
