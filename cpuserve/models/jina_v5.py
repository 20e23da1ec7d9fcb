"""jina-embeddings v5: Qwen3 or EuroBERT, with an adapter for each task (loader/tasks.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.config import read_bool
from cpuserve.models.llama import EuroBert
from cpuserve.models.qwen import Qwen3
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class JinaV5:
    """jina-embeddings v5, text: small is Qwen3, nano is EuroBERT.

    Source: modeling_jina_embeddings_v5 of the published checkpoints.
    """

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a config; only nano has is_decoder, which is false."""
        family = Qwen3 if read_bool(config, "is_decoder", True) else EuroBert
        spec = family.spec(config)
        return replace(spec, tied=True, pooled=True)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        family = EuroBert if s.encoder else Qwen3
        family.build(b, s)
