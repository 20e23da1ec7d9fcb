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

_AT, _JOIN = "vision_tower", "multi_modal_projector"
_PATCHES, _PLACES = f"{_AT}.patch_embed.proj", f"{_AT}.patch_embed.pos_emb"
_EPS = 1e-5  # the default of torch.nn.LayerNorm; the config has no key for it
_K25_JOIN = "mm_projector"
# The place of a frame in a video, which follows from its number; a picture has one frame.
_FRAMES = f"{_AT}.patch_embed.pos_emb.time_weight"


class KimiVLTower:
    """The vision model and the projector of Kimi-VL.

    Key of family: places, the shape of the table of places.
    """

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        own = read_object(config, "vision_config")
        sizes = read_sizes(own, (1152, 16, 27, 4304), TURNED, channels="")
        merge = own.get("merge_kernel_size", [2, 2])
        side = merge[0] if isinstance(merge, list | tuple) and merge else merge
        if type(side) is not int or not 1 <= side <= 64 or merge not in (side, [side] * 2):
            refuse("vision_config.merge_kernel_size", merge, "two equal numbers")
        high, wide = (
            read_int(own, f"init_pos_emb_{name}", 64, high=1 << 14) for name in ("height", "width")
        )
        if high != wide:
            refuse("vision_config.init_pos_emb_width", wide, f"{high}, the height")
        return read_tower(
            config,
            pictures,
            width,
            **sizes,
            norm_eps=_EPS,
            activation=read_choice(own, "hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
            merge=side,
            table=high,
            patch_weight=_PATCHES,
            names=(f"{_AT}.", f"{_JOIN}."),
            theta=read_theta(own),
            family={"places": (*_table(own, high), sizes["width"])},
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
        given = read_object(config, "vision_config")
        # transformers writes these keys without their beginnings.
        own = {k.removeprefix("vt_"): v for k, v in given.items()}
        own |= {f"init_{k}": v for k, v in own.items() if k.startswith("pos_emb_")}
        inner = read_object(pictures, "media_proc_cfg") or pictures
        found = KimiVLTower.spec({**config, "vision_config": own}, inner, width)
        eps = read_float(
            config, "projection_layer_norm_eps", read_float(given, "projector_ln_eps", _EPS)
        )
        names = (f"{_AT}.", f"{_K25_JOIN}.")
        return replace(found, names=names, family={**found.family, "join_eps": eps})

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
        _layer(b, s, f"{_AT}.encoder.blocks.{i}", x)
    return b.layer_norm(x, f"{_AT}.encoder.final_layernorm")


def _project(b: Builder, s: TowerSpec, x: ValueId, first: str, last: str) -> None:
    """Append the matrices of the projector of the normed rows x, and the end of the program."""
    folded = s.merge**2 * s.width
    x = b.linear(b.fold(x, s.merge**2), first, features=folded, bias=True, then="gelu")
    b.hidden(b.linear(x, last, features=s.out_width, bias=True))


def _table(own: Mapping[str, Any], side: int) -> tuple[int, ...]:
    """Return the dimensions of the table of places; GGUF files have one for all places."""
    return (side**2,) if own.get("flat_places") else (side, side)


def _layer(b: Builder, s: TowerSpec, at: str, x: ValueId) -> None:
    """Change x in place: x + attention(norm(x)), then x + mlp(norm(x))."""
    h, d, every = b.layer_norm(x, f"{at}.norm0"), s.head_dim, f"{at}.wqkv"
    parts = {rows(every, 2 * s.width, s.width): s.width}
    for begin in (s.width, 0):
        parts = {**unpaired(every, s.q_heads, d, d, begin=begin), **parts}
    qkv = b.linear(h, list(parts), features=list(parts.values()), bias=True)
    b.linear(b.attend_both_sides(qkv, rope=_rope(d, s.theta)), f"{at}.wo", bias=True, add_to=x)
    h, then = b.layer_norm(x, f"{at}.norm1"), s.activation
    g = b.linear(h, f"{at}.mlp.fc0", features=s.intermediate, bias=True, then=then)
    b.linear(g, f"{at}.mlp.fc1", bias=True, add_to=x)


def _rope(head_dim: int, theta: float) -> Rope:
    """Return the RoPE: each frequency turns a pair by the column of a patch, and one by its row."""
    quarter = head_dim // 4
    freqs = [theta ** (-(i // 2) / quarter) for i in range(2 * quarter)]
    return Rope(head_dim, tuple(freqs), axes=(1, 0) * quarter)
