"""Which of a request's tools the model may or must call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from cpuserve.errors import InvalidRequest


class ToolChoice(NamedTuple):
    """The choice of a call, and the tools that it offers, in the form of chat completions."""

    choice: str
    name: str | None  # of the one function that must be called; the choice is then "required"
    tools: list[dict[str, Any]] | None  # those that may be called


def allowed_tools(
    allowed: object,
    tools: list[dict[str, Any]],
    name_of: Callable[[object], str | None],
    *,
    form: str,
    where: str,
) -> ToolChoice:
    """Return the choice of OpenAI's `allowed_tools`: the model is told only of the tools in it.

    allowed: its object with a mode and tools. name_of: returns the name in one of these, or None.
    form: how they are written, and `where` they are, for messages.

    Raises:
      InvalidRequest: it has no valid form, or allows what is not among `tools`.
    """
    mode, chosen = None, None
    if isinstance(allowed, dict):
        mode, chosen = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(chosen, list) or not chosen:
        msg = (
            f'{where} must have the mode "auto" or "required", and tools: a list '
            f"of {form} that is not empty"
        )
        raise InvalidRequest(msg, param="tool_choice")
    names = [name_of(tool) for tool in chosen]
    offered = {function_name(tool) for tool in tools} - {None}
    for tool, name in zip(chosen, names, strict=True):
        if name not in offered:
            msg = f"tool_choice allows {str(tool)[:128]}, which is not among the tools"
            raise InvalidRequest(msg, param="tool_choice")
    allowed_names = set(names)
    kept = [tool for tool in tools if function_name(tool) in allowed_names]
    return ToolChoice(mode, None, kept)


def function_name(tool: object) -> str | None:
    """Return the name in a tool of chat completions; None if it has no valid form."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return None
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
