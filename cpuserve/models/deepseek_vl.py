"""The tower of DeepSeek-VL: SigLIP over one square tile, and a projector for each patch.

Source: transformers modeling_deepseek_vl and modeling_siglip.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_dtype, read_int, read_object, refuse
from cpuserve.models.siglip import HEAD, PATCHES, SIGLIP_AT, encoded, read_siglip
from cpuserve.models.spec import TowerSpec
from cpuserve.models.towers import read_pixels
from cpuserve.program.builder import Builder

_JOIN = "model.aligner"
# The defaults of the class.
_USUAL = {"hidden_size": 768, "num_attention_heads": 12, "patch_size": 16, "image_size": 224}


class DeepseekVLTower:
    """The vision model and the aligner of DeepSeek-VL."""

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        own = {**_USUAL, **read_object(config, "vision_config")}
        patch = read_int(own, "patch_size", high=1024)
        side = read_int(own, "image_size", high=1 << 14) // patch
        if side < 1:
            refuse("vision_config.image_size", own["image_size"], f"at least {patch}")
        return TowerSpec(
            **read_siglip(own),
            dtype=read_dtype(config),
            patch=patch,
            merge=1,
            out_width=width,
            side=side,
            table=side,
            pixels=read_pixels(pictures),
            patch_weight=PATCHES,
            names=(f"{SIGLIP_AT}.", f"{_JOIN}."),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        b.leave(f"{SIGLIP_AT}.head.{name}" for name in HEAD)
        x = encoded(b, s, SIGLIP_AT)
        h = b.linear(x, f"{_JOIN}.linear1", features=s.out_width, bias=True, then="gelu")
        b.hidden(b.linear(h, f"{_JOIN}.linear2", features=s.out_width, bias=True))
