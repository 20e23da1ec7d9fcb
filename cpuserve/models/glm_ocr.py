"""The tower of GLM-OCR: pictures of any size, 2-D RoPE, norms of queries and keys.

Source: transformers modeling_glm_ocr.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_dtype,
    read_float,
    read_int,
    read_object,
    refuse,
)
from cpuserve.models.opt import GATED
from cpuserve.models.qwen_vl import gated_mlp, read_sections, tower_attention
from cpuserve.models.spec import TowerSpec
from cpuserve.models.towers import read_pixels
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Then

_AT = "model.visual"
_MERGE = f"{_AT}.downsample"
_CHANNELS = 3
_NORM_EPS = 1e-5  # the default of torch.nn.LayerNorm; the config has no key for it


class GlmOcrTower:
    """The vision model of GLM-OCR."""

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        own = read_object(config, "vision_config")
        hidden = read_int(own, "hidden_size", 1024, high=1 << 20)
        heads = read_int(own, "num_heads", 16, high=65536)
        if hidden % (4 * heads):
            refuse("vision_config.hidden_size", hidden, f"a multiple of 4 times its {heads} heads")
        if read_int(own, "in_channels", _CHANNELS) != _CHANNELS:
            refuse("vision_config.in_channels", own["in_channels"], str(_CHANNELS))
        if read_int(own, "out_hidden_size", 1536, high=1 << 20) != width:
            refuse("vision_config.out_hidden_size", own.get("out_hidden_size"), str(width))
        return TowerSpec(
            width=hidden,
            layers=read_int(own, "depth", 24, high=4096),
            q_heads=heads,
            kv_heads=heads,
            head_dim=hidden // heads,
            intermediate=read_int(own, "intermediate_size", 4096, high=1 << 24),
            norm_eps=read_float(own, "rms_norm_eps", 1e-5),
            activation=read_choice(own, "hidden_act", "silu", GATED),
            gated=True,
            biased=read_bool(own, "attention_bias", True),
            dtype=read_dtype(config),
            patch=read_int(own, "patch_size", 14, high=1024),
            merge=read_int(own, "spatial_merge_size", 2, high=64),
            out_width=width,
            side=0,
            table=0,
            pixels=read_pixels(pictures),
            patch_weight=f"{_AT}.patch_embed.proj",
            merge_weight=_MERGE,
            names=(f"{_AT}.",),
            sections=read_sections(config, (8, 12, 12)),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = b.linear(b.patches(s.patch_width), s.patch_weight, features=s.width, bias=True)
        for i in range(s.layers):
            at = f"{_AT}.blocks.{i}"
            norms = {f"{name}_norm": f"{at}.attn.{name}_norm" for name in ("q", "k")}
            h = b.rms_norm(x, f"{at}.norm1")
            tower_attention(b, s, at, x, h, bias=s.biased, **norms)
            gated_mlp(b, s, f"{at}.mlp", b.rms_norm(x, f"{at}.norm2"), x, bias=s.biased)
        x = b.fold(b.rms_norm(x, f"{_AT}.post_layernorm"), s.merge**2)
        x = b.linear(x, _MERGE, features=s.out_width, bias=True)
        at = f"{_AT}.merger"
        h = b.linear(x, f"{at}.proj", features=s.out_width)
        h = b.activation(b.layer_norm(h, f"{at}.post_projection_norm", eps=_NORM_EPS), "gelu")
        both, then = [f"{at}.gate_proj", f"{at}.up_proj"], cast("Then", s.activation)
        g = b.linear(h, both, features=_CHANNELS * s.out_width, then=then)
        b.hidden(b.linear(g, f"{at}.down_proj", features=s.out_width))
