"""The towers of Qwen2-VL, 2.5-VL and 2.5-Omni: any size, 2-D RoPE, in 2.5 with windows.

Source: transformers modeling_qwen2_vl, modeling_qwen2_5_vl and modeling_qwen2_5_omni.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cpuserve.models.activations import ACTIVATIONS, GATED
from cpuserve.models.config import read_choice, read_int, read_object, refuse
from cpuserve.models.qwen_vl import (
    MLX_NAMES,
    NORM_EPS,
    check_width,
    gated_mlp,
    read_sections,
    tower_attention,
)
from cpuserve.models.spec import TowerSpec
from cpuserve.models.stored_names import AS_PROGRAM, StoredNames
from cpuserve.models.towers import QWEN_KEYS, TURNED, read_sizes, read_theta, read_tower
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

_PREFIX = "model.visual"
_SECTIONS = (16, 24, 24)


class Qwen2VLTower:
    """The vision model of Qwen2-VL."""

    stored = MLX_NAMES

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = read_object(config, "vision_config")
        hidden = read_int(vision, "embed_dim", 1280, high=1 << 20)
        hidden *= read_int(vision, "mlp_ratio", 4, high=1 << 10)
        sizes = {**vision, "intermediate_size": hidden}
        return read_tower(
            config,
            pictures,
            check_width(vision, "hidden_size", width),
            **read_sizes(sizes, (1280, 16, 32, 1), TURNED, width="embed_dim", **QWEN_KEYS),
            **_shared(config, vision),
            activation=read_choice(vision, "hidden_act", "quick_gelu", ACTIVATIONS),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = _patches(b, s)
        for i in range(s.layers):
            prefix = f"{_PREFIX}.blocks.{i}"
            tower_attention(b, s, prefix, x, b.layer_norm(x, f"{prefix}.norm1"))
            h = b.layer_norm(x, f"{prefix}.norm2")
            activation = s.activation
            g = b.linear(
                h, f"{prefix}.mlp.fc1", features=s.intermediate, bias=True, then=activation
            )
            b.linear(g, f"{prefix}.mlp.fc2", bias=True, add_to=x)
        _merge(b, s, b.layer_norm(x, f"{_PREFIX}.merger.ln_q"))


@dataclass(frozen=True, slots=True)
class WindowTower:
    """The vision model of Qwen2.5-VL: in most layers, a patch sees only its window.

    apart: whether queries, keys and values have matrices of their own.
    """

    apart: bool = False
    stored: StoredNames = MLX_NAMES

    def spec(self, config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = read_object(config, "vision_config")
        sizes = read_sizes(vision, (3584, 16, 32, 3420), TURNED, **QWEN_KEYS)
        spec = read_tower(
            config,
            pictures,
            check_width(vision, "out_hidden_size", width),
            **sizes,
            **_shared(config, vision),
            activation=read_choice(vision, "hidden_act", "silu", GATED),
            gated=True,
            whole_layers=_whole_layers(vision, sizes["layers"]),
            family={"apart": True} if self.apart else {},
        )
        side, min_side = read_int(vision, "window_size", 112), spec.merge * spec.patch
        if side < min_side:
            refuse("vision_config.window_size", side, f"at least {min_side}, a block of patches")
        return replace(spec, window=side // min_side)

    def build(self, b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = _patches(b, s)
        for i in range(s.layers):
            prefix = f"{_PREFIX}.blocks.{i}"
            h = b.rms_norm(x, f"{prefix}.norm1")
            tower_attention(b, s, prefix, x, h, windowed=i not in s.whole_layers)
            gated_mlp(b, s, f"{prefix}.mlp", b.rms_norm(x, f"{prefix}.norm2"), x)
        _merge(b, s, b.rms_norm(x, f"{_PREFIX}.merger.ln_q"))


QWEN2_5_VL = WindowTower()
QWEN2_5_OMNI = WindowTower(apart=True, stored=AS_PROGRAM)


def _shared(config: Mapping[str, Any], vision: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of TowerSpec that both towers have. vision: the tower's config."""
    return {
        "norm_eps": NORM_EPS,
        "patch_weight": f"{_PREFIX}.patch_embed.proj",
        "names": (f"{_PREFIX}.",),
        "sections": read_sections(config, _SECTIONS),
        "theta": read_theta(vision),
    }


def _whole_layers(vision: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    layers_of_key = vision.get("fullatt_block_indexes", (7, 15, 23, 31))
    if not isinstance(layers_of_key, list | tuple) or not all(
        type(i) is int for i in layers_of_key
    ):
        refuse("vision_config.fullatt_block_indexes", layers_of_key, "a list of layers")
    return tuple(sorted({i for i in layers_of_key if 0 <= i < layers}))


def _patches(b: Builder, s: TowerSpec) -> ValueId:
    return b.linear(b.patches(s.patch_width), s.patch_weight, features=s.width, bias=True)


def _merge(b: Builder, s: TowerSpec, x: ValueId) -> None:
    """Append the merger of the normalized patches x, and the end of the program."""
    prefix, width = f"{_PREFIX}.merger.mlp", s.merge**2 * s.width
    x = b.linear(b.fold(x, s.merge**2), f"{prefix}.0", features=width, bias=True, then="gelu")
    b.hidden(b.linear(x, f"{prefix}.2", features=s.out_width, bias=True))
