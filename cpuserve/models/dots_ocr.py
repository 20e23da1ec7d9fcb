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

_AT = "vision_tower"
_PATCHES = f"{_AT}.patch_embed.patchifier"
_FIXED = {"use_bias": False, "is_causal": False, "post_norm": True}


class DotsOcrTower:
    """The vision model of dots.ocr."""

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        own = read_object(config, "vision_config")
        if read_int(own, "hidden_size", 1536, high=1 << 20) != width:
            refuse("vision_config.hidden_size", own.get("hidden_size"), f"the text's width {width}")
        for name, usual in _FIXED.items():
            if read_bool(own, name, usual) != usual:
                refuse(f"vision_config.{name}", own[name], f"{usual}, as in all published models")
        return read_tower(
            config,
            pictures,
            width,
            **read_sizes(own, (1536, 12, 42, 4224), TURNED, width="embed_dim"),
            norm_eps=read_float(own, "rms_norm_eps", 1e-5),
            activation="silu_mul",  # the config has no key for it
            gated=True,
            biased=False,
            patch_weight=f"{_PATCHES}.proj",
            names=(f"{_AT}.",),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = b.linear(b.patches(s.patch_width), s.patch_weight, features=s.width, bias=True)
        x = b.rms_norm(x, f"{_PATCHES}.norm")
        then = s.activation
        for i in range(s.layers):
            at = f"{_AT}.blocks.{i}"
            tower_attention(b, s, at, x, b.rms_norm(x, f"{at}.norm1"), bias=s.biased)
            h, both = b.rms_norm(x, f"{at}.norm2"), [f"{at}.mlp.fc1", f"{at}.mlp.fc3"]
            g = b.linear(h, both, features=s.intermediate, bias=s.biased, then=then)
            b.linear(g, f"{at}.mlp.fc2", bias=s.biased, add_to=x)
        x, at = b.rms_norm(x, f"{_AT}.post_trunk_norm"), f"{_AT}.merger"
        x = b.fold(b.layer_norm(x, f"{at}.ln_q", eps=NORM_EPS), s.merge**2)
        folded = s.merge**2 * s.width
        x = b.linear(x, f"{at}.mlp.0", features=folded, bias=True, then="gelu")
        b.hidden(b.linear(x, f"{at}.mlp.2", features=s.out_width, bias=True))
