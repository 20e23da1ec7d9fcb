"""The towers of Qwen3-VL and Qwen3-Omni, and those like them: any size, 2-D RoPE.

Source: transformers modeling_qwen3_vl and modeling_qwen3_omni_moe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isqrt
from typing import Any

from cpuserve.models.activations import ACTIVATIONS
from cpuserve.models.config import (
    read_choice,
    read_int,
    read_layers,
    read_object,
    refuse,
)
from cpuserve.models.spec import TowerSpec
from cpuserve.models.stored_names import AS_PROGRAM, StoredNames
from cpuserve.models.text_parts import KEYS
from cpuserve.models.towers import QWEN_KEYS, TURNED, read_sizes, read_theta, read_tower
from cpuserve.program.builder import Builder
from cpuserve.program.ops import Rope, ValueId

_PREFIX = "model.visual"
PATCHES = f"{_PREFIX}.patch_embed.proj"
MLX_NAMES = StoredNames({r"^vision_tower\.": f"{_PREFIX}."})  # what mlx-vlm calls the tensors
NORM_EPS = 1e-6  # their configs have no key for it


@dataclass(frozen=True, slots=True)
class QwenTower:
    """The vision model of Qwen3-VL or a model like it.

    sections: the default of mrope_section.
    level_layers: the default of the layers that make the levels (DeepStack); None = there are none.
    levels: the beginning of the mergers of levels. merger: the parts of a merger, its norm first.
    """

    sections: tuple[int, int, int] = (24, 20, 20)
    level_layers: tuple[int, ...] | None = (8, 16, 24)
    levels: str = f"{_PREFIX}.deepstack_merger_list"
    merger: tuple[str, str, str] = ("norm", "linear_fc1", "linear_fc2")
    stored: StoredNames = MLX_NAMES

    def spec(self, config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = read_object(config, "vision_config")
        places = read_int(vision, "num_position_embeddings", 2304, high=1 << 24)
        if isqrt(places) ** 2 != places:
            refuse("vision_config.num_position_embeddings", places, "a square")
        sizes = read_sizes(vision, (1152, 16, 27, 4304), TURNED, **QWEN_KEYS)
        layers = self.level_layers
        if layers is not None:
            layers = read_layers(vision, "deepstack_visual_indexes", layers, sizes["layers"])
        return read_tower(
            config,
            pictures,
            check_width(vision, "out_hidden_size", width),
            default_patch=16,
            **sizes,
            norm_eps=NORM_EPS,
            activation=read_choice(vision, "hidden_act", "gelu_pytorch_tanh", ACTIVATIONS),
            table=isqrt(places),
            patch_weight=PATCHES,
            names=(f"{_PREFIX}.",),
            level_layers=layers or (),
            sections=read_sections(config, self.sections),
            interleaved=True,
            theta=read_theta(vision),
        )

    def build(self, b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        norm = self.merger[0]
        x = b.linear(b.patches(s.patch_width), PATCHES, features=s.width, bias=True)
        b.grid_embed(x, f"{_PREFIX}.pos_embed", side=s.table)
        levels = list[ValueId]()
        for i in range(s.layers):
            tower_layer(b, s, f"{_PREFIX}.blocks.{i}", x)
            if i in s.level_layers:
                prefix = f"{self.levels}.{s.level_layers.index(i)}"
                folded = b.layer_norm(b.fold(x, s.merge**2), f"{prefix}.{norm}")
                levels.append(_merged(b, s, prefix, folded, self.merger))
        prefix = f"{_PREFIX}.merger"
        x = b.fold(b.layer_norm(x, f"{prefix}.{norm}"), s.merge**2)
        rows = _merged(b, s, prefix, x, self.merger)
        for count, level in enumerate(levels, 1):
            rows = b.columns(rows, s.out_width * count, more=level)
        b.hidden(rows)


QWEN3_VL = QwenTower()
# Qwen3-VL's tower, with other names of the tensors of its mergers.
QWEN3_OMNI = QwenTower(
    levels=f"{_PREFIX}.merger_list", merger=("ln_q", "mlp.0", "mlp.2"), stored=AS_PROGRAM
)


def check_width(vision: Mapping[str, Any], key: str, width: int) -> int:
    """Return the width of the text part; ModelError if the tower's config `vision` has another."""
    if read_int(vision, key, width, high=1 << 20) != width:
        refuse(f"vision_config.{key}", vision[key], f"the text's width {width}")
    return width


