"""The tower of dots.ocr: pictures of any size, 2-D RoPE, norms without a mean.

Source: modeling_dots_vision of the published models.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_float,
    read_int,
    read_object,
    refuse,
)
from cpuserve.models.qwen_vl import NORM_EPS, tower_attention
from cpuserve.models.spec import TowerSpec
from cpuserve.models.towers import TURNED, read_sizes, read_tower
from cpuserve.program.builder import Builder

_PREFIX = "vision_tower"
_PATCHES = f"{_PREFIX}.patch_embed.patchifier"
_FIXED = {"use_bias": False, "is_causal": False, "post_norm": True}


class DotsOcrTower:
    """The vision model of dots.ocr."""

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = read_object(config, "vision_config")
        if read_int(vision, "hidden_size", 1536, high=1 << 20) != width:
            refuse(
                "vision_config.hidden_size", vision.get("hidden_size"), f"the text's width {width}"
            )
        for name, required in _FIXED.items():
            if read_bool(vision, name, required) != required:
                refuse(
                    f"vision_config.{name}", vision[name], f"{required}, as in all published models"
                )
        return read_tower(
            config,
            pictures,
            width,
            **read_sizes(vision, (1536, 12, 42, 4224), TURNED, width="embed_dim"),
            norm_eps=read_float(vision, "rms_norm_eps", 1e-5),
            activation="silu_mul",  # the config has no key for it
            gated=True,
            biased=False,
            patch_weight=f"{_PATCHES}.proj",
            names=(f"{_PREFIX}.",),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = b.linear(b.patches(s.patch_width), s.patch_weight, features=s.width, bias=True)
        x = b.rms_norm(x, f"{_PATCHES}.norm")
        activation = s.activation
        for i in range(s.layers):
            prefix = f"{_PREFIX}.blocks.{i}"
            tower_attention(b, s, prefix, x, b.rms_norm(x, f"{prefix}.norm1"), bias=s.biased)
            h = b.rms_norm(x, f"{prefix}.norm2")
            gate_up = [f"{prefix}.mlp.fc1", f"{prefix}.mlp.fc3"]
            g = b.linear(h, gate_up, features=s.intermediate, bias=s.biased, then=activation)
            b.linear(g, f"{prefix}.mlp.fc2", bias=s.biased, add_to=x)
        x, prefix = b.rms_norm(x, f"{_PREFIX}.post_trunk_norm"), f"{_PREFIX}.merger"
        x = b.fold(b.layer_norm(x, f"{prefix}.ln_q", eps=NORM_EPS), s.merge**2)
        folded = s.merge**2 * s.width
        x = b.linear(x, f"{prefix}.mlp.0", features=folded, bias=True, then="gelu")
        b.hidden(b.linear(x, f"{prefix}.mlp.2", features=s.out_width, bias=True))
