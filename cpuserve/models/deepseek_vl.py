"""The towers of DeepSeek-VL and Janus: SigLIP over one square tile, and a projector for each patch.

Source: transformers modeling_deepseek_vl, modeling_siglip and modeling_janus.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import (
    read_bool,
    read_float,
    read_int,
    read_object,
    refuse,
)
from cpuserve.models.siglip import HEAD, PATCHES, SIGLIP_PREFIX, SIGLIP_USUAL, encoded, read_siglip
from cpuserve.models.spec import TowerSpec
from cpuserve.models.towers import read_tower
from cpuserve.program.builder import Builder

_JOIN = "model.aligner"
# The defaults of the class.
_JANUS: dict[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16}
_JANUS |= {"num_hidden_layers": 24, "patch_size": 16, "image_size": 384, "hidden_act": "gelu"}


class DeepseekVLTower:
    """The vision model and the aligner of DeepSeek-VL."""

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = {**SIGLIP_USUAL, **read_object(config, "vision_config")}
        patch = read_int(vision, "patch_size", high=1024)
        side = read_int(vision, "image_size", high=1 << 14) // patch
        if side < 1:
            refuse("vision_config.image_size", vision["image_size"], f"at least {patch}")
        return read_tower(
            config,
            pictures,
            width,
            **read_siglip(vision),
            patch=patch,
            merge=1,
            side=side,
            table=side,
            patch_weight=PATCHES,
            names=(f"{SIGLIP_PREFIX}.", f"{_JOIN}."),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        b.leave(f"{SIGLIP_PREFIX}.head.{name}" for name in HEAD)
        x = encoded(b, s, SIGLIP_PREFIX)
        h = b.linear(x, f"{_JOIN}.linear1", features=s.out_width, bias=True, then="gelu")
        b.hidden(b.linear(h, f"{_JOIN}.linear2", features=s.out_width, bias=True))


class JanusTower:
    """The vision model and the aligner of Janus, which reads pictures; its part that draws is left.

    Key of family: depth, the number of matrices of the aligner.
    """

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        vision = {**_JANUS, **read_object(config, "vision_config")}
        if read_int(vision, "projection_dim", 2048, high=1 << 24) != width:
            refuse("vision_config.projection_dim", vision.get("projection_dim", 2048), str(width))
        for key, required in (("use_qk_norm", False), ("attention_bias", True)):
            if read_bool(vision, key, required) != required:
                refuse(f"vision_config.{key}", vision[key], str(required).lower())
        hidden = read_int(vision, "hidden_size", high=1 << 20)
        vision["intermediate_size"] = int(hidden * read_float(vision, "mlp_ratio", 4.0))
        tower = DeepseekVLTower.spec({**config, "vision_config": vision}, pictures, width)
        return replace(tower, family={"depth": read_int(vision, "depth", 2, high=64)})

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x, activation = encoded(b, s, SIGLIP_PREFIX, "projection_layer"), s.activation
        names = ["fc1", *(f"hidden_layers.{i}" for i in range(s.family["depth"] - 1))]
        for name in names[:-1]:
            x = b.linear(x, f"{_JOIN}.{name}", features=s.out_width, bias=True, then=activation)
        b.hidden(b.linear(x, f"{_JOIN}.{names[-1]}", features=s.out_width, bias=True))