def read_sections(config: Mapping[str, Any], default: tuple[int, ...]) -> tuple[int, ...]:
    """Return mrope_section of the text part: how many frequencies of its RoPE each axis has."""
    text_config = next((text for key in KEYS if (text := read_object(config, key))), config)
    sections: object = default
    for key in ("rope_scaling", "rope_parameters"):
        sections = read_object(text_config, key).get("mrope_section", sections)
    section_list = sections if isinstance(sections, list | tuple) else ()
    if len(section_list) != 3 or not all(type(n) is int and 0 <= n < 4096 for n in section_list):
        refuse("mrope_section", sections, "a list of three numbers")
    if not section_list[2]:
        refuse("mrope_section", sections, "three numbers, and the last above 0")
    return tuple(section_list)


def axial_rope(head_dim: int, theta: float = 10000.0) -> Rope:
    """Return the RoPE of a tower: half of the frequencies turn by the row, half by the column."""
    quarter = head_dim // 4
    freqs = tuple(theta ** (-i / quarter) for i in range(quarter))
    return Rope(head_dim, freqs + freqs, axes=(0,) * quarter + (1,) * quarter)


def tower_attention(
    b: Builder,
    s: TowerSpec,
    prefix: str,
    x: ValueId,
    h: ValueId,
    *,
    bias: bool = True,
    **options: Any,
) -> None:
    """Add to x the attention of the normalized rows h. options: arguments of attend_both_sides.

    Key of family: apart, whether queries, keys and values have matrices of their own.
    """
    if s.family.get("apart"):
        names = [f"{prefix}.attn.{part}" for part in "qkv"]
        qkv = b.linear(h, names, features=s.width, bias=bias)
    else:
        qkv = b.linear(h, f"{prefix}.attn.qkv", features=3 * s.width, bias=bias)
    out = b.attend_both_sides(qkv, rope=axial_rope(s.head_dim, s.theta), **options)
    b.linear(out, f"{prefix}.attn.proj", bias=bias, add_to=x)


def tower_layer(b: Builder, s: TowerSpec, prefix: str, x: ValueId) -> None:
    """Change x in place: x + attention(norm(x)), then x + mlp(norm(x))."""
    tower_attention(b, s, prefix, x, b.layer_norm(x, f"{prefix}.norm1"))
    h = b.layer_norm(x, f"{prefix}.norm2")
    activation = s.activation
    g = b.linear(h, f"{prefix}.mlp.linear_fc1", features=s.intermediate, bias=True, then=activation)
    b.linear(g, f"{prefix}.mlp.linear_fc2", bias=True, add_to=x)


def gated_mlp(
    b: Builder, s: TowerSpec, prefix: str, h: ValueId, x: ValueId, bias: bool = True
) -> None:
    """Add to x the MLP of h, which has a gate."""
    gate_up, activation = [f"{prefix}.gate_proj", f"{prefix}.up_proj"], s.activation
    g = b.linear(h, gate_up, features=s.intermediate, bias=bias, then=activation)
    b.linear(g, f"{prefix}.down_proj", bias=bias, add_to=x)


def _merged(
    b: Builder, s: TowerSpec, prefix: str, x: ValueId, parts: tuple[str, str, str]
) -> ValueId:
    width, (_, first_linear, last_linear) = s.merge**2 * s.width, parts
    g = b.linear(x, f"{prefix}.{first_linear}", features=width, bias=True, then="gelu")
    return b.linear(g, f"{prefix}.{last_linear}", features=s.out_width, bias=True)
