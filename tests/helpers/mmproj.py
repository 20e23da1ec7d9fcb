"""Writes tiny models of images and text as GGUF files: the text part, and an mmproj file.

They are as convert_hf_to_gguf.py --mmproj of llama.cpp writes them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file, save_file

from tests.helpers.gguf_convert import convert

_TOP = {
    "model.vision_model.embeddings.patch_embedding": "v.patch_embd",
    "model.vision_model.embeddings.position_embedding": "v.position_embd",
    "model.vision_model.post_layernorm": "v.post_ln",
    "model.connector.modality_projection.proj": "mm.model.fc",
}
_BLOCK = {
    "layer_norm1": "ln1",
    "layer_norm2": "ln2",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.out_proj": "attn_out",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
}


def write_ggufs(
    source: Path, to: Path, kind: str = "F32", *, swapped: bool = False, **changes
) -> tuple[Path, Path]:
    """Write the model of `write_tower_model` in `source`; return its two files.

    kind: the type of the tower's matrices; convolutions and vectors are F32, as in llama.cpp.
    swapped: whether an MLP has its second matrix as ffn_up, as older files have.
    changes: values of keys of the mmproj file; None = the key is left out.
    """
    config = json.loads((source / "config.json").read_text())
    text, tower = {}, {}
    for name, value in load_file(source / "model.safetensors").items():
        own = name.startswith(("model.text_model.", "lm_head."))
        (text if own else tower)[name.replace("model.text_model.", "model.")] = value
    (to / "text").mkdir()
    settings = {**config["text_config"], "architectures": ["LlamaForCausalLM"]}
    (to / "text" / "config.json").write_text(json.dumps({**settings, "model_type": "llama"}))
    save_file(text, to / "text" / "model.safetensors", {"format": "pt"})
    files = to / "tiny-F32.gguf", to / f"mmproj-tiny-{kind}.gguf"
    convert("llama", files[0], source=to / "text")
    tower = {_renamed(name, swapped=swapped): value for name, value in tower.items()}
    write_mmproj(files[1], config, source, tower, kind, **changes)
    return files


def write_mmproj(path, config, source, tensors, kind, **changes):
    """Write the tensors of a tower with the keys of SmolVLM."""
    vision = config["vision_config"]
    pictures = json.loads((source / "preprocessor_config.json").read_text())
    keys = {
        "general.type": "mmproj",
        "clip.has_vision_encoder": True,
        "clip.projector_type": "idefics3",
        "clip.use_gelu": True,
        "clip.vision.image_size": vision["image_size"],
        "clip.vision.patch_size": vision["patch_size"],
        "clip.vision.embedding_length": vision["hidden_size"],
        "clip.vision.feed_forward_length": vision["intermediate_size"],
        "clip.vision.block_count": vision["num_hidden_layers"],
        "clip.vision.attention.head_count": vision["num_attention_heads"],
        "clip.vision.attention.layer_norm_epsilon": vision.get("layer_norm_eps", 1e-6),
        "clip.vision.projection_dim": config["text_config"]["hidden_size"],
        "clip.vision.projector.scale_factor": config["scale_factor"],
        "clip.vision.preproc_image_size": pictures["size"]["longest_edge"],
        "clip.vision.image_mean": pictures["image_mean"],
        "clip.vision.image_std": pictures["image_std"],
    }
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
        short = value.ndim == 2 and name != "v.position_embd.weight"
        type_ = gguf.GGMLQuantizationType[kind if short else "F32"]
        data = gguf.quants.quantize(np.ascontiguousarray(value, np.float32), type_)
        writer.add_tensor(name, data, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name, *, swapped):
    stem, _, end = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{end}"
    match = re.fullmatch(r"model\.vision_model\.encoder\.layers\.(\d+)\.(.+)", stem)
    part = _BLOCK[match[2]]
    if swapped:
        part = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}.get(part, part)
    return f"v.blk.{match[1]}.{part}.{end}"
