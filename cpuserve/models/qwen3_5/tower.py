"""The tower of Qwen3.5, 3.6 and 3.8: as in Qwen3-VL, without features of earlier layers.

Source: transformers modeling_qwen3_5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.models.qwen_vl import MLX_NAMES, build_tower, read_tower
from cpuserve.models.spec import TowerSpec
from cpuserve.program.builder import Builder


class Qwen35Tower:
    """The vision model of Qwen3.5: as in Qwen3-VL, without DeepStack."""

    stored = MLX_NAMES

    @staticmethod
    def spec(config: Mapping[str, Any], pictures: Mapping[str, Any], width: int) -> TowerSpec:
        """Return the hyperparameters of the tower (TowerDef)."""
        return read_tower(config, pictures, width, (11, 11, 10), ())

    @staticmethod
    def build(b: Builder, s: TowerSpec) -> None:
        """Append the operations of the tower to its builder `b`."""
        build_tower(b, s)
