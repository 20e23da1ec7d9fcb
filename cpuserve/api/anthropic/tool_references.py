"""References in earlier messages to tools that a tool search has found.

A tool with defer_loading is not in the prompt at first. When a search finds the tool,
the result of the search has a reference to it. The prompt defines the tool there,
so the earlier prompt and its tokens in the prefix cache stay the same.
The search is a tool of the client, or this server runs it (serving/calls/tool_catalog.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from cpuserve.api.anthropic.tool_changes import REMOVAL, changed_name, is_change
from cpuserve.serving.calls.tool_catalog import described

# SEARCHES: the prefix of the types of tool searches that a server runs.
# SERVER_CALL: the prefix of the ids of calls to such searches.
SEARCHES, SERVER_CALL = "tool_search_tool_", "srvtoolu_"
_REFERENCE, _RESULT = "tool_reference", "tool_search_tool_result"

Blocks = list[Any]


def referenced(messages: list[dict[str, Any]]) -> set[str]:
    """Return the name of each tool that a result of a tool search refers to."""
    return {
        name
        for message in messages
        for block in _blocks(message.get("content"))
        for name in _names(_parts(block))
    }


def with_definitions(
    messages: list[dict[str, Any]], definitions: Mapping[str, dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """Return the messages with tool definitions as text in place of references to tools.

    A search that a server ran becomes a tool call and its result.

    A tool without a definition no longer exists, for example because its MCP server was removed.
    The text says so, because an error would make the whole conversation unusable.

    definitions: the function of each tool by its name;
      None = the tools of the request already define the function at the start of the prompt.
    """
    found = []
    for message in messages:
        blocks = list(_blocks(message.get("content")))
        if any(block.get("type") == _RESULT for block in blocks):
            found += _with_calls(message, definitions)
        elif any(is_change(block) or any(_names(_parts(block))) for block in blocks):
            content = [_told(block, definitions) for block in message["content"]]
            found.append({**message, "content": content})
        else:
            found.append(message)
    return found


def _told(block: Any, definitions: Mapping[str, dict[str, Any] | None]) -> Any:
    """Return `block` with text in place of its tool references, or in place of a tool change."""
    if isinstance(block, dict) and is_change(block):
        return {"type": "text", "text": _changed(block, definitions)}
    names = list(_names(_parts(block))) if isinstance(block, dict) else []
    if not names:
        return block
    text = {"type": "text", "text": _shown(names, definitions)}
    if block.get("type") in (_REFERENCE, _RESULT):  # the call of this result is missing
        return text
    rest = [part for part in block["content"] if not _is_reference(part)]
    first = next(i for i, part in enumerate(block["content"]) if _is_reference(part))
    return {**block, "content": [*rest[:first], text, *rest[first:]]}


def _changed(block: dict[str, Any], definitions: Mapping[str, dict[str, Any] | None]) -> str:
    name = changed_name(block)
    if name is None:
        return "[Tools of an MCP server are not available here.]"
    if block["type"] == REMOVAL:
        return f"[The tool {name} is not among your tools any more: do not call it.]"
    return _shown([name], definitions)


def _shown(names: list[str], definitions: Mapping[str, dict[str, Any] | None]) -> str:
    functions = [function for name in names if (function := definitions.get(name)) is not None]
    lines = [] if names and not functions else [described(functions)]
    for name in names:
        if name not in definitions:
            lines.append(f"[The tool {name} is not available any more.]")
        elif definitions[name] is None:
            lines.append(f"[The tool {name} is among your tools.]")
    return "\n".join(lines)


def _with_calls(
    message: dict[str, Any], definitions: Mapping[str, dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """Split an assistant message at the tool searches that a server ran in it.

    After one or more calls of searches in a row, the assistant message ends, and a user message
    with their results follows. Results without their calls stay, and become lines of text.
    """
    found: list[dict[str, Any]] = []
    said: Blocks = []
    results: Blocks = []

    def close() -> None:
        if results:
            found.append({**message, "content": list(said)})
            found.append({"role": "user", "content": list(results)})
            said.clear()
            results.clear()

    blocks = deque(message["content"])
    while blocks:
        block = blocks.popleft()
        answer = blocks[0] if blocks else None
        if _is_search(block, answer):
            number = str(block["id"]).removeprefix(SERVER_CALL)
            use = {"id": number, "name": block["name"], "input": block.get("input")}
            said.append({"type": "tool_use", **use})
            text = _result_text(blocks.popleft()["content"], definitions)
            results.append({"type": "tool_result", "tool_use_id": number, "content": text})
        else:
            close()
            said.append(_told(block, definitions))
    close()
    return [*found, {**message, "content": said}] if said or not found else found


def _is_search(block: Any, answer: Any) -> bool:
    if not (isinstance(block, dict) and isinstance(answer, dict)):
        return False
    is_call = block.get("type") == "server_tool_use" and isinstance(block.get("id"), str)
    named = isinstance(block.get("name"), str) and block["name"].startswith(SEARCHES)
    answered = answer.get("type") == _RESULT and answer.get("tool_use_id") == block.get("id")
    return is_call and named and answered and isinstance(answer.get("content"), dict)


def _result_text(content: dict[str, Any], definitions: Mapping[str, dict[str, Any] | None]) -> str:
    if content.get("type") == "tool_search_tool_result_error":
        why = content.get("error_message") or content.get("error_code")
        return f"The search failed: {why}."
    return _shown(list(_names(_blocks(content.get("tool_references")))), definitions)


def _blocks(content: object) -> Iterator[dict[str, Any]]:
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict):
            yield block


def _parts(block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield `block` if it is a tool reference, or the parts of `block` if it is a tool result."""
    content = block.get("content")
    if block.get("type") == _REFERENCE:
        yield block
    elif block.get("type") == _RESULT:
        yield from _blocks(content.get("tool_references") if isinstance(content, dict) else None)
    elif block.get("type") == "tool_result":
        yield from _blocks(content)


def _names(parts: Iterator[dict[str, Any]]) -> Iterator[str]:
    return (part["tool_name"] for part in parts if _is_reference(part))


def _is_reference(part: Any) -> bool:
    named = isinstance(part, dict) and isinstance(part.get("tool_name"), str)
    return named and part.get("type") == _REFERENCE
