"""The tower of Qwen3.5, 3.6 and 3.8: as in Qwen3-VL, without features of earlier layers.

Source: transformers modeling_qwen3_5.
"""

from __future__ import annotations

from cpuserve.models.qwen_vl import QwenTower

QWEN3_5 = QwenTower((11, 11, 10), level_layers=None)
