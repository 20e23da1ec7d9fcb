"""Tiny random models of images and text, as the installed transformers writes them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from cpuserve.core.media import MediaItem
from cpuserve.media.pictures.families.llava_next import LlavaNextPictures
from cpuserve.media.pictures.families.llava_onevision import OnevisionPictures
from cpuserve.program.pictures import PictureForm
from cpuserve.runtime.picture_tower import PictureLines
from tests.helpers.dots_ocr import DOTS_OCR, write_dots_ocr

# Sizes that a config takes if its class has them.
# The part of a tiny Janus that draws pictures.
_DRAWS = {
    "embed_dim": 4,
    "num_embeddings": 8,
    "latent_channels": 32,
    "base_channels": 32,
    "channel_multiplier": [1, 1],
    "num_res_blocks": 1,
    "projection_dim": 8,
    "image_token_embed_dim": 8,
}
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 384,
    "max_position_embeddings": 512,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_VISION = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 32,
    "patch_size": 8,
    "out_hidden_size": 64,
    "projection_dim": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "mlp_ratio": 2,
    "video_temporal_patch_size": 2,
}


_OTHERS = {
    "d_model": 32,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "output_dim": 64,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "mlp_dim": 64,
    "image_size": 64,
    "output_channels": 32,
    "global_attn_indexes": [0],
    "intermediate_size": 64,
    "text_hidden_size": 64,
    "vision_feature_layer": [0],
}


def _sections(*sizes: int, **more: Any) -> dict[str, Any]:
    ropes = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sizes), **more}
    return {"rope_parameters": ropes}


# Values of text parts in addition to the sizes; sections are for the positions of three axes.
_KINDS: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 24,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "logit_scale": 0.5,
    },
    "glm4v_text": _sections(1, 1, 2, partial_rotary_factor=0.5),
    "glm4v_moe_text": {
        **_sections(1, 1, 2, partial_rotary_factor=0.5),
        "n_routed_experts": 4,
        "first_k_dense_replace": 1,
    },
    "glm_ocr_text": _sections(2, 3, 3),
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "lfm3": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "sliding_attention", "conv", "full_attention"],
    },
    "llama4_text": {"interleave_moe_layer_step": 2, "intermediate_size_mlp": 80},
    "mistral": {"sliding_window": 24},
    "paddleocr_vl_text": _sections(2, 3, 3),
    "ernie4_5_vl_moe_text": {
        **_sections(3, 3, 2),
        "num_hidden_layers": 3,
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": [24, 16],
    },
    "exaone4": {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "sliding_window": 24,
    },
    "granite4_vision_text": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.25,
    },
    "hunyuan_vl_text": _sections(2, 2, 2, 2, rope_type="dynamic", alpha=1000.0, factor=1.0),
    "hyperclovax": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.5,
        "residual_multiplier": 0.7,
        "logits_scaling": 0.25,
    },
    # transformers saves halves of the table, so the rows for pictures are as many as the others.
    "molmo2_text": {"additional_vocab_size": 384},
    "muse_glimmer_text": {"num_hidden_layers": 5, "sliding_window": 24},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "moe_shared_expert_intermediate_size": 40,
    },
    "qwen2_5_omni_text": _sections(2, 3, 3),
    "qwen3_omni_moe_text": _sections(2, 3, 3, mrope_interleaved=True),
    "qwen2_5_vl_text": _sections(2, 3, 3),
    "qwen2_vl_text": _sections(2, 3, 3),
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "qwen3_vl_moe_text": _sections(2, 3, 3),
    "qwen3_vl_text": _sections(2, 3, 3),
    "step3p5": {
        "layer_types": ["full_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "sliding_window": 24,
        "num_sliding_attention_heads": 2,
        "share_expert_dim": 40,
    },
}


def write_picture_model(
    architecture: str, kind: str, to: Path, more: dict[str, Any] | None = None
) -> torch.nn.Module:
    """Write a random model with a text part of this model type into `to`, and return it.

    more: further values of the config of the text part.
    """
    whole = getattr(transformers, architecture).config_class
    made, own = CONFIG_MAPPING[kind], {**_KINDS.get(kind, {}), **(more or {})}
    text = made(**_known(made(), {**_TEXT, **own}, also=own))
    config = whole(text_config=text, vision_config=_vision_of(whole), **_other_parts(whole))
    if hasattr(config, "deepstack_layer_map"):  # Granite 4 Vision needs one, which no text reads
        config.deepstack_layer_map, config.downsample_rate = [[0, 0]], "1/2"
    torch.manual_seed(0)
    model = getattr(transformers, architecture)(config).float().eval()
    for weights in model.parameters():
        if weights.ndim > 1:
            torch.nn.init.normal_(weights, std=0.1)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(to)
    if architecture == QIANFAN:
        _as_published(to)
    return model


def _vision_of(whole):
    usual = whole().vision_config
    # The heads of the Q-Former of Granite 4 Vision have 64 dims.
    wide = {"hidden_size": 64} if hasattr(whole(), "qformer_config") else {}
    found = _known(usual, {**_VISION, **wide})
    floats = {k: float(v) for k, v in found.items() if isinstance(getattr(usual, k), float)}
    lists = {
        k: [v, v] for k, v in found.items() if k == "image_size" and whole.model_type == "molmo2"
    }
    return type(usual)(**{**found, **floats, **lists})


def _other_parts(whole) -> dict[str, Any]:
    """Return small configs of the parts besides text and the first tower, which no test runs."""
    usual = whole()
    return {
        part: type(config)(**_known(config, _OTHERS))
        for part in ("audio_config", "high_res_vision_config", "adapter_config")
        if (config := getattr(usual, part, None)) is not None
    }


def _known(config, values: dict[str, Any], also: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the values whose keys the config or `also` has."""
    return {k: v for k, v in values.items() if k in (also or {}) or hasattr(config, k)}


