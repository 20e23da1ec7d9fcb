"""Describe tools in the system message, for templates that do not show tools to the model.

A template may still write calls in its own way; then the description has an example of it.
Otherwise a call is a JSON object between two tags, and earlier calls and results become texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from cpuserve.tokenizer.conversation import Content, ConversationMessage, MediaPart, text_of
from cpuserve.tokenizer.traits import Traits

CALL_TAG = "<tool_call>"
CALL_GAP = "\n"  # between a text and the calls after it
# Matches a template that instructs the model to write calls in the format of this file.
ASKS_FOR_CALLS = re.compile(CALL_TAG + r"""(?:\s|\\n)*\{+\s*\\?["']?(?:name|arguments)\b""")
_NAME, _ARGUMENTS = "name_of_function", {"name_of_argument": "value"}
_CALL = {
    "id": "call00000",  # nine characters, as templates of Mistral require
    "type": "function",
    "function": {"name": _NAME, "arguments": _ARGUMENTS},
}
_TEXT = "c2f1text"
_BEFORE, _BEHIND = "<tool_response>\n", "\n</tool_response>"
_DESCRIPTION = """You can call the functions between <tools> and </tools>, which are given in JSON:
<tools>
TOOLS
</tools>

To call a function, write nothing but the call, with the function's name and its arguments:
EXAMPLE

You will get its result in the next message. If you need no function, answer as usual."""


# Returns the text of calls. A call is (name of the function, arguments).
WriteCalls = Callable[[Sequence[tuple[str, Any]]], str]


def usual_calls(calls: Sequence[tuple[str, Any]]) -> str:
    """Return calls as JSON objects between two tags."""
    texts = (json.dumps({"name": n, "arguments": a}, ensure_ascii=False) for n, a in calls)
    return "\n".join(f"{CALL_TAG}\n{text}\n</tool_call>" for text in texts)


def described(
    messages: list[ConversationMessage],
    tools: list[ConversationMessage] | None,
    traits: Traits,
    example: str,
    write: WriteCalls = usual_calls,
) -> list[ConversationMessage]:
    """Return checked messages with the tools as a part of the system message.

    example: a call as the model should write it.
    write: returns the texts that calls of earlier turns become.
    Without tools, only these calls and their results are changed.
    """
    written = [_as_texts(message, traits, write) for message in messages]
    if not tools:
        return written
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _DESCRIPTION.replace("EXAMPLE", example).replace("TOOLS", lines)
    first = written[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *written]
    content = first["content"]
    said: Content = [*content, text] if isinstance(content, list) else f"{content}\n\n{text}"
    return [{**first, "content": said}, *written[1:]]


def example_of(
    render: Callable[[list[ConversationMessage]], str],
    traits: Traits,
    write: WriteCalls = usual_calls,
) -> str:
    """Return an example call as the template writes it, or else as `write` does.

    Raises the errors of `render`.
    """
    if not traits.calls:
        return write([(_NAME, _ARGUMENTS)])
    asked = {"role": "user", "content": "a"}
    called = render([asked, {"role": "assistant", "content": "", "tool_calls": [_CALL]}])
    said = render([asked, {"role": "assistant", "content": _TEXT}])
    before, _, behind = said.rpartition(_TEXT)
    begin = len(before) if called.startswith(before) else called.find(_NAME)
    return called[begin:].removesuffix(behind).strip()


def _as_texts(
    message: ConversationMessage, traits: Traits, write: WriteCalls
) -> ConversationMessage:
    """Return a message with its calls, or a tool's result, as text if the template needs that."""
    calls = message.get("tool_calls")
    if calls and not traits.calls:
        functions = [call["function"] for call in calls]
        text = write([(function["name"], function["arguments"]) for function in functions])
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        said = text_of(message["content"])
        return {**rest, "content": CALL_GAP.join([*([said] if said else []), text])}
    if message["role"] != "tool" or "tool" in traits.texts | traits.parts:
        return message
    content = message["content"]
    pictures = [part for part in content if isinstance(part, MediaPart)]
    if not pictures or "user" not in traits.parts:
        return {"role": "user", "content": f"{_BEFORE}{text_of(content)}{_BEHIND}"}
    result = text_of([part for part in content if isinstance(part, str)])
    return {"role": "user", "content": [f"{_BEFORE}{result}", *pictures, _BEHIND]}
