"""The tower of Granite-Docling 500M: SigLIP over square tiles, with features of earlier layers.

Of its two connectors, the program has the coarse one. It has the fine one, with four times as many
rows, if the image processor's settings have `fine_route`. Source: modeling_granite_docling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_float,
    read_int,
    read_layers,
    read_object,
    refuse,
)
from cpuserve.models.siglip import SIGLIP_PREFIX, Idefics3Tower, siglip_layer, siglip_patches
from cpuserve.models.spec import TowerSpec
from cpuserve.models.text_parts import text_config
from cpuserve.program.builder import Builder
from cpuserve.program.ops import ValueId

_WHOLE = "GraniteDoclingForConditionalGeneration"
_PREFIX = f"{SIGLIP_PREFIX}.connector"
_EPS = 1e-5  # the default of torch.nn.LayerNorm; the config has no key for the connector's norms


class GraniteDoclingTower:
    """The vision model and one of the two connectors of Granite-Docling.

    Keys of family: path, the connector, "coarse" or "fine"; other, the one that is not used.
    """

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = {
            "hidden_size": 768,
            "num_attention_heads": 12,
            "image_size": 512,
            "patch_size": 16,
        }
        vision |= read_object(config, "vision_config")
        merge = read_int(vision, "scale_factor", 4, high=64)
        side = read_int(vision, "image_size", high=1 << 14)
        has_fine, route, other_route = read_bool(vision, "use_fine_route", True), "coarse", "fine"
        if read_bool(pictures, "fine_route", False):
            if not has_fine or merge % 2 or side // read_int(vision, "patch_size") % merge:
                refuse("fine_route", True, "false: the model has no fine connector")
            route, other_route, merge = "fine", "coarse", merge // 2
        idefics_config = {**config, "vision_config": vision, "scale_factor": merge}
        tiles = {**pictures, "max_image_size": {"longest_edge": side}}
        tower = Idefics3Tower.spec(idefics_config, tiles, width)
        if read_int(vision, "out_hidden_size", 1024, high=1 << 20) != width or width % 4:
            refuse("vision_config.out_hidden_size", vision.get("out_hidden_size"), f"{width}")
        text = text_config(_WHOLE, config)
        residual = read_float(text, "residual_multiplier", 1.0, low=1e-9, high=1e9)
        return replace(
            tower,
            level_layers=read_layers(vision, "deepstack_visual_indexes", (3, 7, 10), tower.layers),
            # The program of the text part keeps its rows divided by the residual multiplier.
            row_scale=read_float(text, "embedding_multiplier", 1.0) / residual,
            level_scale=1.0 / residual,
            family={"path": route, "other": other_route if has_fine else ""},
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x, levels, merged_patches = siglip_patches(b, s, SIGLIP_PREFIX), list[ValueId](), s.merge**2
        path = f"{_PREFIX}.{s.family['path']}"
        for i in range(s.layers):
            siglip_layer(b, s, f"{SIGLIP_PREFIX}.encoder.layers.{i}", x)
            if i in s.level_layers:
                prefix = f"{path}.deepstack_mergers.{len(levels)}"
                levels.append(_level(b, s, b.fold(x, merged_patches), prefix))
        x = b.layer_norm(x, f"{SIGLIP_PREFIX}.post_layernorm")
        x = b.fold(b.layer_norm(x, f"{_PREFIX}.ln_in", eps=_EPS), merged_patches)
        x = b.linear(x, f"{path}.projection", features=s.out_width)
        b.plane_embed(x, side=s.side // s.merge)
        h = b.activation(b.layer_norm(x, f"{_PREFIX}.ln_mid", eps=_EPS), "gelu")
        h = b.linear(h, f"{_PREFIX}.mlp_fc2", features=s.out_width)
        rows = b.layer_norm(h, f"{_PREFIX}.ln_out", eps=_EPS)
        for count, level in enumerate(levels, 1):
            rows = b.columns(rows, s.out_width * count, more=level)
        b.multiply_by(
            rows, [(s.out_width, s.row_scale), (s.out_width * len(levels), s.level_scale)]
        )
        if unread_route := s.family["other"]:
            b.leave(_names(f"{_PREFIX}.{unread_route}", len(levels)))
        b.hidden(rows)


def _level(b: Builder, s: TowerSpec, x: ValueId, prefix: str) -> ValueId:
    h = b.layer_norm(x, f"{prefix}.layer_norm", eps=_EPS)
    h = b.linear(h, f"{prefix}.linear_1", features=s.out_width, bias=True, then="gelu")
    return b.linear(h, f"{prefix}.linear_2", features=s.out_width, bias=True)


def _names(path: str, levels: int) -> list[str]:
    """Return the tensors of a connector."""
    mergers = [
        f"{path}.deepstack_mergers.{number}.{part}.{kind}"
        for number in range(levels)
        for part in ("layer_norm", "linear_1", "linear_2")
        for kind in ("weight", "bias")
    ]
    return [f"{path}.projection.weight", *mergers]
