"""GPT-BigCode (StarCoder 1, SantaCoder): GPT-2 with one KV head, stored as [out, in]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool, refuse
from cpuserve.models.gpt2 import Gpt2
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class GptBigCode:
    """StarCoder 1 and SantaCoder. Source: transformers modeling_gpt_bigcode."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a GPT-BigCode config."""
        if not read_bool(config, "multi_query", True):
            refuse("multi_query", False, "true: a KV head for each query head is not supported")
        usual = {"activation_function": "gelu_pytorch_tanh", **config}
        return replace(Gpt2.spec({**usual, "conv1d_transposed": True}), kv_heads=1)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        Gpt2.build(b, s)
