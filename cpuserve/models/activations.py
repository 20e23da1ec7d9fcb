"""The activations of MLPs, by their names in config.json."""

from __future__ import annotations

from typing import cast

from cpuserve.program.ops import Then

ACTIVATIONS: dict[str, Then] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "quick_gelu": "quick_gelu",
}
# The same in MLPs with a gate; programs have no gated ReLU and no gated quick GELU.
GATED: dict[str, Then] = {
    kind: cast("Then", f"{activation}_mul")
    for kind, activation in ACTIVATIONS.items()
    if activation not in ("relu", "quick_gelu")
}
