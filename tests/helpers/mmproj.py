"""Writes tiny models of images and text as GGUF files: the text part, and an mmproj file.

convert_hf_to_gguf.py --mmproj of llama.cpp writes the same keys and tensors for the
same model. llama.cpp (mtmd of llama-cpp-python 0.3.36) and the interpreter have the same 16 greedy
tokens after a picture for all of TEXTS; their encoded pictures differ by at most 3e-4 of the range,
as llama.cpp takes gelu from an fp16 table. Qwen3-VL needs more layers of text than levels for this.
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
from tests.helpers.gguf_archs import DELTA_CHANGES
from tests.helpers.gguf_convert import convert

_SIGLIP = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
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
_LEVELS = "model.visual.deepstack_merger_list"
# By the beginning of a name in transformers: that of the file, and the names of a block's parts.
_NAMES = {
    "model.vision_model.embeddings.patch_embedding": "v.patch_embd",
    "model.vision_model.embeddings.position_embedding": "v.position_embd",
    "model.vision_model.post_layernorm": "v.post_ln",
    "model.connector.modality_projection.proj": "mm.model.fc",
    "model.visual.patch_embed.proj": "v.patch_embd",
    "model.visual.pos_embed": "v.position_embd",
    "model.visual.merger.norm": "v.post_ln",
    "model.visual.merger.ln_q": "v.post_ln",
    "model.visual.merger.mlp.0": "mm.0",
    "model.visual.merger.mlp.2": "mm.2",
    "model.visual.merger.linear_fc1": "mm.0",
    "model.visual.merger.linear_fc2": "mm.2",
    "multi_modal_projector.mm_soft_emb_norm": "mm.soft_emb_norm",
    "multi_modal_projector.mm_input_projection": "mm.input_projection",
    "vision_tower.embeddings.patch_embedding": "v.patch_embd",
    "vision_tower.embeddings.position_embedding": "v.position_embd",
    "vision_tower.post_layernorm": "v.post_ln",
}
_BLOCKS = {
    "model.vision_model.encoder.layers": _SIGLIP,
    "model.visual.blocks": {**_QWEN, **_QWEN2},
    "vision_tower.encoder.layers": _SIGLIP,
}
# By architecture: the architecture of GGUF and the class of the text part.
TEXTS = {
    "Gemma3ForConditionalGeneration": ("gemma3", "Gemma3ForCausalLM"),
    "Qwen2VLForConditionalGeneration": ("qwen2vl", "Qwen2ForCausalLM"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2vl", "Qwen2ForCausalLM"),
    "Qwen3VLForConditionalGeneration": ("qwen3vl", "Qwen3ForCausalLM"),
    "Qwen3_5ForConditionalGeneration": ("qwen35", "Qwen3_5ForCausalLM"),
    "SmolVLMForConditionalGeneration": ("llama", "LlamaForCausalLM"),
}
# Values of the text part that GGUF files, or the keys of `convert`, have for all models.
GGUF_TEXTS = {
    "Gemma3ForConditionalGeneration": {
        "layer_types": ["sliding_attention"] * 2,
        "query_pre_attn_scalar": 16,
    },
    "Qwen3_5ForConditionalGeneration": {**DELTA_CHANGES, "linear_num_key_heads": 2},
}
# The same of the tower.
GGUF_TOWERS = {"Qwen2_5_VLForConditionalGeneration": {"window_size": 112}}
# Numbers of the tiny text part that the keys of `convert` do not have.
_TEXT_KEYS = {"qwen3vl": {"rope.dimension_sections": [2, 3, 3, 0], "n_deepstack_layers": 2}}


def write_ggufs(
    source: Path, to: Path, kind: str = "F32", *, swapped: bool = False, **changes
) -> tuple[Path, Path]:
    """Write a model of `write_tower_model` or `write_grid_model`; return its two files.

    The folder `to` is made. The keys and tensors are those of the converter of llama.cpp.

    kind: the type of the tower's matrices; vectors are F32, and most convolutions.
    swapped: whether an MLP has its second matrix as ffn_up, as older files have.
    changes: values of keys of the mmproj file; None = the key is left out. `halved`: the name of
      a tensor that is F16 whatever the type of others.
    """
    config = json.loads((source / "config.json").read_text())
    text, tower = {}, {}
    for name, value in load_file(source / "model.safetensors").items():
        found = checkpoint_to_hf(name)
        own = found.startswith(("model.layers.", "model.norm.", "model.embed_tokens.", "lm_head."))
        (text if own else tower)[found] = value
    (to / "text").mkdir(parents=True)
    arch, family = TEXTS[config["architectures"][0]]
    settings = {**config["text_config"], "architectures": [family]}
    if share := settings.get("rope_parameters", {}).get("partial_rotary_factor"):
        settings["rotary_dim"] = int(settings["head_dim"] * share)
    (to / "text" / "config.json").write_text(json.dumps(settings))
    save_file(text, to / "text" / "model.safetensors", {"format": "pt"})
    files = to / "tiny-F32.gguf", to / f"mmproj-tiny-{kind}.gguf"
    convert(arch, files[0], source=to / "text", **_TEXT_KEYS.get(arch, {}))
    write_mmproj(files[1], config, source, _tower(config, tower, swapped), kind, **changes)
    return files


def _tower(config, tensors, swapped):
    """Return the tensors of a tower as the converter writes them."""
    found = {}
    for name, value in tensors.items():
        if name.startswith("vision_tower.head."):
            continue
        if ".attn.qkv." in name and config["model_type"].startswith("qwen2"):
            for part, own in zip("qkv", np.split(value, 3), strict=True):
                found[_renamed(config, name.replace("qkv", part), swapped=swapped)] = own
            continue
        short = _renamed(config, name, swapped=swapped)
        if value.ndim == 5:  # two frames
            found[short], found[f"{short}.1"] = value[:, :, 0], value[:, :, 1]
        else:
            found[short] = value + 1 if "soft_emb_norm" in name else value
    return found


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
    if config["model_type"] == "qwen2_5_vl":
        return {
            "clip.projector_type": "qwen2.5vl_merger",
            "clip.use_gelu": None,
            "clip.use_silu": True,
            "clip.vision.n_wa_pattern": vision["fullatt_block_indexes"][0] + 1,
            "clip.vision.attention.layer_norm_epsilon": 1e-6,
        }
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


def write_mmproj(path, config, source, tensors, kind, **changes):
    """Write the tensors of a tower with the keys of the converter."""
    vision = config["vision_config"]
    pictures = json.loads((source / "preprocessor_config.json").read_text())
    places = vision.get("num_position_embeddings")
    image = vision["patch_size"] * math.isqrt(places) if places else vision.get("image_size", 560)
    layers = vision.get("depth") or vision["num_hidden_layers"]
    keys = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.use_gelu": True,
        "clip.vision.image_size": image,
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision.get("intermediate_size"),
        "clip.vision.block_count": layers,
        "clip.vision.attention.head_count": vision.get("num_heads")
        or vision["num_attention_heads"],
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.image_mean": pictures["image_mean"],
        "clip.vision.image_std": pictures["image_std"],
        **_own_keys(config, pictures),
    }
    halved = changes.pop("halved", None)
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
    stem, _, end = name.rpartition(".")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.{end}"
    if stem.startswith(_LEVELS):
        number, part = stem.removeprefix(f"{_LEVELS}.").split(".")
        layer = config["vision_config"]["deepstack_visual_indexes"][int(number)]
        return f"v.deepstack.{layer}.{part.removeprefix('linear_')}.{end}"
    at, number, part = re.fullmatch(r"(.+?)\.(\d+)\.(.+)", stem).groups()
    part = _BLOCKS[at][part]
    if swapped:
        part = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(part, part)
    return f"v.blk.{number}.{part}.{end}"
