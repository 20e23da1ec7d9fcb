"""The Dialect object of the Ollama API: its routers and its error format."""

from __future__ import annotations

from cpuserve.api.dialect import Dialect
from cpuserve.api.dialects import OLLAMA as OLLAMA_ERRORS
from cpuserve.api.ollama import create, manage, models, pull
from cpuserve.api.ollama import router as generation
from cpuserve.api.vectors import ollama as embed

ROUTERS = (
    generation.router,
    embed.router,
    models.router,
    pull.router,
    create.router,
    manage.router,
)
OLLAMA = Dialect(ROUTERS, OLLAMA_ERRORS)
