"""Ollama's API."""

from __future__ import annotations

from cpuserve.api.dialect import Dialect
from cpuserve.api.ollama import embed, models
from cpuserve.api.ollama import router as generation
from cpuserve.api.ollama.errors import ollama_error

OLLAMA = Dialect((generation.router, embed.router, models.router), ollama_error, ("/api",))
