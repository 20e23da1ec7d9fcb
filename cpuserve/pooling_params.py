"""The parameters of embeddings, labels and scores of `LLM`, under the module of vLLM."""

from __future__ import annotations

from cpuserve.sampling.pooling import PoolingParams

__all__ = ["PoolingParams"]
