"""Rerankers: the API that Jina's, Cohere's and vLLM's servers share."""

from __future__ import annotations

from cpuserve.api.dialect import Dialect
from cpuserve.api.scores import router as scores

SCORES = Dialect((scores.router,))
