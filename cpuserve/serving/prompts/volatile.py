"""Move the time of day to the end of a conversation, so that prompts share the text before it.

Some clients (Home Assistant) begin or end the system text with a line about the time:
"Current time is 11:55:05. Today's date is 2026-04-11." Templates write the tools and all messages
after this line. Because the line changes, the prefix cache would find none of these tokens again.
The line therefore becomes a system message before the last message of the user.
"""

from __future__ import annotations

import re
from typing import Any

from cpuserve.tokenizer.conversation import ConversationMessage

_TIME = (
    r"(?i:the )?(?i:current)(?i: date and| local)? (?i:date|time)(?i: is|:)[^\n]{0,40}"
    r"\b\d{1,2}:\d\d\b[^\n]{0,80}"
)
_FIRST = re.compile(rf"({_TIME})\n+")
_LAST = re.compile(rf"\n+({_TIME})\s*$")
# Only this many characters at the beginning and at the end of a text are searched for the line.
_LONGEST = 256


def with_time_last(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """Return the messages with the line about the time before the user's last message."""
    if not messages or not isinstance(messages[0], dict) or messages[0].get("role") != "system":
        return messages
    head = messages[0]
    at = max((i for i, m in enumerate(messages) if _role(m) == "user"), default=0)
    found = _without_time(head.get("content"))
    if not at or found is None:
        return messages
    content, line = found
    moved: ConversationMessage = {"role": "system", "content": line}
    return [{**head, "content": content}, *messages[1:at], moved, *messages[at:]]


def _role(message: Any) -> object:
    return message.get("role") if isinstance(message, dict) else None


def _without_time(content: Any) -> tuple[Any, str] | None:
    """Return (the content without the line, the line), or None if there is no such line."""
    if isinstance(content, str):
        return _split(content)
    if not isinstance(content, list) or not content:
        return None
    for at in (0, -1):
        part = content[at]
        text = part.get("text") if isinstance(part, dict) else part
        found = _split(text) if isinstance(text, str) else None
        if found is not None:
            rest, line = found
            parts = list(content)
            parts[at] = {**part, "text": rest} if isinstance(part, dict) else rest
            return parts, line
    return None


def _split(text: str) -> tuple[str, str] | None:
    if first := _FIRST.match(text[:_LONGEST]):
        return text[first.end() :], first[1]
    begin = max(0, len(text) - _LONGEST)
    if last := _LAST.search(text, begin):
        return text[: last.start()], last[1].rstrip()
    return None
