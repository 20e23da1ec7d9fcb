"""Writes tiny models of images and text as GGUF files: the text part, and an mmproj file.

convert_hf_to_gguf.py --mmproj of llama.cpp writes the same keys and tensors for the same model; of
LLaVA 1.5, an older script does. llama.cpp (mtmd of llama-cpp-python 0.3.36) opens all these files.

For SmolVLM, Gemma 3 and Qwen, the 16 greedy tokens after a picture are equal to the interpreter's.
Qwen3-VL needs more layers of text than levels for this. For dots.ocr, GLM, Janus, LFM2-VL,
Mistral 3, PaddleOCR-VL and Gemma 4, its encoded pictures differ from ours by at most 5e-4 of the
range, as it takes gelu from an fp16 table. It takes quick_gelu for Gemma 4, unless clip.use_gelu is
set (2.9e-3 instead of 1.7e-4). It puts the token of the class of InternVL and LLaVA behind the
patches, but not the row of the table of places; with a table that is moved by one, InternVL differs
by 1.6e-4.

Of Kimi-VL, it turns the first half of a head by the column of a patch, and the second half by its
row, where the model's own code takes turns, and it scales the table of places with linear weights.
With a table of zeros, and the rows of queries and keys in the order of its converter for Kimi K2.5,
the difference is 3.8e-4 of the range. Kimi K2.5 differs by 2.4e-4 if all norms have one epsilon.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from cpuserve.loader.names import checkpoint_to_hf
from cpuserve.models import stored_names
from tests.helpers.gguf_archs import DELTA_CHANGES
from tests.helpers.gguf_convert import convert

_SIGLIP = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "self_attn.projection_layer": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_QWEN = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.linear_fc1": "ffn_up",
    "mlp.linear_fc2": "ffn_down",
}
_QWEN2 = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GLM = {
    **_QWEN2,
    **_QWEN,
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
}
_GEMMA4 = {
    "input_layernorm": "ln1",
    "pre_feedforward_layernorm": "ln2",
    "post_attention_layernorm": "attn_post_norm",
    "post_feedforward_layernorm": "ffn_post_norm",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{
        f"{old}_proj{end}": new
        for end in ("", ".linear")
        for old, new in (
            *((f"self_attn.{part}", f"attn_{part}") for part in "qkv"),
            ("self_attn.o", "attn_out"),
            *((f"mlp.{part}", f"ffn_{part}") for part in ("gate", "up", "down")),
        )
    },
}
_INTERNVL = {
    "layernorm_before": "ln1",
    "layernorm_after": "ln2",
    **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
    **{f"attention.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    "attention.projection_layer": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_PIXTRAL = {
    "attention_norm": "ln1",
    "ffn_norm": "ln2",
    **{f"attention.{part}_proj": f"attn_{part}" for part in "qkv"},
    "attention.o_proj": "attn_out",
    **{f"feed_forward.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_DOTS_OCR = {
    "norm1": "ln1",
    "norm2": "ln2",
    "attn.qkv": "attn_qkv",
    "attn.proj": "attn_out",
    "mlp.fc1": "ffn_gate",
    "mlp.fc3": "ffn_up",
    "mlp.fc2": "ffn_down",
}
_KIMI = {
    "norm0": "ln1",
    "norm1": "ln2",
    **{f"w{part}": f"attn_{part}" for part in "qkv"},
    "wo": "attn_out",
    "mlp.fc0": "ffn_up",
    "mlp.fc1": "ffn_down",
    "wqkv": "attn_qkv",  # of Kimi K2.5
}
_LEVELS = "model.visual.deepstack_merger_list"
# By the beginning of a name in transformers: that of the file, and the names of a block's parts.
_NAMES = {
    "model.vision_model.embeddings.patch_embedding": "v.patch_embd",
    "model.vision_model.embeddings.position_embedding": "v.position_embd",
    "model.vision_model.post_layernorm": "v.post_ln",
    "model.connector.modality_projection.proj": "mm.model.fc",
    "model.aligner.fc1": "mm.0",
    **{f"model.aligner.hidden_layers.{i}": f"mm.{i + 1}" for i in range(3)},
    "model.visual.patch_embed.proj": "v.patch_embd",
    "model.visual.pos_embed": "v.position_embd",
    "model.visual.merger.norm": "v.post_ln",
    "model.visual.merger.ln_q": "v.post_ln",
    "model.visual.merger.mlp.0": "mm.0",
    "model.visual.merger.mlp.2": "mm.2",
    "model.visual.merger.linear_fc1": "mm.0",
    "model.visual.merger.linear_fc2": "mm.2",
    "model.visual.post_layernorm": "v.post_ln",
    "model.visual.post_conv_layernorm": "v.norm_embd",
    "model.visual.embeddings.position_embedding": "v.position_embd",
    "model.visual.downsample": "mm.patch_merger",
    "model.visual.merger.proj": "mm.model.fc",
    "model.visual.merger.post_projection_norm": "mm.post_norm",
    **{f"model.visual.merger.{part}_proj": f"mm.{part}" for part in ("gate", "up", "down")},
    "visual.vision_model.embeddings.patch_embedding": "v.patch_embd",
    "visual.vision_model.embeddings.position_embedding": "v.position_embd",
    "visual.vision_model.post_layernorm": "v.post_ln",
    "mlp_AR.pre_norm": "mm.input_norm",
    "mlp_AR.linear_1": "mm.1",
    "mlp_AR.linear_2": "mm.2",
    "vision_tower.patch_embedder.input_proj": "v.patch_embd",
    "model.embed_vision.embedding_projection": "mm.input_projection",
    "model.vision_embedder.patch_dense": "v.patch_embd",
    "model.vision_embedder.patch_ln1": "v.patch_norm.1",
    "model.vision_embedder.patch_ln2": "v.patch_norm.2",
    "model.vision_embedder.pos_norm": "v.patch_norm.3",
    "vision_tower.embeddings.patch_embeddings.projection": "v.patch_embd",
    "vision_tower.layernorm": "v.post_ln",
    "vision_tower.pre_layrnorm": "v.pre_ln",
    "vision_tower.patch_conv": "v.patch_embd",
    "vision_tower.patch_embed.proj": "v.patch_embd",
    "vision_tower.patch_embed.pos_emb": "v.position_embd",
    "vision_tower.encoder.final_layernorm": "v.post_ln",
    "vision_tower.patch_embed.patchifier.proj": "v.patch_embd",
    "vision_tower.patch_embed.patchifier.norm": "v.pre_ln",
    "vision_tower.post_trunk_norm": "mm.post_norm",
    "vision_tower.merger.ln_q": "mm.input_norm",
    "vision_tower.merger.mlp.0": "mm.0",
    "vision_tower.merger.mlp.2": "mm.2",
    "multi_modal_projector.pre_norm": "mm.input_norm",
    "mm_projector.pre_norm": "mm.input_norm",
    "mm_projector.proj.0": "mm.1",
    "mm_projector.proj.2": "mm.2",
    "vision_tower.ln_pre": "v.pre_ln",
    "multi_modal_projector.norm": "mm.input_norm",
    "multi_modal_projector.patch_merger.merging_layer": "mm.patch_merger",
    "multi_modal_projector.layer_norm": "mm.input_norm",
    "multi_modal_projector.linear_1": "mm.1",
    "multi_modal_projector.linear_2": "mm.2",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    "multi_modal_projector.mm_input_projection": "mm.input_projection",
    "vision_tower.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.embeddings.position_embedding": "v.position_embd",
    "vision_tower.post_layernorm": "v.post_ln",
}
_BLOCKS = {
    "model.vision_model.encoder.layers": _SIGLIP,
    "model.visual.blocks": _GLM,
    "vision_tower.encoder.layers": {**_GEMMA4, **_SIGLIP},
    "visual.vision_model.encoder.layers": _SIGLIP,
    "vision_tower.blocks": _DOTS_OCR,
    "vision_tower.encoder.blocks": _KIMI,
    "vision_tower.encoder.layer": _INTERNVL,
    "vision_tower.transformer.layers": _PIXTRAL,
}
# The same of whole names, and the names that differ in one kind of files.
_WHOLE_NAMES = {
    "vision_tower.embeddings.cls_token": "v.class_embd",
    "vision_tower.embeddings.class_embedding": "v.class_embd",
    "vision_tower.embeddings.position_embeddings": "v.position_embd.weight",
    "vision_tower.patch_embedder.position_embedding_table": "v.position_embd.weight",
    "image_newline": "model.image_newline",
    "model.vision_embedder.pos_embedding": "v.position_embd.weight",
    "vision_tower.std_bias": "v.std_bias",
    "vision_tower.std_scale": "v.std_scale",
}
_LLAVA = {"multi_modal_projector.linear_1": "mm.0", "multi_modal_projector.linear_2": "mm.2"}
_OWN_NAMES = {
    "internvl": {
        "multi_modal_projector.layer_norm": "mm.model.mlp.0",
        "multi_modal_projector.linear_1": "mm.model.mlp.1",
        "multi_modal_projector.linear_2": "mm.model.mlp.3",
    },
    "llava": _LLAVA,
    "llava_next": _LLAVA,
}
# Tensors that files have in addition: of an encoder of sound, and of a token.
_UNREAD = {
    "gemma4": ("a.blk.0.attn_q.weight", "mm.a.input_projection.weight"),
    "gemma4_unified": ("mm.a.input_projection.weight",),
    "mistral3": ("v.token_embd.img_break",),
    "qwen2_5_omni_thinker": ("a.blk.0.attn_q.weight", "mm.a.fc.weight"),
}
# The model types whose files have queries, keys and values apart.
_SPLIT = ("kimi_vl", "qwen2")
_OF_PATCHES = ("patch_dense.weight", "patch_ln1.weight", "patch_ln1.bias")
_PIXTRALS = ("mistral3", "lighton_ocr")
# The beginnings of the names of a tower's tensors.
_PARTS = (
    *("model.vision_model.", "model.connector.", "model.visual.", "model.embed_vision."),
    "model.vision_embedder.",
    *("vision_tower.", "multi_modal_projector.", "visual.", "mlp_AR.", "image_newline"),
    "mm_projector.",
    "model.aligner.",
)
# The same of tensors that files do not have: the part of Janus that draws pictures, the places of
# frames of Kimi K2.5, and the part of Qwen2.5-Omni for sound, which has other names.
_LEFT = (
    *("model.vqmodel.", "model.generation_", "vision_tower.patch_embed.pos_emb.time_weight"),
    *("audio_tower.", "model.audio_tower."),
)
# By architecture: the architecture of GGUF and the class of the text part.
TEXTS = {
    "DotsOCRForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3ForCausalLM"),
    "Gemma4ForConditionalGeneration whole": ("gemma4", "Gemma4ForCausalLM"),
    "Gemma4UnifiedForConditionalGeneration": ("gemma4", "Gemma4ForCausalLM"),
    "Glm4vForConditionalGeneration": ("glm4", "Glm4ForCausalLM"),
    "Glm4vMoeForConditionalGeneration": ("glm4moe", "Glm4MoeForCausalLM"),
    "GlmOcrForConditionalGeneration": ("glm4", "Glm4ForCausalLM"),
    "InternVLForConditionalGeneration": ("qwen2", "Qwen2ForCausalLM"),
    "JanusForConditionalGeneration": ("llama", "LlamaForCausalLM"),
    "KimiK25ForConditionalGeneration": ("deepseek2", "DeepseekV3ForCausalLM"),
    "KimiVLForConditionalGeneration": ("deepseek2", "DeepseekV3ForCausalLM"),
    "Lfm2VlForConditionalGeneration": ("lfm2", "Lfm2ForCausalLM"),
    "LightOnOcrForConditionalGeneration": ("qwen3", "Qwen3ForCausalLM"),
    "LlavaForConditionalGeneration": ("llama", "LlamaForCausalLM"),
    "LlavaForConditionalGeneration pixtral": ("llama", "LlamaForCausalLM"),
    "LlavaNextForConditionalGeneration": ("llama", "LlamaForCausalLM"),
    "Mistral3ForConditionalGeneration": ("llama", "LlamaForCausalLM"),
    "PaddleOCRVLForConditionalGeneration": ("paddleocr", "LlamaForCausalLM"),
    "Qwen2_5OmniThinkerForConditionalGeneration": ("qwen2vl", "Qwen2ForCausalLM"),
    "Qwen2VLForConditionalGeneration": ("qwen2vl", "Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2vl", "Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": ("qwen3vl", "Qwen3ForCausalLM"),
    "Qwen3_5ForConditionalGeneration": ("qwen35", "Qwen3_5ForCausalLM"),
    "SmolVLMForConditionalGeneration": ("llama", "LlamaForCausalLM"),
}
# Values of the text part that GGUF files, or the keys of `convert`, have for all models.
_GEMMA4_TEXT = {"num_experts": None, "final_logit_softcapping": 3.0}
GGUF_TEXTS = {
    "Gemma3ForConditionalGeneration": {
        "layer_types": ["sliding_attention"] * 2,
        "query_pre_attn_scalar": 16,
    },
    "Gemma4ForConditionalGeneration": _GEMMA4_TEXT,
    "Gemma4ForConditionalGeneration whole": _GEMMA4_TEXT,
    "Gemma4UnifiedForConditionalGeneration": {"final_logit_softcapping": 3.0},
    "Glm4vMoeForConditionalGeneration": {"routed_scaling_factor": 1.5},
    "Lfm2VlForConditionalGeneration": {"block_auto_adjust_ff_dim": False},
    "LlavaForConditionalGeneration pixtral": {"sliding_window": None},
    "Mistral3ForConditionalGeneration": {"sliding_window": None},
    "Qwen3_5ForConditionalGeneration": {**DELTA_CHANGES, "linear_num_key_heads": 2},
}
# The same of the tower.
GGUF_TOWERS = {
    f"Qwen2_5{name}ForConditionalGeneration": {"window_size": 112}
    for name in ("OmniThinker", "_VL")
}
# Numbers of the tiny text part that the keys of `convert` do not have.
_TEXT_KEYS = {
    "deepseek2": {
        "attention.key_length_mla": 40,
        "attention.value_length_mla": 32,
        "expert_group_count": 1,
        "expert_group_used_count": 1,
    },
    "glm4moe": {"rope.dimension_sections": [1, 1, 2, 0]},
    "qwen3vl": {"rope.dimension_sections": [2, 3, 3, 0], "n_deepstack_layers": 2},
}


def write_ggufs(
    source: Path, to: Path, kind: str = "F32", *, swapped: bool = False, **changes
) -> tuple[Path, Path]:
    """Write a model of `write_tower_model` or `write_grid_model`; return its two files.

    The folder `to` is made. The keys and tensors are those of the converter of llama.cpp.

    kind: the type of the tower's matrices; vectors are F32, and most convolutions.
    swapped: whether an MLP has its second matrix as ffn_up, as older files have.
    changes: values of keys of the mmproj file; None = the key is left out. `halved`: the name of
      a tensor that is F16 whatever the type of others; `dropped`: of one that is left out.
    """
    config = json.loads((source / "config.json").read_text())
    if "text_config" not in config:  # dots.ocr has the keys of both parts in one object
        config["text_config"] = {k: v for k, v in config.items() if k != "vision_config"}
    text, tower, names = {}, {}, stored_names(config)
    for name, value in load_file(source / "model.safetensors").items():
        found = checkpoint_to_hf(names.normalize(name))
        if found.startswith(_LEFT):
            continue
        (tower if is_of_tower(found) else text)[found] = value
    (to / "text").mkdir(parents=True)
    name = config["architectures"][0]
    arch, family = TEXTS.get(name) or TEXTS[f"{name} whole"]
    settings = {**config["text_config"], "architectures": [family]}
    heads = settings["num_attention_heads"]
    settings.setdefault("head_dim", settings["hidden_size"] // heads)
    share = settings.get("rope_parameters", {}).get("partial_rotary_factor")
    if share or arch == "glm4":
        settings["rotary_dim"] = int(settings["head_dim"] * (share or 1))
    if arch == "glm4":
        text = {name: split_pairs(settings, name, value) for name, value in text.items()}
    (to / "text" / "config.json").write_text(json.dumps(settings))
    save_file(text, to / "text" / "model.safetensors", {"format": "pt"})
    files = to / "tiny-F32.gguf", to / f"mmproj-tiny-{kind}.gguf"
    keys = _TEXT_KEYS.get(arch, {})
    if arch == "glm4":
        keys = {"rope.dimension_sections": [*settings["rope_parameters"]["mrope_section"], 0]}
    convert(arch, files[0], source=to / "text", **keys)
    write_mmproj(files[1], config, source, tower_of(config, tower, swapped), kind, **changes)
    return files


def _kind(config):
    """Return the model type; Pixtral 12B has files of the kind of Mistral 3."""
    own = config["vision_config"].get("model_type")
    return (
        "mistral3" if own == "pixtral" and config["model_type"] == "llava" else config["model_type"]
    )


def split_pairs(settings, name, value):
    """Return the rows of q and k as in files for M-RoPE: the even ones of the rotated first."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
        return value
    turned = settings["rotary_dim"]
    by_head = value.reshape(-1, settings["head_dim"], *value.shape[1:])
    parts = by_head[:, :turned:2], by_head[:, 1:turned:2], by_head[:, turned:]
    return np.concatenate(parts, axis=1).reshape(value.shape)


