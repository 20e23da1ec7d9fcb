"""The Ollama API."""

from __future__ import annotations

from cpuserve.api.dialect import Dialect
from cpuserve.api.ollama import embed, models
from cpuserve.api.ollama import router as generation
from cpuserve.api.response.error_format import OLLAMA as OLLAMA_ERRORS

OLLAMA = Dialect((generation.router, embed.router, models.router), OLLAMA_ERRORS)
