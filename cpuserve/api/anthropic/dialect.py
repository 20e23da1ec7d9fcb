"""Anthropic's API."""

from __future__ import annotations

from cpuserve.api import shapes
from cpuserve.api.anthropic import models
from cpuserve.api.anthropic import router as messages
from cpuserve.api.dialect import Dialect

ANTHROPIC = Dialect((messages.router, models.router), shapes.ANTHROPIC)
