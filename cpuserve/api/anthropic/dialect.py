"""The Dialect object of the Anthropic API: its routers and its error format."""

from __future__ import annotations

from cpuserve.api.anthropic import models
from cpuserve.api.anthropic import router as messages
from cpuserve.api.anthropic.batches import router as batches
from cpuserve.api.dialect import Dialect
from cpuserve.api.response import error_format

ANTHROPIC = Dialect((messages.router, batches.router, models.router), error_format.ANTHROPIC)
