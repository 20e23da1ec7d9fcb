"""The towers of Kimi-VL and Kimi K2.5: MoonViT over any size, and a projector of merged patches.

Source: modeling_kimi_vl of the published models, and modeling_kimi_k25 of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import (
    read_choice,
    read_float,
    read_int,
    read_object,
    refuse,
)
from cpuserve.models.llama import unpaired
from cpuserve.models.spec import TowerSpec
from cpuserve.models.towers import TURNED, read_sizes, read_theta, read_tower
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Rope, ValueId
from cpuserve.program.parts import rows

_PREFIX, _JOIN = "vision_tower", "multi_modal_projector"
_PATCHES, _PLACES = f"{_PREFIX}.patch_embed.proj", f"{_PREFIX}.patch_embed.pos_emb"
_EPS = 1e-5  # the default of torch.nn.LayerNorm; the config has no key for it
_K25_JOIN = "mm_projector"
# The position embedding of video frames; it is not read, because a picture has one frame.
_FRAMES = f"{_PREFIX}.patch_embed.pos_emb.time_weight"


class KimiVLTower:
    """The vision model and the projector of Kimi-VL.

    Key of family: places, the shape of the table of places.
    """

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = read_object(config, "vision_config")
        sizes = read_sizes(vision, (1152, 16, 27, 4304), TURNED, channels="")
        merge = vision.get("merge_kernel_size", [2, 2])
        side = merge[0] if isinstance(merge, list | tuple) and merge else merge
        if type(side) is not int or not 1 <= side <= 64 or merge not in (side, [side] * 2):
            refuse("vision_config.merge_kernel_size", merge, "two equal numbers")
        rows, columns = (
            read_int(vision, f"init_pos_emb_{name}", 64, high=1 << 14)
            for name in ("height", "width")
        )
        if rows != columns:
            refuse("vision_config.init_pos_emb_width", columns, f"{rows}, the height")
        return read_tower(
            config,
            pictures,
            width,
            **sizes,
            norm_eps=_EPS,
            activation=read_choice(vision, "hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
            merge=side,
            table=rows,
            patch_weight=_PATCHES,
            names=(f"{_PREFIX}.", f"{_JOIN}."),
            theta=read_theta(vision),
            family={"places": (*_table(vision, rows), sizes["width"])},
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x = b.layer_norm(_encoded(b, s), f"{_JOIN}.pre_norm")
        _project(b, s, x, f"{_JOIN}.linear_1", f"{_JOIN}.linear_2")


class KimiK25Tower:
    """The same for Kimi K2.5, with other keys of the config and other tensors of the projector.

    Key of family: join_eps, the epsilon of the projector's norm.
    """

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        settings = read_object(config, "vision_config")
        # transformers writes these keys without their beginnings.
        vision = {k.removeprefix("vt_"): v for k, v in settings.items()}
        vision |= {f"init_{k}": v for k, v in vision.items() if k.startswith("pos_emb_")}
        media_config = read_object(pictures, "media_proc_cfg") or pictures
        tower = KimiVLTower.spec({**config, "vision_config": vision}, media_config, width)
        eps = read_float(
            config, "projection_layer_norm_eps", read_float(settings, "projector_ln_eps", _EPS)
        )
        names = (f"{_PREFIX}.", f"{_K25_JOIN}.")
        return replace(tower, names=names, family={**tower.family, "join_eps": eps})

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        b.leave([_FRAMES])
        eps = s.family["join_eps"]
        x = b.layer_norm(_encoded(b, s), f"{_K25_JOIN}.pre_norm", eps=eps)
        _project(b, s, x, f"{_K25_JOIN}.proj.0", f"{_K25_JOIN}.proj.2")


def _encoded(b: Builder, s: TowerSpec) -> ValueId:
    """Return the rows of all patches of the step after the last layer and its norm: [T, width]."""
    x = b.linear(b.patches(s.patch_width), _PATCHES, features=s.width, bias=True)
    shape = s.family["places"]
    b.grid_embed(x, _PLACES, side=s.table, shape=shape, cubic=True)
    for i in range(s.layers):
        _layer(b, s, f"{_PREFIX}.encoder.blocks.{i}", x)
    return b.layer_norm(x, f"{_PREFIX}.encoder.final_layernorm")


def _project(b: Builder, s: TowerSpec, x: ValueId, first_linear: str, last_linear: str) -> None:
    """Append the matrices of the projector of the normed rows x, and the end of the program."""
    folded = s.merge**2 * s.width
    x = b.linear(b.fold(x, s.merge**2), first_linear, features=folded, bias=True, then="gelu")
    b.hidden(b.linear(x, last_linear, features=s.out_width, bias=True))


def _table(vision: Mapping[str, Any], side: int) -> tuple[int, ...]:
    """Return the dimensions of the table of places; GGUF files have one for all places."""
    return (side**2,) if vision.get("flat_places") else (side, side)


def _layer(b: Builder, s: TowerSpec, prefix: str, x: ValueId) -> None:
    """Change x in place: x + attention(norm(x)), then x + mlp(norm(x))."""
    h, d, qkv_name = b.layer_norm(x, f"{prefix}.norm0"), s.head_dim, f"{prefix}.wqkv"
    parts = {rows(qkv_name, 2 * s.width, s.width): s.width}
    for begin in (s.width, 0):
        parts = {**unpaired(qkv_name, s.q_heads, d, d, begin=begin), **parts}
    qkv = b.linear(h, list(parts), features=list(parts.values()), bias=True)
    b.linear(b.attend_both_sides(qkv, rope=_rope(d, s.theta)), f"{prefix}.wo", bias=True, add_to=x)
    h, activation = b.layer_norm(x, f"{prefix}.norm1"), s.activation
    g = b.linear(h, f"{prefix}.mlp.fc0", features=s.intermediate, bias=True, then=activation)
    b.linear(g, f"{prefix}.mlp.fc1", bias=True, add_to=x)


def _rope(head_dim: int, theta: float) -> Rope:
    """Return the RoPE: each frequency turns a pair by the column of a patch, and one by its row."""
    quarter = head_dim // 4
    freqs = [theta ** (-(i // 2) / quarter) for i in range(2 * quarter)]
    return Rope(head_dim, tuple(freqs), axes=(1, 0) * quarter)
