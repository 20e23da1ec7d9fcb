"""The towers of GLM-OCR and of GLM-4.1V to 4.6V: pictures of any size, 2-D RoPE.

How many tokens a picture takes is in media/pictures/families/qwen_vl.py.
Source: transformers modeling_glm_ocr, modeling_glm4v and modeling_glm4v_moe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cpuserve.models.activations import GATED
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_float,
    read_int,
    read_object,
    refuse,
)
from cpuserve.models.parts import TowerParts
from cpuserve.models.qwen_vl import axial_rope, gated_mlp, read_sections, tower_attention
from cpuserve.models.spec import TowerSpec
from cpuserve.models.towers import QWEN_KEYS, TURNED, read_sizes, read_theta, read_tower
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

_PREFIX = "model.visual"
_MERGE = f"{_PREFIX}.downsample"
_CHANNELS = 3
_NORM_EPS = 1e-5  # the default of torch.nn.LayerNorm; the config has no key for it


class GlmOcrTower:
    """The vision model of GLM-OCR."""

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        return _spec(config, pictures, width, _Usual((1024, 16, 24, 4096), 1536, biased=True))

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = b.linear(b.patches(s.patch_width), s.patch_weight, features=s.width, bias=True)
        for i in range(s.layers):
            prefix = f"{_PREFIX}.blocks.{i}"
            norms = {f"{name}_norm": f"{prefix}.attn.{name}_norm" for name in ("q", "k")}
            h = b.rms_norm(x, f"{prefix}.norm1")
            tower_attention(b, s, prefix, x, h, bias=s.biased, **norms)
            gated_mlp(b, s, f"{prefix}.mlp", b.rms_norm(x, f"{prefix}.norm2"), x, bias=s.biased)
        _merge(b, s, x, _CHANNELS * s.out_width)


class Glm4vTower:
    """The vision model of GLM-4.1V, 4.5V and 4.6V, which has a table of places as well.

    Keys of family: merger_width, the hidden values of the merger.
    """

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        tower = _spec(config, pictures, width, _Usual((1536, 12, 24, 13696), 4096, biased=False))
        vision = read_object(config, "vision_config")
        image = read_int(vision, "image_size", 336, high=1 << 14)
        if image < tower.patch:
            refuse("vision_config.image_size", image, f"at least {tower.patch}")
        # A layer has as many hidden values as a result has numbers; the config's are the merger's.
        merger: TowerParts = {"merger_width": tower.intermediate}
        table = image // tower.patch
        return replace(tower, table=table, intermediate=tower.out_width, family=merger)

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = b.linear(b.patches(s.patch_width), s.patch_weight, features=s.width, bias=True)
        x = b.rms_norm(x, f"{_PREFIX}.post_conv_layernorm")
        b.grid_embed(x, f"{_PREFIX}.embeddings.position_embedding", side=s.table, cubic=True)
        for i in range(s.layers):
            prefix = f"{_PREFIX}.blocks.{i}"
            h = b.rms_norm(x, f"{prefix}.norm1")
            qkv = b.linear(h, f"{prefix}.attn.qkv", features=3 * s.width, bias=s.biased)
            attended = b.attend_both_sides(qkv, rope=axial_rope(s.head_dim, s.theta))
            b.linear(attended, f"{prefix}.attn.proj", add_to=x)
            h = b.rms_norm(x, f"{prefix}.norm2")
            gated_mlp(b, s, f"{prefix}.mlp", h, x, bias=False)
        _merge(b, s, x, s.family["merger_width"])


@dataclass(frozen=True, slots=True)
class _Usual:
    """Defaults of a config: sizes (`read_sizes`), its rows' width, and biases of linears."""

    sizes: tuple[int, int, int, int]
    out: int
    biased: bool


def _spec(
    config: Mapping[str, Any], pictures: Mapping[str, Any], width: int, defaults: _Usual
) -> TowerSpec:
    """Return the hyperparameters of a tower. defaults: of its config's class."""
    vision = read_object(config, "vision_config")
    if read_int(vision, "out_hidden_size", defaults.out, high=1 << 20) != width:
        refuse("vision_config.out_hidden_size", vision.get("out_hidden_size"), str(width))
    return read_tower(
        config,
        pictures,
        width,
        **read_sizes(vision, defaults.sizes, TURNED, **QWEN_KEYS),
        norm_eps=read_float(vision, "rms_norm_eps", 1e-5),
        activation=read_choice(vision, "hidden_act", "silu", GATED),
        gated=True,
        biased=read_bool(vision, "attention_bias", defaults.biased),
        patch_weight=f"{_PREFIX}.patch_embed.proj",
        merge_weight=_MERGE,
        names=(f"{_PREFIX}.",),
        sections=read_sections(config, (8, 12, 12)),
        theta=read_theta(vision),
    )


def _merge(b: Builder, s: TowerSpec, x: ValueId, hidden: int) -> None:
    """Append the last norm and the merger with `hidden` hidden values, and end the program."""
    x = b.fold(b.rms_norm(x, f"{_PREFIX}.post_layernorm"), s.merge**2)
    x = b.linear(x, _MERGE, features=s.out_width, bias=True)
    prefix = f"{_PREFIX}.merger"
    h = b.linear(x, f"{prefix}.proj", features=s.out_width)
    h = b.activation(b.layer_norm(h, f"{prefix}.post_projection_norm", eps=_NORM_EPS), "gelu")
    gate_up, activation = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], s.activation
    g = b.linear(h, gate_up, features=hidden, then=activation)
    b.hidden(b.linear(g, f"{prefix}.down_proj", features=s.out_width))
