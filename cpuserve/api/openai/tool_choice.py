"""Interpret `tool_choice`: which tools of a request the model may or must call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from cpuserve.base.errors import InvalidRequest, brief
from cpuserve.serving.calls.call import unsupported
from cpuserve.serving.calls.tool_catalog import missing_note

log = logging.getLogger(__name__)
T = TypeVar("T")


class ToolChoice(NamedTuple):
    """The tool choice of a GenerateCall, and the tools in the format of chat completions."""

    choice: str
    name: str | None  # the only function that may be called; then the choice is "required"
    tools: list[dict[str, Any]] | None  # the tools that the model may call


@dataclass(frozen=True, slots=True)
class FunctionWords:
    """How an API writes functions and custom tools in its field `tool_choice`.

    name_of: returns the tool name in a choice; None if the choice is invalid.
    function, allowed: examples of a function and of allowed tools, for error messages.
    inner: the member of `allowed_tools` that contains the mode and the tools;
      "" = they are members of the choice itself.
    skips: returns whether this server ignores an allowed tool without an error,
      because it cannot run the tool.
    """

    name_of: Callable[[object], str | None]
    function: str
    allowed: str
    inner: str = ""
    skips: Callable[[object], bool] = lambda _: False


def tool_choice(
    choice: str | dict[str, Any] | None, tools: list[dict[str, Any]] | None, words: FunctionWords
) -> ToolChoice:
    """Return the meaning of `choice` for `tools`, which have the format of chat completions.

    Raises:
      InvalidRequest: `choice` is invalid, or allows a tool that is not among `tools`.
    """
    choice = plain_choice(choice)
    if not isinstance(choice, dict):
        return ToolChoice(choice or "auto", None, tools)
    if choice.get("type") == "allowed_tools":
        return _allowed_tools(choice, tools or [], words)
    name = words.name_of(choice)
    if name is None:
        msg = f"tool_choice must be a word, {words.function}, or {words.allowed}"
        raise InvalidRequest(msg, param="tool_choice")
    return ToolChoice("required", name, tools)


def note_about(functions: Sized, others: Collection[str], choice: object) -> str:
    """Return a note for the model about tools that are missing here; "" if it needs no note.

    functions: the functions that the model may call.
    others: types of tools that only OpenAI runs (web_search and others).
      These tools are left out, because agents usually work without them.
      If a request offers only such tools, its response depends on them: the model gets the note.

    Raises:
      InvalidRequest: the choice requires a call, but OpenAI runs the chosen tool or all tools.
    """
    plain = plain_choice(choice)
    if not others or plain == "none":
        return ""
    kinds = ", ".join(sorted(kind[:40] for kind in others))
    forced = plain.get("type") if isinstance(plain, dict) else None
    if forced in others or (not functions and plain == "required"):
        msg = (
            f"this server cannot run tools of the type {forced or kinds}, which tool_choice forces:"
            " offer functions (type function), which the client runs, or set tool_choice to auto"
        )
        raise unsupported(msg, "tool_choice")
    log.debug("tools of these types are left out, because OpenAI runs them: %s", kinds)
    if functions:
        return ""
    return missing_note(kinds)


def plain_choice(choice: T) -> T | str:
    """Return `choice`, or "none", "auto" or "required" if that is its type, as Cursor sends it."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    return kind if kind in ("none", "auto", "required") else choice


def _allowed_tools(
    choice: dict[str, Any], tools: list[dict[str, Any]], words: FunctionWords
) -> ToolChoice:
    """Return the ToolChoice for `allowed_tools`: the model sees only the tools in it."""
    inner = words.inner
    allowed = choice.get(inner) if inner else choice
    mode, chosen = None, None
    if isinstance(allowed, dict):
        mode, chosen = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required") or not isinstance(chosen, list) or not chosen:
        where = f"tool_choice.{inner}" if inner else "tool_choice"
        msg = (
            f'{where} must have the mode "auto" or "required", and tools: a list '
            f"of {words.function} that is not empty"
        )
        raise InvalidRequest(msg, param="tool_choice")
    # If all allowed tools would be skipped, keep them, so that the first one raises an error below.
    chosen = [tool for tool in chosen if not words.skips(tool)] or chosen
    names = [words.name_of(tool) for tool in chosen]
    offered = {function_name(tool) for tool in tools} - {None}
    for tool, name in zip(chosen, names, strict=True):
        if name not in offered:
            shown = brief(name or (tool.get("type") if isinstance(tool, dict) else tool), 128)
            msg = f"tool_choice allows {shown!r}, which is not among the tools"
            raise InvalidRequest(msg, param="tool_choice")
    allowed_names = set(names)
    kept = [tool for tool in tools if function_name(tool) in allowed_names]
    return ToolChoice(mode, None, kept)


def function_name(tool: object) -> str | None:
    """Return the function name of a chat completions tool; None if the tool is invalid."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        return None
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None
