"""The tower of Mistral Small 3.1 and of LightOnOCR (Pixtral): pictures of any size, 2-D RoPE.

Source: transformers modeling_pixtral, modeling_mistral3 and modeling_lighton_ocr.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.activations import ACTIVATIONS, GATED
from cpuserve.models.config import (
    read_bool,
    read_choice,
    read_float,
    read_int,
    read_object,
    refuse,
)
from cpuserve.models.spec import TowerSpec
from cpuserve.models.towers import TURNED, read_sizes, read_theta, read_tower
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Rope, ValueId

_PREFIX, _JOIN = "vision_tower", "multi_modal_projector"
_PATCHES, _MERGE = f"{_PREFIX}.patch_conv", f"{_JOIN}.patch_merger.merging_layer"
_NORM_EPS = 1e-5  # the config has no key for it


class Mistral3Tower:
    """Pixtral's vision model, and the projector of Mistral 3 and LightOnOCR.

    Keys of family: join_eps, the epsilon of the projector's norm;
    joined_by, its activation; join_bias, whether its matrices have biases.
    """

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        bias = read_bool(config, "multimodal_projector_bias", False)
        merge = read_int(config, "spatial_merge_size", 2, high=64)
        return pixtral_spec(config, pictures, width, merge, _MERGE, bias)

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = b.rms_norm(pixtral(b, s), f"{_JOIN}.norm", eps=s.family["join_eps"])
        project(b, s, b.linear(b.fold(x, s.merge**2), _MERGE, features=s.width))


def pixtral_spec(
    config: Mapping[str, Any],
    pictures: Mapping[str, Any],
    width: int,
    merge: int,
    merge_weight: str,
    bias: bool,
) -> TowerSpec:
    """Return the hyperparameters of a Pixtral.

    width: the width of the text part. merge: patches of a side of what becomes a row.
    merge_weight: TowerSpec.merge_weight. bias: whether matrices of the projector have biases.
    """
    vision, text = read_object(config, "vision_config"), read_object(config, "text_config")
    if config.get("vision_feature_layer", -1) != -1:
        refuse("vision_feature_layer", config["vision_feature_layer"], "-1")
    return read_tower(
        config,
        pictures,
        width,
        **read_sizes(vision, (1024, 16, 24, 4096), TURNED),
        norm_eps=_NORM_EPS,
        activation=read_choice(vision, "hidden_act", "gelu", GATED),
        gated=True,
        default_patch=16,
        merge=merge,
        patch_weight=_PATCHES,
        merge_weight=merge_weight,
        names=(f"{_PREFIX}.", f"{_JOIN}."),
        theta=read_theta(vision),
        family={
            "join_eps": read_float(text, "rms_norm_eps", 1e-5),
            "joined_by": read_choice(config, "projector_hidden_act", "gelu", ACTIVATIONS),
            "join_bias": bias,
        },
    )


def pixtral(b: Builder, s: TowerSpec) -> ValueId:
    """Append the layers of a Pixtral to its builder `b`; return the patches after them."""
    x = b.linear(b.patches(s.patch_width), _PATCHES, features=s.width, bias=True)
    x = b.rms_norm(x, f"{_PREFIX}.ln_pre")
    rope = _rope(s.head_dim, s.theta)
    for i in range(s.layers):
        prefix = f"{_PREFIX}.transformer.layers.{i}"
        h, names = b.rms_norm(x, f"{prefix}.attention_norm"), [f"{n}_proj" for n in "qkv"]
        qkv = b.linear(h, [f"{prefix}.attention.{name}" for name in names], features=s.width)
        b.linear(b.attend_both_sides(qkv, rope=rope), f"{prefix}.attention.o_proj", add_to=x)
        h, gate_up = b.rms_norm(x, f"{prefix}.ffn_norm"), ("gate_proj", "up_proj")
        activation = s.activation
        names = [f"{prefix}.feed_forward.{name}" for name in gate_up]
        g = b.linear(h, names, features=s.intermediate, then=activation)
        b.linear(g, f"{prefix}.feed_forward.down_proj", add_to=x)
    return x


def project(b: Builder, s: TowerSpec, x: ValueId) -> None:
    """Append the projector, which makes rows of x, to the builder `b`."""
    bias, activation = s.family["join_bias"], s.family["joined_by"]
    h = b.linear(x, f"{_JOIN}.linear_1", features=s.out_width, bias=bias, then=activation)
    b.hidden(b.linear(h, f"{_JOIN}.linear_2", features=s.out_width, bias=bias))


def _rope(head_dim: int, theta: float) -> Rope:
    """Return the RoPE: even frequencies turn by the row of a patch, odd ones by the column."""
    freqs = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    axes = (0,) * (head_dim // 4) + (1,) * (head_dim // 4)
    return Rope(head_dim, (*freqs[::2], *freqs[1::2]), axes=axes)