# How the image processors of the models below make a number of a byte; the channels differ.
MEAN, DEVIATION, SCALE = (0.5, 0.4, 0.3), (0.5, 0.6, 0.45), 1 / 255
PIXELS = {
    "do_rescale": True,
    "rescale_factor": SCALE,
    "do_normalize": True,
    "image_mean": MEAN,
    "image_std": DEVIATION,
}
PATCH = 8
GEMMA3 = "Gemma3ForConditionalGeneration"
GEMMA4 = "Gemma4ForConditionalGeneration"
UNIFIED = "Gemma4UnifiedForConditionalGeneration"  # merges no patches, and has large ones
LFM2 = "Lfm2VlForConditionalGeneration"
INTERNVL = "InternVLForConditionalGeneration"
AYA = "AyaVisionForConditionalGeneration"
QIANFAN = "QianfanOCRForConditionalGeneration"
INTERNVL_CHAT = "InternVLChatModel"  # InternVL as its own code, which is not run, writes it
LLAVA = "LlavaForConditionalGeneration"
LLAVA_NEXT = "LlavaNextForConditionalGeneration"
ONEVISION_TILES = 2  # of a tiny LLaVA-OneVision: lines with more rows than these are scaled
ONEVISION = "LlavaOnevisionForConditionalGeneration"
DEEPSEEK_VL = "DeepseekVLForConditionalGeneration"
JANUS = "JanusForConditionalGeneration"
BORDERED = (DEEPSEEK_VL, JANUS)  # read one square with a border, and merge no patches
KIMI = "KimiVLForConditionalGeneration"
KIMI_K25 = "KimiK25ForConditionalGeneration"  # so published files call it
OMNI = "Qwen2_5OmniThinkerForConditionalGeneration"
OMNI3 = "Qwen3OmniMoeThinkerForConditionalGeneration"
MISTRAL3 = "Mistral3ForConditionalGeneration"
LIGHT_ON = "LightOnOcrForConditionalGeneration"
CANVAS_MODELS = (LLAVA_NEXT, ONEVISION)
LLAVAS = (LLAVA, *CANVAS_MODELS)
PIXTRAL_12B = f"{LLAVA} pixtral"
UNMERGED = (PIXTRAL_12B, UNIFIED)  # of pictures of any size, and merge no patches
PIXTRALS = (MISTRAL3, LIGHT_ON, PIXTRAL_12B)  # towers of Pixtral
GRANITE = "GraniteDoclingForConditionalGeneration"
GRANITE_FINE = f"{GRANITE} fine"  # with the connector that makes four times as many rows
IMAGE_ID = 5  # the id of the placeholder of a picture's row


def _write_random(architecture: str, config, to: Path, seed: int) -> torch.nn.Module:
    """Write the model of a config with random weights and biases, and return it."""
    model = _random(architecture, config, seed)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(to)
    return model


def _random(architecture: str, config, seed: int) -> torch.nn.Module:
    """Return the model of a config with random weights and biases."""
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(config).float().eval()
    with torch.no_grad():
        for weights in model.parameters():
            weights.add_(torch.randn(weights.shape) * 0.1)
        for name, value in model.named_buffers():
            if name.endswith(("put_min", "put_max")):  # the bounds of clipped linears
                value.fill_((0.5 + torch.rand(()).item()) * (-1 if name.endswith("min") else 1))
            elif ".std_" in name:
                value.add_(torch.randn(value.shape) * 0.1)
    return model


