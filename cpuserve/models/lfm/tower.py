"""The towers of LFM2-VL and LFM3-VL: pictures of any size.

Source: transformers modeling_lfm2_vl, modeling_siglip2 and modeling_lfm3_vl.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_float,
    read_int,
    read_kinds,
    read_object,
    refuse,
)
from cpuserve.models.parts import TowerParts
from cpuserve.models.qwen_vl import axial_rope
from cpuserve.models.siglip import HEAD, SIGLIP_USUAL, read_siglip, siglip_layer
from cpuserve.models.spec import TowerSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.models.towers import read_theta, read_tower
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId
from cpuserve.program.parts import rows

_PREFIX, _JOIN = "vision_tower", "multi_modal_projector"
_PATCHES = f"{_PREFIX}.embeddings.patch_embedding"
KINDS = ("conv", "full_attention")  # the layers of LFM3-VL's tower


class Lfm2VlTower:
    """SigLIP 2 over pictures of any size, and the projector of LFM2-VL.

    Keys of family: the keys of `_join`; norm, whether it begins with a norm.
    """

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = read_object(config, "vision_config")
        places = read_int(vision, "num_patches", 256, high=1 << 20)
        if isqrt(places) ** 2 != places:
            refuse("vision_config.num_patches", places, "a square")
        patch = read_int(vision, "patch_size", 16, high=1024)
        merge = read_int(config, "downsample_factor", 2, high=64)
        max_patches = read_int(pictures, "max_image_tokens", 256, high=1 << 20) * merge**2
        tile = read_int(pictures, "tile_size", 512, high=1 << 14) // patch
        return read_tower(
            config,
            pictures,
            width,
            **read_siglip({**SIGLIP_USUAL, **vision}),
            patch=patch,
            merge=merge,
            most=max(max_patches, tile**2),
            table=isqrt(places),
            patch_weight=_PATCHES,
            patch_axes="yxc",
            names=(f"{_PREFIX}.", f"{_JOIN}."),
            family=_join(config, 2560)
            | {"norm": read_bool(config, "projector_use_layernorm", True)},
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        b.leave(f"{_PREFIX}.head.{name}" for name in HEAD)
        x = b.linear(b.patches(s.patch_width), _PATCHES, features=s.width, bias=True)
        b.grid_embed(x, f"{_PREFIX}.embeddings.position_embedding", side=s.table, smooth=True)
        for i in range(s.layers):
            siglip_layer(b, s, f"{_PREFIX}.encoder.layers.{i}", x)
        x = b.fold(b.layer_norm(x, f"{_PREFIX}.post_layernorm"), s.merge**2)
        if s.family["norm"]:
            x = b.layer_norm(x, f"{_JOIN}.layer_norm", eps=1e-5)
        _joined(b, s, x)


class Lfm3VlTower:
    """The vision model of LFM3-VL: gated convolutions over the picture, or attention.

    Keys of family: the keys of `_join`; kinds, the kind of each layer; size, the
    places of a side of a convolution.
    """

    stored = StoredNames(
        {
            rf"^{_PREFIX}\.patch_embed\.": f"{_PREFIX}.patchifier.",
            rf"^({_PREFIX}\..*)\.([qk])_norm\.": r"\1.\2_layernorm.",
        }
    )

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = read_object(config, "vision_config")
        hidden = read_int(vision, "hidden_size", 1024, high=1 << 20)
        heads = read_int(vision, "num_attention_heads", 16, high=65536)
        kv_heads = read_int(vision, "num_key_value_heads", 8, high=65536)
        size = read_int(vision, "conv_kernel_size", 3, high=15)
        if hidden % (4 * heads):
            refuse("vision_config.hidden_size", hidden, f"a multiple of 4 times its {heads} heads")
        if heads % kv_heads:
            refuse("vision_config.num_key_value_heads", kv_heads, f"a divisor of {heads}")
        if size % 2 == 0:
            refuse("vision_config.conv_kernel_size", size, "an odd number")
        if read_int(vision, "in_channels", 3) != 3:
            refuse("vision_config.in_channels", vision["in_channels"], "3")
        counted = {"num_hidden_layers": 14, **vision}
        kinds = read_kinds(counted, "layer_types", KINDS, lambda i: KINDS[i >= 2 and i % 2 == 0])
        return read_tower(
            config,
            pictures,
            width,
            width=hidden,
            layers=len(kinds),
            q_heads=heads,
            kv_heads=kv_heads,
            head_dim=hidden // heads,
            intermediate=read_int(vision, "intermediate_size", 2560, high=1 << 24),
            norm_eps=read_float(vision, "norm_eps", 1e-5),
            activation="silu",
            default_patch=16,
            patch_weight=f"{_PREFIX}.patchifier",
            patch_axes="ctyx",
            names=(f"{_PREFIX}.", f"{_JOIN}."),
            gated=True,
            theta=read_theta(vision, 1e6),
            family=_join(config, 4096) | {"kinds": kinds, "size": size},
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = b.linear(b.patches(s.patch_width), s.patch_weight, features=s.width, bias=True)
        x = b.rms_norm(x, f"{_PREFIX}.embedding_norm")
        for i, kind in enumerate(s.family["kinds"]):
            prefix = f"{_PREFIX}.layers.{i}"
            h = b.rms_norm(x, f"{prefix}.operator_norm")
            mix = _convolution if kind == "conv" else _attention
            mix(b, s, prefix, h, x)
            h, mlp = b.rms_norm(x, f"{prefix}.ffn_norm"), f"{prefix}.feed_forward"
            g = b.linear(h, [f"{mlp}.w1", f"{mlp}.w3"], features=s.intermediate, then="silu_mul")
            b.linear(g, f"{mlp}.w2", add_to=x)
        _joined(b, s, b.fold(b.layer_norm(x, f"{_JOIN}.layer_norm", eps=1e-6), s.merge**2))


def _convolution(b: Builder, s: TowerSpec, prefix: str, h: ValueId, x: ValueId) -> None:
    """Add out_proj(C * conv(B * v)) to x; B, C and v are three equal parts of in_proj(h)."""
    name, size = f"{prefix}.conv.in_proj", s.family["size"]
    gates = b.linear(h, rows(name, 0, 2 * s.width), features=2 * s.width)
    conv_input = b.linear(h, rows(name, 2 * s.width, s.width), features=s.width)
    b.multiply(gates, to=conv_input)
    mixed = b.grid_conv(conv_input, f"{prefix}.conv.spatial_conv", size=size, merge=s.merge)
    b.multiply(gates, to=mixed, column=s.width)
    b.linear(mixed, f"{prefix}.conv.out_proj", add_to=x)


def _attention(b: Builder, s: TowerSpec, prefix: str, h: ValueId, x: ValueId) -> None:
    """Add the attention of h to x."""
    attention, d = f"{prefix}.self_attn", s.head_dim
    features = [s.q_heads * d, s.kv_heads * d, s.kv_heads * d]
    qkv = b.linear(h, [f"{attention}.{n}_proj" for n in "qkv"], features=features)
    rope = axial_rope(d, s.theta)
    a = b.attend_both_sides(
        qkv, rope=rope, q_norm=f"{attention}.q_layernorm", k_norm=f"{attention}.k_layernorm"
    )
    b.linear(a, f"{attention}.out_proj", add_to=x)


def _join(config: Mapping[str, Any], default: int) -> TowerParts:
    """Return the keys of family for the projector: its width and activation, and if it has biases.

    default: the width if the config has none.
    """
    return {
        "join": read_int(config, "projector_hidden_size", default, high=1 << 24),
        "joined_by": read_choice(config, "projector_hidden_act", "gelu", ACTIVATIONS),
        "join_bias": read_bool(config, "projector_bias", True),
    }


def _joined(b: Builder, s: TowerSpec, x: ValueId) -> None:
    """Append the two matrices of the projector, and end the program."""
    bias, activation = s.family["join_bias"], s.family["joined_by"]
    width = s.family["join"]
    g = b.linear(x, f"{_JOIN}.linear_1", features=width, bias=bias, then=activation)
    b.hidden(b.linear(g, f"{_JOIN}.linear_2", features=s.out_width, bias=bias))
