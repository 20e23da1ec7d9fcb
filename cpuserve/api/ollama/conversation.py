"""Convert Ollama messages to the messages that chat templates read."""

from __future__ import annotations

from typing import Any

from cpuserve.api.openai.chat import conversation
from cpuserve.api.request.content_parts import media_part, plain
from cpuserve.tokenizer.conversation import ConversationMessage

_IMAGE_PLACE = "[img]"


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
        known["content"] = with_images(message.get("content"), listed, f"{where}.images")
    return known


def with_images(content: Any, images: list[Any], where: str) -> list[Any]:
    """Return the parts of a message with a text and images in base64. where: their field.

    Each `[img]` in the text is the place of the next image. Images without a place come first.

    Source: chatPrompt of Ollama.
    """
    pictures = [media_part("image", f"{where}[{i}]", data=data) for i, data in enumerate(images)]
    first, *texts = plain(content).split(_IMAGE_PLACE, len(pictures))
    parts: list[Any] = [*pictures[len(texts) :], {"type": "text", "text": first}]
    for image, text in zip(pictures, texts, strict=False):
        parts += [image, {"type": "text", "text": text}]
    return [part for part in parts if not isinstance(part, dict) or part["text"]]
