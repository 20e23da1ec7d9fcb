"""The Dialect object of the Anthropic API: its routers and its error format."""

from __future__ import annotations

from cpuserve.api import dialects as error_format
from cpuserve.api.anthropic import models
from cpuserve.api.anthropic import router as messages
from cpuserve.api.anthropic.batches import router as batches
from cpuserve.api.dialect import Dialect

ANTHROPIC = Dialect((messages.router, batches.router, models.router), error_format.ANTHROPIC)
