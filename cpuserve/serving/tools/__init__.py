"""Formats of tool calls, found from the output of chat templates. A call here is a tool call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.serving.tools.harmony import HARMONY
from cpuserve.serving.tools.hermes import HERMES
from cpuserve.serving.tools.llama3_json import LLAMA3_JSON
from cpuserve.serving.tools.qwen3_coder import QWEN3_CODER

if TYPE_CHECKING:
    from cpuserve.serving.tools.base import ToolFormat

# The first format that can read the output of the chat template is used.
FORMATS: tuple[ToolFormat, ...] = (QWEN3_CODER, HERMES, LLAMA3_JSON, HARMONY)
