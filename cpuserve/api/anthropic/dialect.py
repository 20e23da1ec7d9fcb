"""Anthropic's API."""

from __future__ import annotations

from cpuserve.api.anthropic import models
from cpuserve.api.anthropic import router as messages
from cpuserve.api.anthropic.errors import anthropic_error
from cpuserve.api.dialect import Dialect

ANTHROPIC = Dialect(
    (messages.router, models.router),
    anthropic_error,
    ("/v1/messages",),
    ("request-id",),
    shared=(models.MODELS,),
    header=models.HEADER,
)
