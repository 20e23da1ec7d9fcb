"""How LFM2 writes tool calls: a list of calls in Python."""

from __future__ import annotations

from cpuserve.serving.tools.layout import CallLayout, LayoutFormat
from cpuserve.serving.tools.python_calls import PYTHON

CALLS = LayoutFormat(
    "lfm2",
    CallLayout("<|tool_call_start|>[", "", "(", "", ", ", "]<|tool_call_end|>"),
    PYTHON,
)
