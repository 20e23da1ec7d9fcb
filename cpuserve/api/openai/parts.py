"""Convert content parts of OpenAI requests that are not text, such as images and files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cpuserve.api.request.content_parts import file_part, media_part
from cpuserve.tokenizer.conversation import ContentPart

# For part types that differ from their data member: the name of the member with the data.
_MEMBERS = {
    "input_image": "image_url",
    "computer_screenshot": "image_url",
    "input_file": "file",
}


# vLLM may have the data of an earlier request under this uuid.
_BY_UUID = "has a uuid and no data: this server keeps no data by a uuid, so send the data again"


def openai_part(part: Mapping[str, Any], where: str) -> ContentPart:
    """Return a part that is not text; for a text file, return its name and its text as a str.

    part: its type is a str. In chat completions, its members are in a nested object, such as
    {"type": "file", "file": {"file_data": ...}}; in responses, they are in the part itself.
    """
    kind = part["type"]
    inner = part.get(_MEMBERS.get(kind, kind))
    given = {**part, **inner} if isinstance(inner, Mapping) else {**part, "url": inner}
    audio = given.get("format")
    data, url = _first(given, "data", "file_data"), _first(given, "url", "file_url")
    unsent = data is None and url is None and part.get("uuid") is not None
    return file_part(
        media_part(
            kind,
            where,
            data=data,
            url=url,
            why=_BY_UUID if unsent else None,
            file_id=given.get("file_id"),
            media_type=f"audio/{audio}" if isinstance(audio, str) else None,
            detail=given.get("detail"),
            name=given.get("filename"),
        )
    )


def _first(given: Mapping[str, Any], *names: str) -> Any:
    return next((given[name] for name in names if given.get(name) is not None), None)
