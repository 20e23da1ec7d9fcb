"""How Kimi K2 writes tool calls: JSON after ids with the name and the number of the call."""

from __future__ import annotations

from cpuserve.serving.tools.layout import ID, CallLayout, LayoutFormat
from cpuserve.serving.tools.object_calls import NAMED_JSON

CALLS = LayoutFormat(
    "kimi_k2",
    CallLayout(
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.",
        f":{ID}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        "",
        "<|tool_calls_section_end|>",
        ids="indexed",
    ),
    NAMED_JSON,
)
