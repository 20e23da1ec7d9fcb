"""Convert the tools of a message request to functions in the format of chat completions.

Anthropic specifies tools that clients run: bash, text editor, memory. A request has only the type
of such a tool, so its parameters are defined here, as the Anthropic documentation has them.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, field
from typing import Any

from cpuserve.api.anthropic.tool_changes import ToolChanges, changes_of
from cpuserve.api.anthropic.tool_references import SEARCHES, referenced
from cpuserve.base.errors import InvalidRequest, brief
from cpuserve.serving.calls.call import unsupported
from cpuserve.serving.calls.tool_catalog import ToolSearch, missing_note
from cpuserve.serving.tools.use import check_function

log = logging.getLogger(__name__)

# The types of tools that Anthropic defines; nearly all of them end with a date.
_DEFINED = re.compile(r"[a-z0-9_]+_[0-9]{8}|mcp_toolset|tool_search_tool_[a-z0-9]+")
_CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


@dataclass(frozen=True, slots=True)
class Offered:
    """The functions of a request, its tool choice, and a note for the model on missing tools.

    name: the only function that the model may call; None = any function.
    parallel: False = the model may make only one call; None = several calls are allowed.
    found: functions that earlier tool searches have found.
    definitions: the functions by tool name, as `with_definitions` expects them.
    search: the tool search that this server runs; None = the request has no such search.
    """

    functions: list[dict[str, Any]]
    choice: str
    name: str | None
    parallel: bool | None
    note: str = ""
    found: list[dict[str, Any]] = field(default_factory=list)
    definitions: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    search: ToolSearch | None = None


def offered(
    tools: list[dict[str, Any]] | None,
    choice: dict[str, Any] | None,
    messages: list[dict[str, Any]],
) -> Offered:
    """Return the tools that a request offers.

    Tools that Anthropic runs, such as web search, are left out.
    If no functions remain, a note in the prompt says that these tools are missing,
    because agents send requests with only such a tool and read the text of the response.
    Tools with defer_loading are left out until a search has found them; see tool_references.py.

    Raises:
      InvalidRequest: a tool or the tool choice is invalid, all tools have defer_loading,
        or the tool choice requires a call although Anthropic runs all offered tools.
    """
    if tools and all(tool.get("defer_loading") is True for tool in tools):
        msg = "All tools have defer_loading set. At least one tool must be non-deferred."
        raise InvalidRequest(msg, param="tools")
    changes = changes_of(messages)
    sorted_ = _sorted(tools or [], referenced(messages), changes)
    functions, found, others = sorted_.functions, sorted_.found, sorted_.others
    definitions = sorted_.definitions
    search = _search(tools or [], sorted_.later)
    if search is not None:
        functions.append(search.function)
    kind, name, parallel = _choice(choice)
    if name in changes.removed:
        msg = f"tool_choice forces {name[:128]!r}, which a tool_removal block has removed"
        raise InvalidRequest(msg, param="tool_choice")
    if not others or functions or found or kind == "none":
        if others:
            log.debug("these tools are left out, because Anthropic runs them: %s", others)
        return Offered(functions, kind, name, parallel, "", found, definitions, search)
    missing = ", ".join(others)
    if kind == "required":
        msg = f"this server cannot run {missing}: offer tools that the client runs"
        raise unsupported(msg, "tools")
    return Offered([], "auto", None, parallel, missing_note(missing))


@dataclass(slots=True)
class _SortedTools:
    """The tools of a request, grouped by how the model learns about them.

    functions: tools that the prompt defines at its beginning.
    later: tools with defer_loading that only a tool search can find.
    found: tools that a search has found, or that a tool_addition block has added.
    others: the name of each tool that only Anthropic can run.
    definitions: the functions by tool name, as `with_definitions` expects them.
    """

    functions: list[dict[str, Any]] = field(default_factory=list)
    found: list[dict[str, Any]] = field(default_factory=list)
    later: list[dict[str, Any]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    definitions: dict[str, dict[str, Any] | None] = field(default_factory=dict)


def _sorted(tools: list[dict[str, Any]], known: set[str], changes: ToolChanges) -> _SortedTools:
    """Return the tools in groups; known: the name of each tool that a search has found."""
    into = _SortedTools()
    for index, tool in enumerate(tools):
        function = _function(tool, f"tools.{index}")
        if function is None:
            if not _is_search(tool):
                into.others.append(brief(tool.get("name", tool["type"]), 64))
            continue
        name, offer = function["name"], {"type": "function", "function": function}
        if tool.get("defer_loading") is not True:
            into.functions.append(offer)
            into.definitions[name] = None
            continue
        into.later.append(offer)
        if name in known | changes.added:
            into.definitions[name] = offer
    for tool in changes.defined.values():
        function = _function(tool, "tool_addition.tool.definition")
        if function is not None and into.definitions.get(function["name"], {}) is not None:
            into.definitions[function["name"]] = {"type": "function", "function": function}
    added = into.definitions.items()
    into.found = [offer for name, offer in added if offer and name not in changes.removed]
    return into


def _search(tools: list[dict[str, Any]], later: list[dict[str, Any]]) -> ToolSearch | None:
    """Return the tool search that this server runs, if any. later: the tools that it can find."""
    search = next(filter(_is_search, tools), None)
    if search is None or not later:
        return None
    by_pattern = str(search["type"]).startswith(f"{SEARCHES}regex")
    name = f"{SEARCHES}{'regex' if by_pattern else 'bm25'}"
    return ToolSearch(name, by_pattern=by_pattern, tools=later)


def _is_search(tool: dict[str, Any]) -> bool:
    """Return whether `tool` is a search for tools that the server runs."""
    return str(tool.get("type")).startswith(SEARCHES)


def _function(tool: dict[str, Any], where: str) -> dict[str, Any] | None:
    """Return the function of a tool that the client runs; None if Anthropic runs the tool."""
    kind = tool.get("type") or "custom"
    if kind != "custom":
        if not isinstance(kind, str) or not _DEFINED.fullmatch(kind):
            msg = f"{where}.type must be custom, or that of a tool which Anthropic defines"
            raise InvalidRequest(msg, param="tools")
        defined = client_tool(kind)
        if defined is None:
            return None
        strict = {} if tool.get("strict") is None else {"strict": tool["strict"]}
        function = {**defined, **strict}
        check_function(function, where, "input_schema")
        return function
    shown = {name: tool.get(name) for name in ("name", "description", "strict")}
    given = {name: value for name, value in shown.items() if value is not None}
    function = {**given, "parameters": tool.get("input_schema")}
    check_function(function, where, "input_schema")
    return function


def _choice(choice: dict[str, Any] | None) -> tuple[str, str | None, bool | None]:
    """Return (kind of tool choice, name of the forced tool or None, False = no parallel calls)."""
    if choice is None:
        return "auto", None, None
    kind, name = choice.get("type"), choice.get("name")
    fits = isinstance(name, str) if kind == "tool" else name is None
    if not isinstance(kind, str) or kind not in _CHOICES or not fits:
        msg = 'tool_choice must be {"type": ...}: auto, any, none, or tool with a name'
        raise InvalidRequest(msg, param="tool_choice")
    return _CHOICES[kind], name, False if choice.get("disable_parallel_tool_use") else None


_TEXT = {"type": "string"}
_LINE = {"type": "integer", "minimum": 0}
_RANGE = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2}
_VIEW_RANGE = {
    **_RANGE,
    "description": "view: the first and the last line to show, counted from 1; -1 = the end.",
}

_BASH = {
    "description": (
        "Run a command in a persistent bash session, and return its output. Variables and the "
        "working directory are kept between calls."
    ),
    "parameters": {
        "type": "object",
        "properties": {
            "command": {**_TEXT, "description": "The command. Required unless restart is true."},
            "restart": {"type": "boolean", "description": "Whether to restart the session."},
        },
    },
}


def _commands(names: list[str]) -> dict[str, Any]:
    return {**_TEXT, "enum": names, "description": "What to do."}


def _editor(*commands: str, inserted: str) -> dict[str, Any]:
    """Return the text editor tool; inserted: the name of the parameter with the text to insert."""
    properties = {
        "command": _commands(list(commands)),
        "path": {**_TEXT, "description": "The path of a file, or of a directory to view."},
        "view_range": _VIEW_RANGE,
        "file_text": {**_TEXT, "description": "create: the text of the file."},
        "old_str": {**_TEXT, "description": "str_replace: the text to replace, which is unique."},
        "new_str": {**_TEXT, "description": "The text in place of old_str."},
        "insert_line": {**_LINE, "description": "insert: the line after which to insert."},
        inserted: {**_TEXT, "description": "insert: the text to insert."},
    }
    if inserted == "new_str":
        properties[inserted]["description"] = "The text to insert, or in place of old_str."
    required = ["command", "path"]
    return {
        "description": "View, create and edit text files.",
        "parameters": {"type": "object", "properties": properties, "required": required},
    }


_NEWER_EDITOR = _editor("view", "create", "str_replace", "insert", inserted="insert_text")
_OLDER_EDITOR = _editor("view", "create", "str_replace", "insert", "undo_edit", inserted="new_str")
_MEMORY = {
    "description": (
        "Keep notes in files under /memories, which later conversations can read. View that "
        "directory before you begin."
    ),
    "parameters": {
        "type": "object",
        "properties": {
            "command": _commands(["view", "create", "str_replace", "insert", "delete", "rename"]),
            "path": {**_TEXT, "description": "The path of a file or a directory."},
            "view_range": _VIEW_RANGE,
            "file_text": {**_TEXT, "description": "create: the text of the file."},
            "old_str": {**_TEXT, "description": "str_replace: the text to replace."},
            "new_str": {**_TEXT, "description": "str_replace: the text in its place."},
            "insert_line": {**_LINE, "description": "insert: the line after which to insert."},
            "insert_text": {**_TEXT, "description": "insert: the text to insert."},
            "old_path": {**_TEXT, "description": "rename: the path now."},
            "new_path": {**_TEXT, "description": "rename: the path after it."},
        },
        "required": ["command"],
    },
}

# (prefix of the tool type, first date of this version, tool name, function), newest version first.
_CLIENT_TOOLS = (
    ("bash_", "", "bash", _BASH),
    ("text_editor_", "20250429", "str_replace_based_edit_tool", _NEWER_EDITOR),
    ("text_editor_", "", "str_replace_editor", _OLDER_EDITOR),
    ("memory_", "", "memory", _MEMORY),
)


def client_tool(kind: str) -> dict[str, Any] | None:
    """Return the function for a tool type such as bash_20250124; None for an unknown tool type."""
    for beginning, since, name, function in _CLIENT_TOOLS:
        date = kind.removeprefix(beginning)
        if kind.startswith(beginning) and date.isdecimal() and date >= since:
            return {"name": name, **function}
    return None