def write_tower_model(
    architecture: str,
    to: Path,
    *,
    side: int = 4,
    merge: int = 2,
    table: int | None = None,
    width: int = 48,
    vocab: int = _TEXT["vocab_size"],
    text: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """Write a random model of images with the settings of its image processor, and return it.

    architecture: that of SmolVLM, Idefics3, Gemma 3, Granite-Docling, InternVL, Qianfan-OCR, LLaVA,
      LLaVA-NeXT, LLaVA-OneVision, DeepSeek-VL, Janus or Aya Vision.

    side: patches of a side of a tile. table: places of a side of the learned table (default: side).
    width: the width of the tower, a multiple of its 3 heads.
    text: changed values of the config of the text part.
    """
    chat, fine = architecture == INTERNVL_CHAT, architecture == GRANITE_FINE
    architecture = architecture.replace(INTERNVL_CHAT, INTERNVL).partition(" ")[0]
    whole = getattr(transformers, architecture).config_class
    vision = {
        "hidden_size": width,
        "intermediate_size": width * 5 // 3,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": (table or side) * PATCH,
        "patch_size": PATCH,
    }
    changed = text or {}
    text = {"model_type": "llama", **{k: v for k, v in _TEXT.items() if "expert" not in k}}
    text = {k: v for k, v in text.items() if k != "moe_intermediate_size"}
    text["vocab_size"] = vocab
    own: dict[str, Any] = {"scale_factor": merge, "image_token_id": IMAGE_ID}
    if architecture == GEMMA3:
        kinds = ["sliding_attention", "full_attention"]
        text |= {"model_type": "gemma3_text", "sliding_window": 24, "layer_types": kinds}
        text["query_pre_attn_scalar"] = 1  # so that the few heads do not see the mean of all keys
        own = {"mm_tokens_per_image": (side // merge) ** 2, "image_token_index": IMAGE_ID}
        own["tie_word_embeddings"] = text["tie_word_embeddings"] = False
    if architecture == GRANITE:
        text |= {"model_type": "granite_docling_text", "attention_multiplier": 0.5}
        text |= {"embedding_multiplier": 3.0, "residual_multiplier": 0.7, "logits_scaling": 0.25}
        vision |= {"scale_factor": 2 * merge if fine else merge, "deepstack_visual_indexes": [0, 2]}
        vision["out_hidden_size"] = text["hidden_size"]
        own = {"image_token_id": IMAGE_ID, "density_router_hidden_size": 8}
    if architecture == LLAVA:
        vision["model_type"] = "clip_vision_model"
        own = {"image_token_index": IMAGE_ID, "image_seq_length": side**2}
    if architecture == LLAVA_NEXT:
        vision["model_type"] = "clip_vision_model"
        own = {"image_token_index": IMAGE_ID, "image_grid_pinpoints": canvases_of(side)}
    if architecture == ONEVISION:
        vision |= {"model_type": "siglip_vision_model", "vision_use_head": False}
        text["model_type"] = "qwen2"
        own = {"image_token_index": IMAGE_ID, "image_grid_pinpoints": canvases_of(side)}
        own["vision_aspect_ratio"] = f"anyres_max_{ONEVISION_TILES}"
    if architecture == DEEPSEEK_VL:
        own = {"image_token_id": IMAGE_ID, "tie_word_embeddings": False}
        vision["model_type"], text["tie_word_embeddings"] = "siglip_vision_model", False
    if architecture == JANUS:
        own = {"image_token_id": IMAGE_ID, "tie_word_embeddings": False, "vq_config": _DRAWS}
        text["tie_word_embeddings"] = False
        vision = {k: v for k, v in vision.items() if k != "intermediate_size"}
        vision |= {"mlp_ratio": 1.7, "projection_dim": text["hidden_size"], "depth": 4}
        vision["num_image_tokens"] = side**2
    if architecture == AYA:
        vision["model_type"] = "siglip_vision_model"
        # transformers multiplies by logit_scale in the text model only, and not in Aya Vision.
        text |= {"model_type": "cohere2", "logit_scale": 1.0, "sliding_window": 24}
        text["layer_types"] = ["sliding_attention", "full_attention"]
        own = {"image_token_index": IMAGE_ID, "downsample_factor": merge}
        own["alignment_intermediate_size"] = 40
    if architecture in (INTERNVL, QIANFAN):
        text["model_type"] = "qwen2" if architecture == INTERNVL else "qwen3"
        vision["layer_scale_init_value"] = 0.5
        own = {"image_token_id": IMAGE_ID, "downsample_ratio": 1 / merge}
        own["tie_word_embeddings"] = text["tie_word_embeddings"] = False
    config = whole(text_config={**text, **changed}, vision_config=vision, **own)
    model = _write_random(architecture, config, to, seed=0)
    pictures = {
        **PIXELS,
        "size": {"longest_edge": 4 * side * PATCH},
        "max_image_size": {"longest_edge": side * PATCH},
    }
    if architecture in (GEMMA3, GRANITE, INTERNVL, QIANFAN, AYA, *BORDERED, *LLAVAS):
        del pictures["max_image_size"]
        pictures["size"] = {"height": side * PATCH, "width": side * PATCH}
        pictures["resample"] = 2
    if fine:
        pictures["fine_route"] = True
        _take_fine_route(model)
    if architecture == AYA:
        sizes = {"img_size": side * PATCH, "patch_size": merge * PATCH}
        (to / "processor_config.json").write_text(json.dumps(sizes))
    if architecture == QIANFAN:
        _as_published(to)
    if architecture in (LLAVA_NEXT, ONEVISION):
        pictures["image_grid_pinpoints"] = canvases_of(side)
    if architecture in (LLAVA, LLAVA_NEXT):
        pictures |= {"size": {"shortest_edge": side * PATCH}, "crop_size": pictures["size"]}
    (to / "preprocessor_config.json").write_text(json.dumps(pictures))
    if chat:
        _as_internvl_chat(to)
    return model


def canvases_of(side: int) -> list[list[int]]:
    """Return the canvases of a tiny LLaVA-NeXT: (height, width) in pixels.

    side: patches of a side of a tile.
    """
    tile = side * PATCH
    tiles = ((1, 2), (2, 1), (2, 2), (3, 1), (1, 3))
    return [[down * tile, across * tile] for down, across in tiles]


def _as_published(folder: Path) -> None:
    """Name the layers of a Qianfan-OCR's text part as published files do.

    transformers 5.24 writes these layers with the "encoder." of the tower's.
    """
    file = folder / "model.safetensors"
    tensors = load_file(file)
    wrong = "language_model.model.encoder."
    assert any(name.startswith(wrong) for name in tensors)
    renamed = {n.replace(wrong, "language_model.model."): x for n, x in tensors.items()}
    save_file(renamed, file, {"format": "pt"})


def _take_fine_route(model: torch.nn.Module) -> None:
    """Let a Granite-Docling encode all pictures as if its processor had `fine_route`."""
    whole, mask = model.model.get_image_features, torch.ones(1, dtype=torch.bool)
    model.model.get_image_features = lambda *given, **more: whole(
        *given, **{**more, "tile_fine_mask": mask}
    )


# The names of InternVL's own code in place of those of transformers.
_CHAT_NAMES = {
    "vision_tower.": "vision_model.",
    ".embeddings.cls_token": ".embeddings.class_embedding",
    ".embeddings.patch_embeddings.projection.": ".embeddings.patch_embedding.",
    ".embeddings.position_embeddings": ".embeddings.position_embedding",
    ".encoder.layer.": ".encoder.layers.",
    ".attention.projection_layer.": ".attn.proj.",
    ".attention.": ".attn.",
    ".layernorm_before.": ".norm1.",
    ".layernorm_after.": ".norm2.",
    ".lambda_": ".ls",
    "multi_modal_projector.layer_norm.": "mlp1.0.",
    "multi_modal_projector.linear_1.": "mlp1.1.",
    "multi_modal_projector.linear_2.": "mlp1.3.",
}


def _as_internvl_chat(folder: Path) -> None:
    """Write an InternVL of transformers again, as its own code writes it."""
    config = json.loads((folder / "config.json").read_text())
    vision = config["vision_config"]
    own = {
        **{k: vision[k] for k in ("hidden_size", "intermediate_size", "num_attention_heads")},
        **{k: vision[k] for k in ("num_hidden_layers", "hidden_act", "layer_norm_eps")},
        "image_size": vision["image_size"][0],
        "patch_size": vision["patch_size"][0],
        "qkv_bias": vision["attention_bias"],
        "qk_normalization": vision["use_qk_norm"],
        "norm_type": "layer_norm",
    }
    made = {
        "architectures": [INTERNVL_CHAT],
        "model_type": "internvl_chat",
        "auto_map": {"AutoModel": "modeling_internvl_chat.InternVLChatModel"},
        "llm_config": config["text_config"],
        "vision_config": own,
        "force_image_size": own["image_size"],
        "downsample_ratio": config["downsample_ratio"],
        "dynamic_image_size": True,
        "use_thumbnail": True,
        "min_dynamic_patch": 1,
        "max_dynamic_patch": 12,
        "select_layer": -1,
        "ps_version": "v2",
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    (folder / "config.json").write_text(json.dumps(made))
    tensors = {}
    for name, value in load_file(folder / "model.safetensors").items():
        new = name
        for theirs, ours in _CHAT_NAMES.items():
            new = new.replace(theirs, ours)
        if not new.endswith("mask_token"):
            tensors[new] = value
    for name in [name for name in tensors if "vision" in name and ".attn.q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        tensors[name.replace("q_proj", "qkv")] = np.concatenate(parts)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


# Models with towers that read pictures of any size: the model type of the text part. After the
# architecture may be the name of a variant.
GRID_MODELS = {
    GEMMA4: "gemma4_text",
    f"{GEMMA4} whole": "gemma4_text",
    UNIFIED: "gemma4_unified_text",
    DOTS_OCR: "qwen2",
    "Glm46VForConditionalGeneration": "glm4v_text",
    "Glm4vForConditionalGeneration": "glm4v_text",
    "Glm4vMoeForConditionalGeneration": "glm4v_moe_text",
    "GlmOcrForConditionalGeneration": "glm_ocr_text",
    KIMI: "deepseek_v3",
    KIMI_K25: "deepseek_v3",
    LFM2: "lfm2",
    "Lfm3VlForConditionalGeneration": "lfm3",
    MISTRAL3: "mistral",
    LIGHT_ON: "qwen3",
    "PaddleOCRVLForConditionalGeneration": "paddleocr_vl_text",
    OMNI: "qwen2_5_omni_text",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
    OMNI3: "qwen3_omni_moe_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3_5ForConditionalGeneration": "qwen3_5_text",
}
_GRID_VISION = {
    **_VISION,
    "hidden_size": 48,
    "depth": 3,
    "num_hidden_layers": 3,
    "num_heads": 3,
    "num_attention_heads": 3,
    "num_position_embeddings": 25,
    "num_patches": 25,
    "deepstack_visual_indexes": [0, 1],
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
}
# Windows of 2 x 2 merged rows, in the first and the last layer.
_WINDOWS = {"window_size": 2 * 2 * PATCH, "fullatt_block_indexes": [1]}
_OWN_VISION: dict[str, dict[str, Any]] = {
    "Qwen2VLForConditionalGeneration": {"embed_dim": 48, "hidden_size": _TEXT["hidden_size"]},
    "Qwen2_5_VLForConditionalGeneration": _WINDOWS,
    OMNI: _WINDOWS,
}
_GRID_TEXT = {
    GEMMA4: {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": _TEXT["vocab_size"],
        "use_double_wide_mlp": True,
        "tie_word_embeddings": False,
    },
    # Like the larger models: pictures are seen whole, and layers without a window have one k.
    f"{GEMMA4} whole": {
        "use_bidirectional_attention": "vision",
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "tie_word_embeddings": False,
    },
}
_GRID_TEXT[UNIFIED] = {
    key: value for key, value in _GRID_TEXT[f"{GEMMA4} whole"].items() if "per_layer" not in key
}
_GEMMA4_TEXT = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "global_head_dim": 32,
    **{key: _TEXT[key] for key in ("head_dim", "num_key_value_heads")},
}
_GEMMA4_VISION = {
    "num_key_value_heads": 3,
    "head_dim": 16,
    "pooling_kernel_size": 2,
    "position_embedding_size": 2300,
}
_TOKENS = {"image_token_id": IMAGE_ID, "video_token_id": 6}
_TOKENS.update(vision_start_token_id=7, vision_end_token_id=8)
# The settings of their image processors.
_GRID_PICTURES = {
    **PIXELS,
    "max_image_tokens": 70,
    "tile_size": 8 * PATCH,
    "encoder_patch_size": PATCH,
    "downsample_factor": 2,
    "min_image_tokens": 4,
    "min_tiles": 2,
    "max_tiles": 10,
    "max_pixels_tolerance": 2.0,
    "max_soft_tokens": 70,
    "pooling_kernel_size": 2,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 16 * PATCH**2, "longest_edge": 256 * PATCH**2},
}


def write_grid_model(
    architecture: str,
    to: Path,
    vocab: int = _TEXT["vocab_size"],
    text: dict[str, Any] | None = None,
    tower: dict[str, Any] | None = None,
) -> torch.nn.Module:
    """Write a random model of GRID_MODELS with the settings of its image processor, and return it.

    Patches have PATCH x PATCH pixels, and 2 x 2 of them are merged.

    text, tower: changed values of the configs of these parts.
    """
    if architecture in (KIMI, KIMI_K25):
        return _write_kimi(architecture, to, vocab, text or {})
    if architecture == DOTS_OCR:
        inner = {**{k: v for k, v in _TEXT.items() if "expert" not in k}, "vocab_size": vocab}
        vision = {k: _GRID_VISION[k] for k in ("hidden_size", "depth", "num_heads", "patch_size")}
        vision["intermediate_size"] = 80
        return write_dots_ocr(to, {**inner, **(text or {})}, vision, _GRID_PICTURES, IMAGE_ID)
    kind, own = GRID_MODELS[architecture], _GRID_TEXT.get(architecture, {})
    vision_values = {**_GRID_VISION, **_OWN_VISION.get(architecture, {})}
    if architecture == UNIFIED:
        more = {**_GEMMA4_TEXT, **own}
        vision_values = {"patch_size": PATCH // 2, "pooling_kernel_size": 2, "mm_posemb_size": 280}
        vision_values |= {"mm_embed_dim": 48, "output_proj_dims": 48}
    elif architecture.startswith(GEMMA4):
        more = {**_GEMMA4_TEXT, **own}
        clipped = "whole" not in architecture
        vision_values |= {**_GEMMA4_VISION, "use_clipped_linears": clipped}
        vision_values["standardize"] = not clipped
    elif architecture in PIXTRALS:
        more = _KINDS.get(kind, {})
    elif architecture.startswith("Lfm"):
        more, vision_values["num_key_value_heads"] = _KINDS[kind], 1
    else:
        more = {**_sections(2, 1, 1, partial_rotary_factor=0.5), **_KINDS[kind]}
    architecture = architecture.partition(" ")[0]
    whole = getattr(transformers, architecture).config_class
    given, made = {**_TEXT, **more, "vocab_size": vocab}, CONFIG_MAPPING[kind]
    inner = made(**{**_known(made(), given, also=more), **(text or {})})
    towers = {GEMMA4: "gemma4_vision", UNIFIED: "gemma4_unified_vision"}
    named = towers.get(architecture)
    usual = CONFIG_MAPPING[named]() if named else whole().vision_config
    vision = type(usual)(**_known(usual, {**vision_values, **(tower or {})}))
    joined = {"projector_hidden_size": 80} if architecture.startswith("Lfm") else {}
    joined |= _other_parts(whole) if architecture in (OMNI, OMNI3) else {}
    config = whole(text_config=inner, vision_config=vision, **_TOKENS, **joined)
    model = _write_random(architecture, config, to, seed=2)
    if architecture == UNIFIED:
        model.register_forward_pre_hook(_masked, with_kwargs=True)
    if architecture in (OMNI, OMNI3):
        model.register_forward_pre_hook(_placed, with_kwargs=True)
    pictures = {**_GRID_PICTURES}
    if architecture in PIXTRALS:
        pictures["size"] = {"longest_edge": 16 * PATCH}
    if architecture == UNIFIED:
        pictures |= {"do_normalize": False, "patch_size": PATCH // 2}
    (to / "preprocessor_config.json").write_text(json.dumps(pictures))
    return model


def _masked(model: torch.nn.Module, given: tuple, named: dict) -> tuple[tuple, dict[str, Any]]:
    """Give a Gemma 4 Unified the masks that transformers makes for its `generate`.

    A picture is seen whole in layers with a window, and in order in others, as in Gemma 4 and vLLM.
    The forward method of transformers 5.24 alone makes other masks, as it did for Gemma 4 before.
    """
    kinds = named.get("mm_token_type_ids")
    if kinds is not None:
        named["attention_mask"] = model.create_masks_for_generate(
            model.config,
            torch.zeros(*kinds.shape, 1),
            attention_mask=None,
            cache=None,
            position_ids=None,
            mm_token_type_ids=kinds,
        )
    return given, named


def _placed(model: torch.nn.Module, given: tuple, named: dict) -> tuple[tuple, dict[str, Any]]:
    """Give an Omni of Qwen the places of tokens on three axes, which its `generate` computes.

    The method for these places looks for the tokens before and after a picture, which the prompts
    of these tests do not have.
    """
    named.pop("mm_token_type_ids", None)
    grids, ids = named.get("image_grid_thw"), named["input_ids"]
    if grids is not None:
        framed = torch.nn.functional.pad(ids, (1, 1), value=10)
        shown = framed == IMAGE_ID
        framed[:, :-1][shown[:, 1:] & ~shown[:, :-1]] = _TOKENS["vision_start_token_id"]
        places, _ = model.model.get_rope_index(framed, grids, None, torch.ones_like(framed))
        named["position_ids"] = places[:, :, 1:-1] - 1
    return given, named


# The text part of a tiny Kimi-VL: DeepSeek V3, with whole queries.
_LATENT = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
    "head_dim": 8,  # of the rotated part
}
# How files of Kimi K2.5 call its tensors in transformers, and what differs in files of Kimi-VL.
_K25_NAMES = {
    "model.mm_projector.in_proj.": "mm_projector.proj.0.",
    "model.mm_projector.out_proj.": "mm_projector.proj.2.",
    "model.mm_projector.": "mm_projector.",
    "model.vision_tower.layers.": "vision_tower.encoder.blocks.",
    "model.vision_tower.final_": "vision_tower.encoder.final_",
    "model.vision_tower.": "vision_tower.",
    ".norm1.": ".norm0.",
    ".norm2.": ".norm1.",
    ".mlp.fc1.": ".mlp.fc0.",
    ".mlp.fc2.": ".mlp.fc1.",
    ".attn.proj.": ".wo.",
    ".position_embeddings": ".weight",
}
_KIMI_NAMES = {
    "mm_projector.proj.0.": "multi_modal_projector.linear_1.",
    "mm_projector.proj.2.": "multi_modal_projector.linear_2.",
    "mm_projector.": "multi_modal_projector.",
}


def _write_kimi(architecture: str, to: Path, vocab: int, text: dict[str, Any]) -> torch.nn.Module:
    """Write a random Kimi K2.5 of transformers in the way of published files, and return it.

    architecture: KIMI or KIMI_K25, whose files have other names.
    """
    made = CONFIG_MAPPING["deepseek_v3"]
    inner = {**_known(made(), _TEXT), **_LATENT, "vocab_size": vocab, **text}
    vision = {**{k: _GRID_VISION[k] for k in ("hidden_size", "patch_size", "num_hidden_layers")}}
    vision |= {"num_attention_heads": 3, "intermediate_size": 80}
    config = transformers.Kimi_K25Config(
        text_config=made(**inner),
        vision_config=transformers.Kimi_K25VisionConfig(
            **vision, pos_emb_height=5, pos_emb_width=5
        ),
        projection_hidden_size=vision["hidden_size"],
        projection_layer_norm_eps=1e-5 if architecture == KIMI else 1e-3,
        image_token_id=IMAGE_ID,
        tie_word_embeddings=False,
    )
    # transformers 5.24 writes the layers of the text part of the whole model as `blocks`.
    model = _random("Kimi_K25ForConditionalGeneration", config, seed=2)
    transformers.utils.logging.disable_progress_bar()
    model.model.language_model.save_pretrained(to / "text")
    tensors = {
        f"language_model.model.{name}": value
        for name, value in load_file(to / "text" / "model.safetensors").items()
    }
    shutil.rmtree(to / "text")
    for name, value in model.state_dict().items():
        if name.startswith("model.language_model."):
            continue
        new = name if name != "lm_head.weight" else "language_model.lm_head.weight"
        for theirs, ours in {**_K25_NAMES, **(_KIMI_NAMES if architecture == KIMI else {})}.items():
            new = new.replace(theirs, ours)
        tensors[new] = value.numpy()
    for name in [name for name in tensors if ".attn.q_proj." in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        parts[:2] = [_side_by_side(part, vision["num_attention_heads"]) for part in parts[:2]]
        tensors[name.replace("attn.q_proj", "wqkv")] = np.concatenate(parts)
    places = {"init_pos_emb_height": 5, "init_pos_emb_width": 5, "merge_kernel_size": [2, 2]}
    pictures = {**PIXELS, "patch_size": PATCH, "in_token_limit": 256, "pad_input": True}
    if architecture == KIMI_K25:
        vision = {name if name == "patch_size" else f"vt_{name}": n for name, n in vision.items()}
        places["projector_ln_eps"] = 1e-3
        inner = {**PIXELS, "patch_size": PATCH, "merge_kernel_size": 2, "in_patch_limit": 256}
        pictures = {"media_proc_cfg": {**inner, "patch_limit_on_one_side": 512}}
        # The place of each frame of a video, which follows from its number.
        tensors["vision_tower.patch_embed.pos_emb.time_weight"] = np.ones((4, 1, 48), np.float32)
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    kind = "kimi_vl" if architecture == KIMI else "kimi_k25"
    whole = {
        "architectures": [architecture],
        "model_type": kind,
        "auto_map": {"AutoModelForCausalLM": f"modeling_{kind}.{architecture}"},
        "text_config": config.text_config.to_dict(),
        "vision_config": {**vision, **places, "model_type": "moonvit"},
        "media_placeholder_token_id": IMAGE_ID,
    }
    (to / "config.json").write_text(json.dumps(whole))
    (to / "preprocessor_config.json").write_text(json.dumps(pictures))
    model.written_as = architecture
    return model


def _side_by_side(value: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows of a matrix of heads with the two of each rotated pair side by side."""
    halves = value.reshape(heads, 2, -1, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)


def write_pixtral_12b(to: Path, text: dict[str, Any] | None = None) -> torch.nn.Module:
    """Write a random LLaVA with a Pixtral, in the way of Pixtral 12B, and return it.

    text: changed values of the config of the text part.
    """
    vision = CONFIG_MAPPING["pixtral"](
        hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=3,
        patch_size=PATCH, image_size=16 * PATCH,
    )  # fmt: skip
    made = CONFIG_MAPPING["mistral"]
    inner = made(**{**_known(made(), {**_TEXT, **_KINDS["mistral"]}), **(text or {})})
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=inner,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        image_token_index=IMAGE_ID,
    )
    model = _write_random(LLAVA, config, to, seed=4)
    pictures = {**PIXELS, "patch_size": PATCH, "size": {"longest_edge": 16 * PATCH}}
    (to / "preprocessor_config.json").write_text(json.dumps(pictures))
    return model


def name_of(model: torch.nn.Module) -> str:
    """Return the architecture of a model that was written here, with the name of its variant."""
    found = type(model).__name__
    if found.startswith("Kimi"):
        return model.written_as
    pixtral = found == LLAVA and model.config.vision_config.model_type == "pixtral"
    return PIXTRAL_12B if pixtral else found


def random_grid(rows: int, columns: int, seed: int = 0, patch: int = PATCH) -> np.ndarray:
    """Return the bytes of a picture of rows x columns patches, as an array of one tile."""
    stream = np.random.default_rng(seed)
    return stream.integers(0, 256, (1, rows * patch, columns * patch, 3), np.uint8)


def grid_inputs(
    grids: list[np.ndarray],
    architecture: str = "",
    patch: int = PATCH,
    merge: int = 2,
    frames: int = 2,
) -> dict[str, torch.Tensor]:
    """Return what the image processor makes of pictures of any size: arguments of the model.

    The patches are in merge order, but row after row for PaddleOCR-VL and Kimi-VL.

    patch: pixels of a side of a patch. merge: patches of a side of a block.
    frames: how often a still picture is repeated.
    """
    if architecture.partition(" ")[0] in (GEMMA4, UNIFIED, LFM2):
        return _padded_inputs(grids, architecture, patch)
    if architecture in PIXTRALS:
        return _padded_pictures(grids)
    found, plain = [], architecture.startswith(("Paddle", "Kimi"))
    for grid in grids:
        patches = torch.from_numpy(patches_of(grid, 1 if plain else merge, patch)).float() * SCALE
        patches = (patches.reshape(-1, patch, patch, 3) - torch.tensor(MEAN)) / torch.tensor(
            DEVIATION
        )
        still = patches.permute(0, 3, 1, 2)[:, :, None].expand(-1, -1, frames, -1, -1)
        found.append(still[:, :, 0] if plain else still.reshape(len(patches), -1))
    shapes = [(1, g.shape[1] // patch, g.shape[2] // patch) for g in grids]
    return {"pixel_values": torch.cat(found), "image_grid_thw": torch.tensor(shapes)}


def _padded_pictures(grids: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Return what the image processor of Pixtral makes: whole pictures of one size, and sizes."""
    sizes = torch.tensor([grid.shape[1:3] for grid in grids])
    pixels = torch.zeros(len(grids), 3, *sizes.amax(dim=0).tolist())
    for index, (grid, (height, width)) in enumerate(zip(grids, sizes.tolist(), strict=True)):
        numbers = (torch.from_numpy(grid[0]).float() * SCALE - torch.tensor(MEAN)) / torch.tensor(
            DEVIATION
        )
        pixels[index, :, :height, :width] = numbers.permute(2, 0, 1)
    return {"pixel_values": pixels, "image_sizes": sizes}


def _padded_inputs(
    grids: list[np.ndarray], architecture: str, patch: int
) -> dict[str, torch.Tensor]:
    """Return what the image processor of Gemma 4 or LFM2-VL makes: patches by row, and padding."""
    sizes = [(grid.shape[1] // patch, grid.shape[2] // patch) for grid in grids]
    most = max(rows * columns for rows, columns in sizes)
    pixels = torch.zeros(len(grids), most, 3 * patch**2)
    places = torch.full((len(grids), most, 2), -1)
    for index, (grid, (rows, columns)) in enumerate(zip(grids, sizes, strict=True)):
        count = rows * columns
        numbers = torch.from_numpy(patches_of(grid, 1, patch)).float()
        numbers = numbers.reshape(count, -1, 3) * SCALE
        if architecture != UNIFIED:
            numbers = (numbers - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
        pixels[index, :count] = numbers.reshape(count, -1)
        at = torch.arange(count)
        places[index, :count] = torch.stack([at % columns, at // columns], dim=1)
    if architecture != LFM2:
        return {"pixel_values": pixels, "image_position_ids": places}
    mask = (places[:, :, 0] >= 0).int()
    shapes = torch.tensor(sizes)
    return {"pixel_values": pixels, "spatial_shapes": shapes, "pixel_attention_mask": mask}


def random_tiles(count: int, side: int, seed: int = 0, patch: int = PATCH) -> np.ndarray:
    """Return tiles of bytes: uint8 [count, side * patch, side * patch, 3]."""
    stream = np.random.default_rng(seed)
    return stream.integers(0, 256, (count, side * patch, side * patch, 3), np.uint8)


def patches_of(tiles: np.ndarray, merge: int, patch: int = PATCH) -> np.ndarray:
    """Return the patches of tiles, in merge order: uint8 [patches, patch * patch * 3]."""
    count, height, width, _ = tiles.shape
    rows, columns = height // patch // merge, width // patch // merge
    cut = tiles.reshape(count, rows, merge, patch, columns, merge, patch, 3)
    return cut.transpose(0, 1, 4, 2, 5, 3, 6, 7).reshape(-1, patch * patch * 3)


def pixels_of(tiles: np.ndarray, architecture: str = "") -> dict[str, torch.Tensor]:
    """Return what the image processor makes of the tiles, as arguments of the model.

    The pixels are [1, count, 3, height, width], but [count, 3, height, width] for
    Gemma 3, InternVL, Qianfan-OCR, Aya Vision, DeepSeek-VL, Janus and the LLaVAs.
    """
    numbers = torch.from_numpy(tiles).float() * SCALE
    pixels = ((numbers - torch.tensor(MEAN)) / torch.tensor(DEVIATION)).permute(0, 3, 1, 2)
    if architecture in (GEMMA3, INTERNVL, QIANFAN, AYA, *BORDERED, *LLAVAS):
        return {"pixel_values": pixels}
    given = {"pixel_values": pixels[None]}
    if architecture == GRANITE:
        given["pixel_attention_mask"] = torch.ones(1, len(tiles), dtype=torch.bool)
    return given


def canvas_family(theirs: torch.nn.Module) -> LlavaNextPictures:
    """Return the preprocessing of a LLaVA-NeXT or LLaVA-OneVision that was written here."""
    side = theirs.config.vision_config.image_size
    canvases = [(high // side, wide // side) for high, wide in theirs.config.image_grid_pinpoints]
    given = {"side": side, "patch": PATCH, "canvases": tuple(canvases)}
    if type(theirs).__name__ == ONEVISION:
        return OnevisionPictures(most_tiles=ONEVISION_TILES, **given)
    return LlavaNextPictures(**given)


def canvas_inputs(tiles: list[np.ndarray], sizes: list[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Return what the image processor of CANVAS_MODELS makes of the tiles of pictures.

    sizes: (width, height) of each picture.
    """
    found = [pixels_of(each, LLAVA_NEXT)["pixel_values"] for each in tiles]
    padded = torch.nn.utils.rnn.pad_sequence(found, batch_first=True)
    return {"pixel_values": padded, "image_sizes": torch.tensor([each[::-1] for each in sizes])}


def placed_rows(encoded: np.ndarray, pictures: list[MediaItem], tower: Any) -> np.ndarray:
    """Return the rows of pictures in the order of their placeholders, as an engine places them."""
    parts, begin = [], 0
    for picture in pictures:
        form = PictureForm.of(picture.form)
        own = encoded[begin:][: form.num_patches if form.lines else picture.num_rows]
        begin += len(own)
        if form.lines:
            own = PictureLines.of(form).rows(own, 0, picture.num_rows, tower.line_end)
        parts.append(own)
    return np.concatenate(parts)


def tile_rows(theirs: torch.nn.Module, tiles: np.ndarray) -> torch.Tensor:
    """Return the rows of tiles that transformers adds to the stream of the text part."""
    with torch.inference_mode():
        found = theirs.model.get_image_features(**pixels_of(tiles, type(theirs).__name__))
        rows = torch.cat(list(found.pooler_output))
        if type(theirs).__name__ != GRANITE:
            return rows
        text = theirs.config.text_config
        levels = [torch.cat(list(each)) for each in found.deepstack_features]
        # The text part multiplies all embeddings, and ours is divided by the residual multiplier.
        parts = [rows * text.embedding_multiplier, *levels]
        return torch.cat(parts, dim=1) / text.residual_multiplier
