"""The towers of Qwen3-VL and Qwen3-Omni, and those like them: any size, 2-D RoPE.

Source: transformers modeling_qwen3_vl and modeling_qwen3_omni_moe.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import (
    read_choice,
    read_dtype,
    read_int,
    read_layers,
    read_object,
    refuse,
)
from cpuserve.models.spec import TowerSpec
from cpuserve.models.stored_names import StoredNames
from cpuserve.models.text_parts import KEYS
from cpuserve.models.towers import QWEN_KEYS, TURNED, read_pixels, read_sizes, read_theta
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Rope, ValueId

_AT = "model.visual"
PATCHES = f"{_AT}.patch_embed.proj"
MLX_NAMES = StoredNames({r"^vision_tower\.": f"{_AT}."})  # what mlx-vlm calls the tensors
NORM_EPS = 1e-6  # their configs have no key for it
# The parts of a merger, its norm first, and the beginnings of the mergers of levels.
_MERGER = ("norm", "linear_fc1", "linear_fc2")
_LEVELS, _OMNI_LEVELS = f"{_AT}.deepstack_merger_list", f"{_AT}.merger_list"
_OMNI_MERGER = ("ln_q", "mlp.0", "mlp.2")


class Qwen3VLTower:
    """The vision model of Qwen3-VL, with features of earlier layers (DeepStack)."""

    stored = MLX_NAMES

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        own = read_object(config, "vision_config")
        most = read_int(own, "depth", 27, high=4096)
        layers = read_layers(own, "deepstack_visual_indexes", (8, 16, 24), most)
        return read_tower(config, pictures, width, (24, 20, 20), layers)

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        build_tower(b, s)


class Qwen3OmniTower:
    """The vision model of Qwen3-Omni: as in Qwen3-VL, with other tensors of the mergers."""

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        return Qwen3VLTower.spec(config, pictures, width)

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        build_tower(b, s, _OMNI_LEVELS, _OMNI_MERGER)


def read_tower(
    config: Mapping[str, Any],
    pictures: Mapping[str, Any],
    width: int,
    sections: tuple[int, ...],
    level_layers: tuple[int, ...],
) -> TowerSpec:
    """Return the hyperparameters of a tower; ModelError for invalid ones.

    width: that of the text part. sections: the default of mrope_section.
    level_layers: the layers that make the levels.
    """
    own = read_object(config, "vision_config")
    places = read_int(own, "num_position_embeddings", 2304, high=1 << 24)
    if isqrt(places) ** 2 != places:
        refuse("vision_config.num_position_embeddings", places, "a square")
    if read_int(own, "out_hidden_size", width, high=1 << 20) != width:
        refuse("vision_config.out_hidden_size", own["out_hidden_size"], f"the text's width {width}")
    return TowerSpec(
        **read_sizes(own, (1152, 16, 27, 4304), TURNED, **QWEN_KEYS),
        norm_eps=NORM_EPS,
        activation=read_choice(own, "hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
        dtype=read_dtype(config),
        patch=read_int(own, "patch_size", 16, high=1024),
        merge=read_int(own, "spatial_merge_size", 2, high=64),
        out_width=width,
        side=0,
        table=isqrt(places),
        pixels=read_pixels(pictures),
        patch_weight=PATCHES,
        names=(f"{_AT}.",),
        level_layers=level_layers,
        sections=read_sections(config, sections),
        interleaved=True,
        theta=read_theta(own),
    )


def read_sections(config: Mapping[str, Any], default: tuple[int, ...]) -> tuple[int, ...]:
    """Return mrope_section of the text part: how many frequencies of its RoPE each axis has."""
    inner = next((own for key in KEYS if (own := read_object(config, key))), config)
    found: object = default
    for key in ("rope_scaling", "rope_parameters"):
        found = read_object(inner, key).get("mrope_section", found)
    listed = found if isinstance(found, list | tuple) else ()
    if len(listed) != 3 or not all(type(n) is int and 0 <= n < 4096 for n in listed):
        refuse("mrope_section", found, "a list of three numbers")
    if not listed[2]:
        refuse("mrope_section", found, "three numbers, and the last above 0")
    return tuple(listed)


def build_tower(
    b: Builder, s: TowerSpec, lists: str = _LEVELS, parts: tuple[str, str, str] = _MERGER
) -> None:
    """Append the operations of the tower to its builder `b`.

    lists: the beginning of the mergers of levels. parts: see _MERGER.
    """
    norm = parts[0]
    x = b.linear(b.patches(s.patch_width), PATCHES, features=s.width, bias=True)
    b.grid_embed(x, f"{_AT}.pos_embed", side=s.table)
    levels = list[ValueId]()
    for i in range(s.layers):
        tower_layer(b, s, f"{_AT}.blocks.{i}", x)
        if i in s.level_layers:
            at = f"{lists}.{s.level_layers.index(i)}"
            folded = b.layer_norm(b.fold(x, s.merge**2), f"{at}.{norm}")
            levels.append(_merged(b, s, at, folded, parts))
    at = f"{_AT}.merger"
    rows = _merged(b, s, at, b.fold(b.layer_norm(x, f"{at}.{norm}"), s.merge**2), parts)
    for count, level in enumerate(levels, 1):
        rows = b.columns(rows, s.out_width * count, more=level)
    b.hidden(rows)


def axial_rope(head_dim: int, theta: float = 10000.0) -> Rope:
    """Return the RoPE of a tower: half of the frequencies turn by the row, half by the column."""
    quarter = head_dim // 4
    freqs = tuple(theta ** (-i / quarter) for i in range(quarter))
    return Rope(head_dim, freqs + freqs, axes=(0,) * quarter + (1,) * quarter)


def tower_attention(
    b: Builder, s: TowerSpec, at: str, x: ValueId, h: ValueId, *, bias: bool = True, **how: Any
) -> None:
    """Add to x the attention of the normalized rows h. how: arguments of attend_both_sides.

    Key of family: apart, whether queries, keys and values have matrices of their own.
    """
    if s.family.get("apart"):
        names = [f"{at}.attn.{part}" for part in "qkv"]
        qkv = b.linear(h, names, features=s.width, bias=bias)
    else:
        qkv = b.linear(h, f"{at}.attn.qkv", features=3 * s.width, bias=bias)
    out = b.attend_both_sides(qkv, rope=axial_rope(s.head_dim, s.theta), **how)
    b.linear(out, f"{at}.attn.proj", bias=bias, add_to=x)


def tower_layer(b: Builder, s: TowerSpec, at: str, x: ValueId) -> None:
    """Change x in place: x + attention(norm(x)), then x + mlp(norm(x))."""
    tower_attention(b, s, at, x, b.layer_norm(x, f"{at}.norm1"))
    h = b.layer_norm(x, f"{at}.norm2")
    then = s.activation
    g = b.linear(h, f"{at}.mlp.linear_fc1", features=s.intermediate, bias=True, then=then)
    b.linear(g, f"{at}.mlp.linear_fc2", bias=True, add_to=x)


def gated_mlp(b: Builder, s: TowerSpec, at: str, h: ValueId, x: ValueId, bias: bool = True) -> None:
    """Add to x the MLP of h, which has a gate."""
    both, then = [f"{at}.gate_proj", f"{at}.up_proj"], s.activation
    g = b.linear(h, both, features=s.intermediate, bias=bias, then=then)
    b.linear(g, f"{at}.down_proj", bias=bias, add_to=x)


def _merged(b: Builder, s: TowerSpec, at: str, x: ValueId, parts: tuple[str, str, str]) -> ValueId:
    width, (_, first, last) = s.merge**2 * s.width, parts
    g = b.linear(x, f"{at}.{first}", features=width, bias=True, then="gelu")
    return b.linear(g, f"{at}.{last}", features=s.out_width, bias=True)
