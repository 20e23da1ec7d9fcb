"""Formats of tool calls, found from the output of chat templates. A call here is a tool call."""
