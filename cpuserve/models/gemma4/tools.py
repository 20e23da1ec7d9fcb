"""How Gemma 4 writes tool calls: names and values in braces."""

from __future__ import annotations

from cpuserve.serving.tools.brace_calls import Braces
from cpuserve.serving.tools.layout import CallLayout, LayoutFormat

CALLS = LayoutFormat(
    "gemma4",
    CallLayout("", "<|tool_call>call:", "{", "<tool_call|>"),
    Braces('<|"|>', sorts=True),
)
