"""Tool calls: the formats in which models write them, found from the chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.serving.tools.hermes import HERMES
from cpuserve.serving.tools.llama3_json import LLAMA3_JSON
from cpuserve.serving.tools.qwen3_coder import QWEN3_CODER

if TYPE_CHECKING:
    from cpuserve.serving.tools.base import ToolFormat

# The first format whose mark a template has is used.
FORMATS: tuple[ToolFormat, ...] = (
    QWEN3_CODER,  # whose templates have Hermes' marker, too
    HERMES,
    LLAMA3_JSON,
)


def find_format(template: str | None) -> ToolFormat | None:
    """Return the format in which a model with this chat template calls tools, or None."""
    return next((f for f in FORMATS if f.matches(template or "")), None)
