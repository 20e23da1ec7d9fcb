"""Changes of the offered tools within a conversation: tool_addition and tool_removal blocks.

The prompt has the definition of an added tool at the place of the block, as for tools
that a search found (tool_references.py). So the prompt before the block stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ADDITION, REMOVAL = "tool_addition", "tool_removal"


@dataclass(slots=True)
class ToolChanges:
    """All changes of the tools in a conversation.

    added: the name of each tool that a block adds by name; `tools` of the request defines it.
    defined: tools that blocks add with their definitions, by name.
    removed: the name of each tool that a block removes and no later block adds again.
    """

    added: set[str] = field(default_factory=set)
    defined: dict[str, dict[str, Any]] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)


def changes_of(messages: list[dict[str, Any]]) -> ToolChanges:
    """Return the tool changes in the system messages; invalid blocks change nothing."""
    found = ToolChanges()
    for block in _blocks(messages):
        name = changed_name(block)
        if name is None:
            continue
        if block["type"] == REMOVAL:
            found.removed.add(name)
            continue
        found.removed.discard(name)
        definition = block["tool"].get("definition")
        if isinstance(definition, dict):
            found.defined[name] = definition
        else:
            found.added.add(name)
    return found


def changed_name(block: dict[str, Any]) -> str | None:
    """Return the name of the tool that a block changes; None for a whole MCP server."""
    tool = block.get("tool")
    if not isinstance(tool, dict):
        return None
    definition = tool.get("definition")
    given = definition if isinstance(definition, dict) else tool
    name = given.get("name")
    return name if isinstance(name, str) else None


def is_change(block: dict[str, Any]) -> bool:
    """Return whether a block changes the tools."""
    return block.get("type") in (ADDITION, REMOVAL)


def _blocks(messages: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for message in messages:
        content = message.get("content")
        if message.get("role") == "system" and isinstance(content, list):
            yield from (b for b in content if isinstance(b, dict) and is_change(b))
