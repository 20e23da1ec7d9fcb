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
from cpuserve.models.siglip import HEAD, PATCHES, SIGLIP_AT, SIGLIP_USUAL, encoded, read_siglip
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
        own = {**SIGLIP_USUAL, **read_object(config, "vision_config")}
        patch = read_int(own, "patch_size", high=1024)
        side = read_int(own, "image_size", high=1 << 14) // patch
        if side < 1:
            refuse("vision_config.image_size", own["image_size"], f"at least {patch}")
        return read_tower(
            config,
            pictures,
            width,
            **read_siglip(own),
            patch=patch,
            merge=1,
            side=side,
            table=side,
            patch_weight=PATCHES,
            names=(f"{SIGLIP_AT}.", f"{_JOIN}."),
        )

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        b.leave(f"{SIGLIP_AT}.head.{name}" for name in HEAD)
        x = encoded(b, s, SIGLIP_AT)
        h = b.linear(x, f"{_JOIN}.linear1", features=s.out_width, bias=True, then="gelu")
        b.hidden(b.linear(h, f"{_JOIN}.linear2", features=s.out_width, bias=True))


class JanusTower:
    """The vision model and the aligner of Janus, which reads pictures; its part that draws is left.

    Key of family: depth, the number of matrices of the aligner.
    """

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        own = {**_JANUS, **read_object(config, "vision_config")}
        if read_int(own, "projection_dim", 2048, high=1 << 24) != width:
            refuse("vision_config.projection_dim", own.get("projection_dim", 2048), str(width))
        for key, fixed in (("use_qk_norm", False), ("attention_bias", True)):
            if read_bool(own, key, fixed) != fixed:
                refuse(f"vision_config.{key}", own[key], str(fixed).lower())
        hidden = read_int(own, "hidden_size", high=1 << 20)
        own["intermediate_size"] = int(hidden * read_float(own, "mlp_ratio", 4.0))
        found = DeepseekVLTower.spec({**config, "vision_config": own}, pictures, width)
        return replace(found, family={"depth": read_int(own, "depth", 2, high=64)})

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        x, then = encoded(b, s, SIGLIP_AT, "projection_layer"), s.activation
        names = ["fc1", *(f"hidden_layers.{i}" for i in range(s.family["depth"] - 1))]
        for name in names[:-1]:
            x = b.linear(x, f"{_JOIN}.{name}", features=s.out_width, bias=True, then=then)
        b.hidden(b.linear(x, f"{_JOIN}.{names[-1]}", features=s.out_width, bias=True))
