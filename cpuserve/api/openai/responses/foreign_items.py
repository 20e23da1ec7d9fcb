"""Read input items of types that other servers write.

A conversation may begin on another server and continue here, so the model must see these items.
"""

from __future__ import annotations

from typing import Any

from cpuserve.api.openai.responses.tools import SEARCH, flat_name
from cpuserve.api.request.content_parts import elsewhere, plain

# Types of tool calls that clients run, except function calls; and the member with the arguments.
CLIENT_CALLS = {
    "custom_tool_call": "input",
    "local_shell_call": "action",
    "shell_call": "action",
    "apply_patch_call": "operation",
    "computer_call": "action",
    "tool_search_call": "arguments",
}
# The type of the item with the output, for each type of tool call that clients run.
OUTPUT_OF = {kind: f"{kind}_output" for kind in ("function_call", *CLIENT_CALLS)} | {
    "tool_search_call": "tool_search_output"
}
OUTPUTS = frozenset(OUTPUT_OF.values())
# Types of items for actions that the other server took during the model's turn.
_DONE_ELSEWHERE = frozenset(
    (
        "web_search_call",
        "file_search_call",
        "code_interpreter_call",
        "image_generation_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "program",
        "program_output",
    )
)
# Types of items with a summary of earlier items.
COMPACTED = frozenset(("compaction", "compaction_summary", "context_compaction"))
# Types of items about the other server itself. The prompt has no text for these items,
# because a model cannot use them.
_SILENT = frozenset(("compaction_trigger", "configuration_update", "ghost_snapshot"))
KINDS = _DONE_ELSEWHERE | COMPACTED | _SILENT
_UNREADABLE = (
    "[An earlier part of this conversation was compacted by another server. It is encrypted, so "
    "you cannot read it.]"
)


def line_of(item: dict[str, Any]) -> str:
    """Return the text that the prompt has for an item of a type in KINDS; "" = no text."""
    kind = item["type"]
    if kind in _SILENT:
        return ""
    if kind in COMPACTED:
        summary = item.get("summary")
        return summary if isinstance(summary, str) and summary else _UNREADABLE
    return elsewhere(kind, item)


def full_name(item: dict[str, Any]) -> object:
    """Return the tool name of a call as the model sees it, with its namespace (see flat_name)."""
    namespace, name = item.get("namespace"), item.get("name")
    if isinstance(namespace, str) and isinstance(name, str):
        return flat_name(namespace, name)
    return name


def name_and_arguments(item: dict[str, Any]) -> tuple[object, object]:
    """Return the name and the arguments of a call in CLIENT_CALLS, as of a function call."""
    kind = item["type"]
    given = item.get(CLIENT_CALLS[kind])
    if kind == "custom_tool_call":
        return full_name(item), {"input": given}
    if kind == "tool_search_call":
        return SEARCH, given
    arguments = given if isinstance(given, dict) else {"actions": item.get("actions")}
    return kind.removesuffix("_call"), arguments


def thoughts_of(item: dict[str, Any]) -> str:
    """Return the text or the summary of a reasoning item; "" if only OpenAI can decrypt it."""
    for member in ("content", "summary"):
        parts = item.get(member)
        given = parts if isinstance(parts, list) else []
        texts = [plain(part.get("text")) for part in given if isinstance(part, dict)]
        if found := "\n".join(filter(None, texts)):
            return found
    return ""
