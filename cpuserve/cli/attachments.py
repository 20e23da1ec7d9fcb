"""Pictures and documents that `run` and `chat` send with a message."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpuserve.base.errors import ConfigError
from cpuserve.config.values import format_bytes

# A file becomes a base64 text, which is in memory several times.
MOST_BYTES = 64 << 20


def part_of(name: str) -> dict[str, Any]:
    """Return a file as a content part of chat completions.

    Raises:
        ConfigError: the file cannot be read, or has more than MOST_BYTES.
    """
    try:
        path = Path(name).expanduser()
        if not path.is_file():
            msg = f"{name}: there is no such file"
            raise ConfigError(msg)
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except (OSError, ValueError, RuntimeError) as error:  # such as a bad ~user or a null byte
        msg = f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(msg) from None
    if len(content) > MOST_BYTES:
        msg = f"{name} has more than {format_bytes(MOST_BYTES)}: send a smaller copy"
        raise ConfigError(msg)
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    if kind.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": url}}
    return {"type": "file", "file": {"filename": path.name, "file_data": url}}


def content_of(text: str, parts: Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message: the text, after its files if it has any."""
    if not parts:
        return text
    return [*map(dict, parts), {"type": "text", "text": text}]


def converted(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the parts that the pipeline reads, for a model in this process."""
    from cpuserve.api.openai.parts import openai_part

    def convert(part: Mapping[str, Any]) -> Any:
        return dict(part) if part["type"] == "text" else openai_part(part, "messages")

    return [
        {**message, "content": [convert(part) for part in message["content"]]}
        if isinstance(message["content"], list)
        else dict(message)
        for message in messages
    ]
