"""The tower of Aya Vision: SigLIP over square tiles, without its last norm.

Source: transformers modeling_aya_vision and modeling_siglip.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import read_float, read_int, refuse
from cpuserve.models.siglip import (
    HEAD,
    features_of_siglip,
    read_siglip,
    siglip_layer,
    siglip_patches,
)
from cpuserve.models.spec import TowerSpec
from cpuserve.models.towers import read_tower
from cpuserve.program.builder import Builder
from cpuserve.program.parts import rows

_PREFIX, _JOIN = "vision_tower", "multi_modal_projector"


class AyaVisionTower:
    """The vision model and the projector of Aya Vision.

    Keys of family: join_width, the outputs of the projector's first matrix; join_eps, the epsilon
    of its norm.
    """

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = features_of_siglip(config)
        for key, required in (
            ("vision_feature_layer", -1),
            ("vision_feature_select_strategy", "full"),
        ):
            if config.get(key, required) != required:
                refuse(key, config[key], repr(required))
        patch = read_int(vision, "patch_size", high=1024)
        side = read_int(vision, "image_size", high=1 << 14) // patch
        merge = read_int(config, "downsample_factor", 2, high=64)
        if side < 1 or side % merge:
            refuse("downsample_factor", merge, f"a divisor of the {side} patches of a side")
        join = read_int(config, "alignment_intermediate_size", width, high=1 << 24)
        if join % 2:
            refuse("alignment_intermediate_size", join, "an even number")
        return read_tower(
            config,
            pictures,
            width,
            **read_siglip(vision),
            patch=patch,
            merge=merge,
            side=side,
            table=side,
            patch_weight=f"{_PREFIX}.embeddings.patch_embedding",
            names=(f"{_PREFIX}.", f"{_JOIN}."),
            family={
                "join_width": join,
                "join_eps": read_float(config, "adapter_layer_norm_eps", 1e-6),
            },
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        b.leave(f"{_PREFIX}.head.{name}" for name in HEAD)
        b.leave(f"{_PREFIX}.post_layernorm.{kind}" for kind in ("weight", "bias"))
        x = siglip_patches(b, s, _PREFIX)
        for i in range(s.layers):
            siglip_layer(b, s, f"{_PREFIX}.encoder.layers.{i}", x)
        eps, half = s.family["join_eps"], s.family["join_width"] // 2
        x = b.layer_norm(b.fold(x, s.merge**2), f"{_JOIN}.layernorm", eps=eps)
        # The gate is the second half.
        gate_up = [rows(f"{_JOIN}.linear_1", row, half) for row in (half, 0)]
        x = b.linear(x, gate_up, features=half, bias=True, then="silu_mul")
        b.hidden(b.linear(x, f"{_JOIN}.linear_2", features=s.out_width, bias=True))
