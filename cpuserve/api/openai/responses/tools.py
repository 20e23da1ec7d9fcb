"""The functions that a response offers to the model, in the form of chat completions."""

from __future__ import annotations

import logging
from typing import Any

from cpuserve.api.openai.tool_choice import ToolChoice, allowed_tools
from cpuserve.errors import InvalidRequest
from cpuserve.serving.call import unsupported

log = logging.getLogger(__name__)

_FUNCTION = '{"type": "function", "name": ...}'
_MEMBERS = ("name", "description", "parameters", "strict")


def chosen_tools(
    tools: list[dict[str, Any]] | None, choice: str | dict[str, Any] | None
) -> ToolChoice:
    """Return the functions among `tools` that the model may call, and whether it must.

    Agents offer tools that OpenAI runs (web_search and others) beside their own functions. These
    are left out, because the agent works without them. A request that offers nothing else wants
    them, and is refused.

    Raises:
      InvalidRequest: a tool or the choice has no valid form, or is one that nobody here can run.
    """
    functions = [
        _function(tool, f"tools[{index}]")
        for index, tool in enumerate(tools or [])
        if tool.get("type", "function") == "function"
    ]
    others = sorted({str(tool["type"])[:40] for tool in tools or [] if not _is_function(tool)})
    if others and choice != "none":
        if not functions:
            msg = (
                f"this server cannot run tools of the type {', '.join(others)}: offer functions "
                "(type function), which the client runs, or omit tools"
            )
            raise unsupported(msg, "tools")
        log.debug("left out tools of the types %s", others)
    return _choice(choice, functions)


def _is_function(tool: object) -> bool:
    return isinstance(tool, dict) and tool.get("type", "function") == "function"


def _function(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(tool.get("name"), str):
        msg = f"{where} must be {_FUNCTION}: the name of a function stands beside its type"
        raise InvalidRequest(msg, param="tools")
    shown = {name: tool[name] for name in _MEMBERS if tool.get(name) is not None}
    return {"type": "function", "function": shown}


def _choice(choice: str | dict[str, Any] | None, functions: list[dict[str, Any]]) -> ToolChoice:
    if not isinstance(choice, dict):
        return ToolChoice(choice or "auto", None, functions)
    kind = choice.get("type")
    if kind == "allowed_tools":
        allowed = {**choice, "tools": _without_others(choice.get("tools"))}
        return allowed_tools(allowed, functions, _name, form=_FUNCTION, where="tool_choice")
    name = _name(choice)
    if name is None:
        msg = (
            f"tool_choice must be a word, {_FUNCTION}, or "
            '{"type": "allowed_tools", "mode": ..., "tools": [...]}: this server can run no tools'
        )
        raise InvalidRequest(msg, param="tool_choice")
    return ToolChoice("required", name, functions)


def _without_others(chosen: object) -> object:
    """Return the functions among allowed tools; everything if there are none, for the message."""
    if not isinstance(chosen, list):
        return chosen
    return [tool for tool in chosen if _is_function(tool)] or chosen


def _name(tool: object) -> str | None:
    name = tool.get("name") if isinstance(tool, dict) and _is_function(tool) else None
    return name if isinstance(name, str) else None