def is_of_tower(name: str) -> bool:
    """Whether a tensor is of the tower, or of the part that joins it to the text part."""
    return name.startswith(_PARTS)


def tower_of(config, tensors, swapped=False):
    """Return the tensors of a tower as the converter writes them."""
    found = {}
    for name, value in tensors.items():
        if name.startswith(("vision_tower.head.", "visual.vision_model.head.")):
            continue
        if name.endswith(("mask_token", "packing_position_embedding.weight")):
            continue
        if _kind(config).startswith("llava") and _is_unread(config, name):
            continue
        if name.startswith("model.vision_embedder.") and name.endswith(_OF_PATCHES):
            rows = value.reshape(-1, value.shape[-1] // 3, 3)  # channels are last
            value = rows.swapaxes(1, 2).reshape(value.shape)
        if name.endswith("pos_embedding"):
            value = value.swapaxes(0, 1)
        if name.endswith("pos_emb.weight") and _kind(config) == "kimi_vl":
            value = value.reshape(-1, value.shape[-1])
        if ".wqkv." in name and _kind(config) == "kimi_k25":
            value = _axis_by_axis(value, config["vision_config"]["vt_num_attention_heads"])
        if re.search(r"\.(?:attn\.|w)qkv\.", name) and config["model_type"].startswith(_SPLIT):
            for part, own in zip("qkv", np.split(value, 3), strict=True):
                found[_renamed(config, name.replace("qkv", part), swapped=swapped)] = own
            continue
        if _kind(config) in _PIXTRALS and re.search(r"attention\.[qk]_proj", name):
            heads = config["vision_config"]["num_attention_heads"]  # for ggml's "normal" RoPE
            halves = value.reshape(heads, 2, -1, *value.shape[1:])
            value = halves.swapaxes(1, 2).reshape(value.shape)
        short = _renamed(config, name, swapped=swapped)
        if name.endswith(("put_min", "put_max")):
            found[short] = value.reshape(1)
        elif short == "v.patch_embd.weight" and value.ndim == 2 and "patch_dense" not in name:
            # Channels are last.
            side = math.isqrt(value.shape[1] // 3)
            found[short] = value.reshape(-1, side, side, 3).transpose(0, 3, 1, 2)
        elif value.ndim == 5:  # two frames
            found[short], found[f"{short}.1"] = value[:, :, 0], value[:, :, 1]
        else:
            found[short] = value + 1 if "soft_emb_norm" in name else value
    width = config["text_config"]["hidden_size"]
    return found | {name: np.ones(width) for name in _UNREAD.get(_kind(config), ())}


def _axis_by_axis(value, heads):
    """Return the rows of queries and keys with the pairs of one axis before those of the other."""
    q, k, v = np.split(value, 3)
    turned = [x.reshape(heads, -1, 2, 2, *x.shape[1:]).swapaxes(1, 2) for x in (q, k)]
    return np.concatenate([*(x.reshape(v.shape) for x in turned), v])


def _is_unread(config, name):
    """Whether a tensor of LLaVA's tower is behind the layer that the projector reads."""
    layers = config["vision_config"]["num_hidden_layers"] + config["vision_feature_layer"] + 1
    match = re.match(r"vision_tower\.encoder\.layers\.(\d+)", name)
    return "post_layernorm" in name or (match is not None and int(match[1]) >= layers)


def _own_keys(config, pictures):
    """Return the keys that differ between kinds of towers."""
    vision = config["vision_config"]
    if config["model_type"] == "gemma3":
        side = vision["image_size"] // vision["patch_size"]
        merge = side // math.isqrt(config["mm_tokens_per_image"])
        return {
            "clip.projector_type": "gemma3",
            "clip.vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
            "clip.vision.projector.scale_factor": merge,
        }
    if config["model_type"] == "qwen2_vl":
        return {
            "clip.projector_type": "qwen2vl_merger",
            "clip.use_gelu": None,
            "clip.vision.embedding_length": vision["embed_dim"],
            "clip.vision.feed_forward_length": vision["hidden_size"],
            "clip.vision.attention.layer_norm_epsilon": 1e-6,
        }
    if config["model_type"].startswith("qwen2_5"):
        vl = config["model_type"] == "qwen2_5_vl"
        return {
            "clip.projector_type": "qwen2.5vl_merger" if vl else "qwen2.5o",
            "clip.use_gelu": None,
            "clip.use_silu": True,
            "clip.vision.n_wa_pattern": vision["fullatt_block_indexes"][0] + 1,
            "clip.vision.attention.layer_norm_epsilon": 1e-6,
        }
    if _kind(config) in _MORE_KEYS:
        return _MORE_KEYS[_kind(config)](config, vision, pictures)
    if config["model_type"].startswith("qwen3"):
        levels = vision.get("deepstack_visual_indexes", [])
        return {
            "clip.projector_type": "qwen3vl_merger",
            "clip.vision.attention.layer_norm_epsilon": 1e-6,
            "clip.vision.spatial_merge_size": vision["spatial_merge_size"],
            "clip.vision.is_deepstack_layers": [i in levels for i in range(vision["depth"])],
        }
    return {
        "clip.projector_type": "idefics3",
        "clip.vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "clip.vision.projector.scale_factor": config["scale_factor"],
        "clip.vision.preproc_image_size": pictures["size"]["longest_edge"],
    }


def _keys_of_dots_ocr(_config, vision, pictures):
    return {
        "clip.projector_type": "dots_ocr",
        "clip.use_gelu": None,
        "clip.use_silu": True,
        "clip.vision.image_size": 0,
        "clip.vision.embedding_length": vision["embed_dim"],
        "clip.vision.projector.scale_factor": vision["spatial_merge_size"],
        "clip.vision.image_min_pixels": pictures["size"]["shortest_edge"],
        "clip.vision.image_max_pixels": pictures["size"]["longest_edge"],
        "clip.vision.attention.layer_norm_epsilon": vision["rms_norm_eps"],
    }


def _keys_of_gemma4(_config, vision, _pictures):
    return {
        "clip.vision.projector_type": "gemma4v",
        "clip.use_gelu": None,
        "clip.vision.image_size": 224,
        "clip.vision.projector.scale_factor": vision["pooling_kernel_size"],
        "clip.vision.attention.layer_norm_epsilon": vision["rms_norm_eps"],
    }


def _keys_of_gemma4_unified(_config, vision, _pictures):
    return {
        "clip.vision.projector_type": "gemma4uv",
        "clip.use_gelu": None,
        "clip.vision.image_size": 224,
        "clip.vision.image_mean": [0.0] * 3,
        "clip.vision.image_std": [1.0] * 3,
        "clip.vision.embedding_length": vision["mm_embed_dim"],
        "clip.vision.feed_forward_length": 0,
        "clip.vision.block_count": 0,
        "clip.vision.attention.head_count": 0,
        "clip.vision.projector.scale_factor": vision["pooling_kernel_size"],
        "clip.vision.attention.layer_norm_epsilon": vision["rms_norm_eps"],
    }


def _keys_of_glm(_config, vision, _pictures):
    return {
        "clip.projector_type": "glm4v",
        "clip.use_gelu": None,
        "clip.use_silu": True,
        "clip.vision.attention.layer_norm_epsilon": vision["rms_norm_eps"],
    }


def _keys_of_internvl(config, vision, _pictures):
    return {
        "clip.projector_type": "internvl",
        "clip.vision.image_size": vision["image_size"][0],
        "clip.vision.patch_size": vision["patch_size"][0],
        "clip.vision.projector.scale_factor": int(1 / config["downsample_ratio"]),
        "clip.vision.preproc_min_tiles": 1,
        "clip.vision.preproc_max_tiles": 12,
        "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
    }


def _keys_of_janus(config, vision, _pictures):
    return {
        "clip.projector_type": "janus_pro",
        "clip.vision.feed_forward_length": int(vision["hidden_size"] * vision["mlp_ratio"]),
        "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
    }


def _keys_of_kimi_vl(_config, vision, _pictures):
    return {
        "clip.projector_type": "kimivl",
        "clip.vision.image_size": 64 * vision["patch_size"],
        "clip.vision.projector.scale_factor": vision["merge_kernel_size"][0],
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
    }


def _keys_of_kimi_k25(_config, vision, pictures):
    most = pictures["media_proc_cfg"]["in_patch_limit"] * vision["patch_size"] ** 2
    return {
        "clip.projector_type": "kimik25",
        "clip.vision.image_size": 64 * vision["patch_size"],
        "clip.vision.embedding_length": vision["vt_hidden_size"],
        "clip.vision.feed_forward_length": vision["vt_intermediate_size"],
        "clip.vision.block_count": vision["vt_num_hidden_layers"],
        "clip.vision.attention.head_count": vision["vt_num_attention_heads"],
        "clip.vision.image_mean": pictures["media_proc_cfg"]["image_mean"],
        "clip.vision.image_std": pictures["media_proc_cfg"]["image_std"],
        "clip.vision.image_min_pixels": 8 * vision["patch_size"] ** 2,
        "clip.vision.image_max_pixels": most,
        "clip.vision.projector.scale_factor": vision["merge_kernel_size"][0],
        "clip.vision.attention.layer_norm_epsilon": vision["projector_ln_eps"],
    }


def _keys_of_lfm2(config, vision, _pictures):
    return {
        "clip.projector_type": "lfm2",
        "clip.vision.image_size": 256,
        "clip.vision.projector.scale_factor": config["downsample_factor"],
        "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
    }


def _keys_of_llava(config, vision, _pictures):
    layers = vision["num_hidden_layers"] + config["vision_feature_layer"] + 1
    return {
        "clip.projector_type": "mlp",
        "clip.has_llava_projector": True,
        "clip.use_gelu": False,
        "clip.vision.block_count": layers,
        "clip.vision.feature_layer": [layers],
        "clip.vision.projection_dim": vision["projection_dim"],
        "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
    }


def _keys_of_llava_next(config, vision, pictures):
    canvases = [length for canvas in config["image_grid_pinpoints"] for length in canvas]
    return {
        **_keys_of_llava(config, vision, pictures),
        "clip.vision.image_grid_pinpoints": canvases,
        "clip.vision.mm_patch_merge_type": "spatial_unpad",
    }


def _keys_of_mistral3(config, vision, pictures):
    return {
        "clip.projector_type": "pixtral" if _kind(config) == "mistral3" else "lightonocr",
        "clip.use_gelu": vision["hidden_act"] == "gelu" or None,
        "clip.use_silu": vision["hidden_act"] == "silu" or None,
        "clip.vision.image_size": pictures["size"]["longest_edge"],
        "clip.vision.spatial_merge_size": config.get("spatial_merge_size"),
        "clip.vision.attention.layer_norm_epsilon": 1e-5,
    }


def _keys_of_paddleocr(_config, vision, pictures):
    most = pictures["size"]["longest_edge"]
    return {
        "clip.projector_type": "paddleocr",
        "clip.vision.image_size": math.isqrt(most),
        "clip.vision.image_min_pixels": pictures["size"]["shortest_edge"],
        "clip.vision.image_max_pixels": most,
        "clip.vision.attention.layer_norm_epsilon": vision["layer_norm_eps"],
    }


_MORE_KEYS = {
    "dots_ocr": _keys_of_dots_ocr,
    "gemma4": _keys_of_gemma4,
    "gemma4_unified": _keys_of_gemma4_unified,
    "glm4v": _keys_of_glm,
    "glm4v_moe": _keys_of_glm,
    "glm_ocr": _keys_of_glm,
    "internvl": _keys_of_internvl,
    "janus": _keys_of_janus,
    "kimi_k25": _keys_of_kimi_k25,
    "kimi_vl": _keys_of_kimi_vl,
    "lfm2_vl": _keys_of_lfm2,
    "lighton_ocr": _keys_of_mistral3,
    "llava": _keys_of_llava,
    "llava_next": _keys_of_llava_next,
    "mistral3": _keys_of_mistral3,
    "paddleocr_vl": _keys_of_paddleocr,
}


def write_mmproj(path, config, source, tensors, kind, **changes):
    """Write the tensors of a tower with the keys of the converter."""
    vision = config["vision_config"]
    pictures = json.loads((source / "preprocessor_config.json").read_text())
    places = vision.get("num_position_embeddings")
    image = vision.get("image_size", 560)
    if places:
        image = vision["patch_size"] * math.isqrt(places)
    layers = vision.get("num_hidden_layers") or vision.get("depth")  # of Janus, depth is another
    keys = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.use_gelu": True,
        "clip.vision.image_size": image,
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision.get("hidden_size"),
        "clip.vision.feed_forward_length": vision.get("intermediate_size"),
        "clip.vision.block_count": layers,
        "clip.vision.attention.head_count": vision.get("num_heads")
        or vision.get("num_attention_heads"),
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.image_mean": pictures.get("image_mean"),
        "clip.vision.image_std": pictures.get("image_std"),
        **_own_keys(config, pictures),
    }
    halved, dropped = changes.pop("halved", None), changes.pop("dropped", None)
    writer = gguf.GGUFWriter(path, changes.pop("arch", "clip"))
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in {**keys, **changes}.items():
        if value is not None:
            add[type(value)](key, value)
    for name, value in tensors.items():
        if name == dropped:
            continue
        matrix = value.ndim == 2 and name != "v.position_embd.weight"
        frame = f"{name}.1" in tensors or name.endswith(".1")  # F16 if matrices are
        typed = "F16" if name == halved else kind if matrix or (frame and kind == "F16") else "F32"
        type_ = gguf.GGMLQuantizationType[typed]
        data = gguf.quants.quantize(np.ascontiguousarray(value, np.float32), type_)
        writer.add_tensor(name, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(config, name, *, swapped):
    if name in _WHOLE_NAMES:
        return _WHOLE_NAMES[name]
    stem, _, end = name.rpartition(".")
    if (own := _OWN_NAMES.get(_kind(config), {}).get(stem)) is not None:
        return f"{own}.{end}"
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{end}"
    if stem.startswith(_LEVELS):
        number, part = stem.removeprefix(f"{_LEVELS}.").split(".")
        layer = config["vision_config"]["deepstack_visual_indexes"][int(number)]
        return f"v.deepstack.{layer}.{part.removeprefix('linear_')}.{end}"
    if end.startswith("lambda_"):
        return f"v.blk.{stem.split('.')[3]}.ls{end[-1]}.weight"
    at, number, part = re.fullmatch(r"(.+?)\.(\d+)\.(.+)", stem).groups()
    part = _BLOCKS[at][part]
    if swapped:
        part = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(part, part)
    return f"v.blk.{number}.{part}.{end}"
