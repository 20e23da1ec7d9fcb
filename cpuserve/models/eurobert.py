"""EuroBERT and LlamaBidirectional: Llama as an encoder; all tokens see each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cpuserve.models.llama import Llama, build_decoder
from cpuserve.models.spec import ModelSpec
from cpuserve.program.builder import Builder


class EuroBert:
    """EuroBERT: Llama as an encoder. Source: transformers modeling_eurobert."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a EuroBERT config."""
        config = {"rms_norm_eps": 1e-5, "max_position_embeddings": 8192, **config}
        spec = Llama.spec(config)
        return replace(spec, encoder=True, pooled=True)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        b.leave(("lm_head.weight",))
        build_decoder(b, s)


class LlamaBidirectional:
    """Llama without a causal mask (llama-embed-nemotron, NV-EmbedQA). Source: modeling_llama."""

    @staticmethod
    def spec(config: Mapping[str, Any]) -> ModelSpec:
        """Return the hyperparameters in a Llama config."""
        spec = Llama.spec(config)
        return replace(spec, encoder=True, pooled=True)

    @staticmethod
    def build(b: Builder, s: ModelSpec) -> None:
        """Append the operations of the model to its builder `b`."""
        EuroBert.build(b, s)
