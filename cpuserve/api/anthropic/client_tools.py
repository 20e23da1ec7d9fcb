"""Definitions of the tools that Anthropic specifies and clients run: bash, text editor, memory.

A request has only the type of such a tool, so its parameters are defined here.
The definitions follow the Anthropic documentation of these tools.
"""

from __future__ import annotations

from typing import Any

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
_DEFINED = (
    ("bash_", "", "bash", _BASH),
    ("text_editor_", "20250429", "str_replace_based_edit_tool", _NEWER_EDITOR),
    ("text_editor_", "", "str_replace_editor", _OLDER_EDITOR),
    ("memory_", "", "memory", _MEMORY),
)


def client_tool(kind: str) -> dict[str, Any] | None:
    """Return the function for a tool type such as bash_20250124; None for an unknown tool type."""
    for beginning, since, name, function in _DEFINED:
        date = kind.removeprefix(beginning)
        if kind.startswith(beginning) and date.isdecimal() and date >= since:
            return {"name": name, **function}
    return None
