"""Rerankers: the API that the servers of Jina, Cohere and vLLM share."""

from __future__ import annotations

from cpuserve.api.dialect import Dialect
from cpuserve.api.scores import router as scores

SCORES = Dialect((scores.router,))
