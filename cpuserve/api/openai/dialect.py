"""The Dialect object of the OpenAI API with the vLLM extensions: its routers."""

from __future__ import annotations

from cpuserve.api.dialect import Dialect
from cpuserve.api.openai import models
from cpuserve.api.openai.batches import router as batches
from cpuserve.api.openai.chat import router as chat
from cpuserve.api.openai.completions import router as completions
from cpuserve.api.openai.completions import tokens
from cpuserve.api.openai.conversations import router as conversations
from cpuserve.api.openai.files import router as files
from cpuserve.api.openai.responses import compact
from cpuserve.api.openai.responses import router as responses
from cpuserve.api.vectors.openai import router as embeddings

OPENAI = Dialect(
    (
        chat.router,
        completions.router,
        tokens.router,
        compact.router,
        responses.router,
        conversations.router,
        embeddings.router,
        files.router,
        batches.router,
        models.router,
    )
)
