"""The towers of Qwen2-VL, 2.5-VL and 2.5-Omni: any size, 2-D RoPE, in 2.5 with windows.

Source: transformers modeling_qwen2_vl, modeling_qwen2_5_vl and modeling_qwen2_5_omni.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.activations import ACTIVATIONS, GATED
from cpuserve.models.config import read_choice, read_dtype, read_int, read_object, refuse
from cpuserve.models.qwen_vl import MLX_NAMES, NORM_EPS, gated_mlp, read_sections, tower_attention
from cpuserve.models.spec import TowerSpec
from cpuserve.models.towers import read_pixels, read_theta
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

_AT = "model.visual"
_SECTIONS = (16, 24, 24)


class Qwen2VLTower:
    """The vision model of Qwen2-VL."""

    stored = MLX_NAMES

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        own = read_object(config, "vision_config")
        hidden = read_int(own, "embed_dim", 1280, high=1 << 20)
        return TowerSpec(
            **_shared(config, pictures, width, hidden=hidden, out="hidden_size"),
            intermediate=hidden * read_int(own, "mlp_ratio", 4, high=1 << 10),
            activation=read_choice(own, "hidden_act", "quick_gelu", ACTIVATIONS),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = _patches(b, s)
        for i in range(s.layers):
            at = f"{_AT}.blocks.{i}"
            tower_attention(b, s, at, x, b.layer_norm(x, f"{at}.norm1"))
            h = b.layer_norm(x, f"{at}.norm2")
            then = s.activation
            g = b.linear(h, f"{at}.mlp.fc1", features=s.intermediate, bias=True, then=then)
            b.linear(g, f"{at}.mlp.fc2", bias=True, add_to=x)
        _merge(b, s, b.layer_norm(x, f"{_AT}.merger.ln_q"))


class Qwen25VLTower:
    """The vision model of Qwen2.5-VL: in most layers, a patch sees only its window."""

    stored = MLX_NAMES

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        own = read_object(config, "vision_config")
        hidden = read_int(own, "hidden_size", 3584, high=1 << 20)
        shared = _shared(config, pictures, width, hidden=hidden, out="out_hidden_size")
        side, least = read_int(own, "window_size", 112), shared["merge"] * shared["patch"]
        if side < least:
            refuse("vision_config.window_size", side, f"at least {least}, a block of patches")
        return TowerSpec(
            **shared,
            intermediate=read_int(own, "intermediate_size", 3420, high=1 << 24),
            activation=read_choice(own, "hidden_act", "silu", GATED),
            gated=True,
            window=side // least,
            whole_layers=_whole_layers(own, shared["layers"]),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        _build_windowed(b, s)


class Qwen25OmniTower:
    """The vision model of Qwen2.5-Omni: Qwen2.5-VL with queries, keys and values in matrices."""

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        return replace(Qwen25VLTower.spec(config, pictures, width), family={"apart": True})

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        _build_windowed(b, s)


def _build_windowed(b: Builder, s: TowerSpec) -> None:
    """Append the operations of a tower with windows and gates to its builder `b`."""
    x = _patches(b, s)
    for i in range(s.layers):
        at = f"{_AT}.blocks.{i}"
        h = b.rms_norm(x, f"{at}.norm1")
        tower_attention(b, s, at, x, h, windowed=i not in s.whole_layers)
        gated_mlp(b, s, f"{at}.mlp", b.rms_norm(x, f"{at}.norm2"), x)
    _merge(b, s, b.rms_norm(x, f"{_AT}.merger.ln_q"))


def _shared(
    config: Mapping[str, Any], pictures: Mapping[str, Any], width: int, *, hidden: int, out: str
) -> dict[str, Any]:
    """Return the fields of TowerSpec that both towers have. out: the key of the text's width."""
    own = read_object(config, "vision_config")
    heads = read_int(own, "num_heads", 16, high=65536)
    if hidden % (4 * heads):
        refuse("vision_config: its width", hidden, f"a multiple of 4 times its {heads} heads")
    if read_int(own, "in_channels", 3) != 3:
        refuse("vision_config.in_channels", own["in_channels"], "3")
    if read_int(own, out, width, high=1 << 20) != width:
        refuse(f"vision_config.{out}", own[out], f"the text's width {width}")
    return {
        "width": hidden,
        "layers": read_int(own, "depth", 32, high=4096),
        "q_heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "norm_eps": NORM_EPS,
        "dtype": read_dtype(config),
        "patch": read_int(own, "patch_size", 14, high=1024),
        "merge": read_int(own, "spatial_merge_size", 2, high=64),
        "out_width": width,
        "side": 0,
        "table": 0,
        "pixels": read_pixels(pictures),
        "patch_weight": f"{_AT}.patch_embed.proj",
        "names": (f"{_AT}.",),
        "sections": read_sections(config, _SECTIONS),
        "theta": read_theta(own),
    }


def _whole_layers(own: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    found = own.get("fullatt_block_indexes", (7, 15, 23, 31))
    if not isinstance(found, list | tuple) or not all(type(i) is int for i in found):
        refuse("vision_config.fullatt_block_indexes", found, "a list of layers")
    return tuple(sorted({i for i in found if 0 <= i < layers}))


def _patches(b: Builder, s: TowerSpec) -> ValueId:
    return b.linear(b.patches(s.patch_width), s.patch_weight, features=s.width, bias=True)


def _merge(b: Builder, s: TowerSpec, x: ValueId) -> None:
    """Append the merger of the normalized patches x, and the end of the program."""
    at, width = f"{_AT}.merger.mlp", s.merge**2 * s.width
    x = b.linear(b.fold(x, s.merge**2), f"{at}.0", features=width, bias=True, then="gelu")
    b.hidden(b.linear(x, f"{at}.2", features=s.out_width, bias=True))
