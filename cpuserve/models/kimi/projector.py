"""The projectors of Kimi-VL and Kimi K2.5. Source: the converters and tools/mtmd of llama.cpp."""

from __future__ import annotations

from math import isqrt
from typing import Any

from cpuserve.loader.gguf.keys import Keys
from cpuserve.loader.gguf.projectors.record import (
    Projector,
    read_pixels,
    read_vision,
    shape_of,
)
from cpuserve.models.towers import PICTURES

_BLOCKS = {
    "ln1": "norm0",
    "ln2": "norm1",
    "attn_q": "wqkv",
    "attn_k": "wqkv",
    "attn_v": "wqkv",
    "attn_out": "wo",
    "ffn_up": "mlp.fc0",
    "ffn_down": "mlp.fc1",
}


def _vl(keys: Keys) -> dict[str, Any]:
    """Return the settings of Kimi-VL; files do not say how many patches a picture keeps."""
    vision, merge = read_vision(keys), keys.count("projector.scale_factor", 2)
    side = isqrt(shape_of(keys, "v.position_embd.weight", 2)[0])
    vision |= {
        "merge_kernel_size": [merge, merge],
        "init_pos_emb_height": side,
        "init_pos_emb_width": side,
        "flat_places": True,
    }
    return {
        "model_type": "kimi_vl",
        "vision_config": vision,
        PICTURES: {
            **read_pixels(keys),
            "patch_size": vision["patch_size"],
            "merge_kernel_size": [merge, merge],
            "in_token_limit": 4096,
            "pad_input": True,
        },
    }


def _k25(keys: Keys) -> dict[str, Any]:
    vision, merge = read_vision(keys), keys.count("projector.scale_factor", 2)
    rows, columns, _ = shape_of(keys, "v.position_embd.weight", 3)
    vision |= {
        "merge_kernel_size": [merge, merge],
        "init_pos_emb_height": rows,
        "init_pos_emb_width": columns,
        "projector_ln_eps": vision["layer_norm_eps"],
    }
    pictures = {
        **read_pixels(keys),
        "patch_size": vision["patch_size"],
        "merge_kernel_size": merge,
        "in_patch_limit": keys.count("image_max_pixels") // vision["patch_size"] ** 2,
    }
    return {
        "model_type": "kimi_k25",
        "vision_config": vision,
        PICTURES: {"media_proc_cfg": pictures},
    }


VL = Projector(
    {"DeepseekV3ForCausalLM": "KimiVLForConditionalGeneration"},
    _vl,
    {
        "v.patch_embd": "vision_tower.patch_embed.proj",
        "v.position_embd": "vision_tower.patch_embed.pos_emb",
        "v.post_ln": "vision_tower.encoder.final_layernorm",
        "mm.input_norm": "multi_modal_projector.pre_norm",
        "mm.1": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    },
    "vision_tower.encoder.blocks",
    _BLOCKS,
)
K25 = Projector(
    {"DeepseekV3ForCausalLM": "KimiK25ForConditionalGeneration"},
    _k25,
    {
        "v.patch_embd": "vision_tower.patch_embed.proj",
        "v.position_embd": "vision_tower.patch_embed.pos_emb",
        "v.post_ln": "vision_tower.encoder.final_layernorm",
        "mm.input_norm": "mm_projector.pre_norm",
        "mm.1": "mm_projector.proj.0",
        "mm.2": "mm_projector.proj.2",
    },
    "vision_tower.encoder.blocks",
    {**_BLOCKS, "attn_qkv": "wqkv"},
    axial=("attn_qkv",),
)
