"""The projector of LFM2-VL. Source: the converters and tools/mtmd of llama.cpp."""

from __future__ import annotations

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


def _tower(keys: Keys) -> dict[str, Any]:
    """Return the settings of LFM2-VL; all published models have these numbers of tiles."""
    vision, merge = read_vision(keys), keys.count("projector.scale_factor", 2)
    vision["num_patches"] = shape_of(keys, "v.position_embd.weight", 2)[0]
    return {
        "model_type": "lfm2_vl",
        "downsample_factor": merge,
        "projector_hidden_size": shape_of(keys, "mm.1.weight", 2)[0],
        "projector_use_layernorm": keys.has("mm.input_norm.weight"),
        "projector_bias": keys.has("mm.1.bias"),
        "vision_config": vision,
        PICTURES: {
            **read_pixels(keys),
            "encoder_patch_size": vision["patch_size"],
            "downsample_factor": merge,
            "min_image_tokens": 64,
            "max_image_tokens": 256,
            "tile_size": 512,
            "min_tiles": 2,
            "max_tiles": 10,
            "max_pixels_tolerance": 2.0,
            "resample": 2,
        },
    }


TOWER = Projector(
    dict.fromkeys(("Lfm2ForCausalLM", "Lfm2MoeForCausalLM"), "Lfm2VlForConditionalGeneration"),
    _tower,
    {
        **embeddings("vision_tower"),
        "mm.input_norm": "multi_modal_projector.layer_norm",
        "mm.1": "multi_modal_projector.linear_1",
        "mm.2": "multi_modal_projector.linear_2",
    },
    "vision_tower.encoder.layers",
    SIGLIP,
    channels_last=("v.patch_embd.weight",),
)
