"""Convert Ollama messages to the messages that chat templates read."""

from __future__ import annotations

from typing import Any

from cpuserve.api.openai.chat import conversation
from cpuserve.api.request.content_parts import media_part, plain
from cpuserve.tokenizer.conversation import ConversationMessage


def chat_messages(messages: list[dict[str, Any]]) -> list[ConversationMessage]:
    """Return messages for templates; only `images` and `tool_name` differ from the OpenAI API."""
    return conversation.chat_messages(
        [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    )


def _message(message: dict[str, Any], where: str) -> ConversationMessage:
    """Return an Ollama message in the format of chat completions."""
    known = {key: value for key, value in message.items() if key != "images"}
    if "tool_name" in message:
        known = {"name": message["tool_name"], **known}
    if images := message.get("images"):
        listed = images if isinstance(images, list) else [images]
        text = {"type": "text", "text": plain(message.get("content"))}
        known["content"] = [
            text,
            *(media_part("image", f"{where}.images[{i}]", data=d) for i, d in enumerate(listed)),
        ]
    return known
