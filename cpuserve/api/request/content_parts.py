"""Make content parts for images and files, and texts in place of unreadable parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from cpuserve.base.errors import InvalidRequest
from cpuserve.tokenizer.conversation import (
    ContentPart,
    ConversationMessage,
    Kind,
    MediaPart,
    is_data_url,
    join_texts,
    left_out,
)

# For each part type: its kind, and a noun for it in error messages and in texts for the model.
_KINDS: dict[str, tuple[Kind, str]] = {
    "image": ("image", "an image"),
    "image_url": ("image", "an image"),
    "input_image": ("image", "an image"),
    "computer_screenshot": ("image", "a screenshot"),
    "audio": ("audio", "a sound"),
    "audio_url": ("audio", "a sound"),
    "input_audio": ("audio", "a sound"),
    "video": ("video", "a video"),
    "video_url": ("video", "a video"),
    "document": ("file", "a document"),
    "file": ("file", "a file"),
    "input_file": ("file", "a file"),
    "container_upload": ("file", "a file"),
}
_PDF = "application/pdf"
# Media types of text files, besides those that begin with "text/".
_TEXT_TYPES = frozenset(
    f"application/{name}" for name in ("json", "xml", "yaml", "x-yaml", "javascript", "toml")
)
# The maximum size in bytes of a file that becomes text in the prompt: more than a context holds.
_MAX_TEXT_BYTES = 1 << 24
# The media type of a data: URL is searched only in this many characters.
_MAX_HEAD = 256
_MAX_NAME = 200

# Members of an item that carry no information for the model.
_OPAQUE = frozenset(
    ("type", "id", "call_id", "tool_use_id", "status", "caller", "cache_control", "citations")
)
_LONGEST_WORD = 1000
_SPACE = re.compile(r"\s")


def media_part(type_: str, where: str, **given: Any) -> MediaPart:
    """Return a MediaPart of the type `type_` at the path `where` of the request.

    given: other members of MediaPart, as the client sent them. Values that are not strings are left
    out without an error, because parts of earlier turns are never refused.
    """
    kind = _kind_of(type_)[0]
    texts: dict[str, Any] = {n: value for n, value in given.items() if isinstance(value, str)}
    if is_data_url(texts.get("data", "")):
        texts["url"] = texts.pop("data")
    url = texts.get("url", "")
    if is_data_url(url):
        texts["media_type"] = url[5:_MAX_HEAD].partition(",")[0].partition(";")[0]
    noun = _noun_of(type_, texts.get("media_type", ""), texts.get("name", ""))
    return MediaPart(kind=kind, type=type_, noun=noun, where=where, **texts)


def _kind_of(type_: str) -> tuple[Kind, str]:
    return _KINDS.get(type_, ("other", f"a part of the type {type_[:40]}"))


def _noun_of(type_: str, media_type: str, name: str) -> str:
    kind, noun = _kind_of(type_)
    if kind != "file":
        return noun
    if media_type == _PDF:
        noun = "a PDF document"
    return f"{noun} ({name[:_MAX_NAME]})" if name else noun


def with_content(part: MediaPart, content: bytes, media_type: str, name: str) -> ContentPart:
    """Return a part that named a stored file with the bytes of the file; a text file as its text.

    media_type, name: of the stored file; the part may have a name of its own.
    """
    shown = part.name or name
    if part.kind == "file" and not _is_text_type(media_type) and _is_text(content):
        media_type = "text/plain"
    return file_part(
        replace(
            part,
            noun=_noun_of(part.type, media_type, shown),
            file_id="",
            content=content,
            media_type=media_type,
            name=shown,
        )
    )


def _is_text(content: bytes) -> bool:
    """Return whether a file of an unknown type is text: source code has many types, or none."""
    if content.startswith(b"%PDF-") or b"\0" in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _is_text_type(media_type: str) -> bool:
    return media_type.startswith("text/") or media_type in _TEXT_TYPES


def file_part(part: MediaPart) -> ContentPart:
    """Return a text file as its name and its text, and any other part unchanged.

    A text file that cannot be decoded stays a MediaPart; its member `why` has the reason.
    """
    media = part.media_type.lower()
    if part.kind != "file" or not _is_text_type(media) or part.file_id:
        return part
    try:
        text = part.read(_MAX_TEXT_BYTES).data.decode("utf-8-sig")
    except InvalidRequest as error:
        return replace(part, why=error.message.removeprefix(part.where).lstrip())
    except UnicodeDecodeError:
        return replace(part, why="is no text in UTF-8: encode it as UTF-8")
    return f"{part.name}\n{text}" if part.name else text


def plain(value: object) -> str:
    """Return the result of a tool as text; objects and numbers become JSON."""
    if value is None:
        return ""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def elsewhere(kind: str, members: Mapping[str, Any]) -> str:
    """Return a text about an action that another server took in the model's turn, such as a search.

    Members that only the other server can read, such as encrypted results, are left out.
    """
    if kind in _KINDS:
        return left_out(media_part(kind, kind), ())
    try:
        told = msgspec.json.encode(_readable(dict(members))).decode()
    except RecursionError:
        return f"[{kind[:80]}]"
    return f"[{kind[:80]}: {told}]"


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {key: _readable(inner) for key, inner in value.items() if _is_shown(key, inner)}
        return {key: inner for key, inner in kept.items() if inner not in (None, [], {})}
    return [_readable(inner) for inner in value] if isinstance(value, list) else value


def _is_shown(key: str, value: Any) -> bool:
    if key in _OPAQUE or key.startswith("encrypted_"):
        return False
    # A long text without white space is image data or a signature, which the model cannot use.
    return not (isinstance(value, str) and len(value) > _LONGEST_WORD and not _SPACE.search(value))


def joined(messages: list[ConversationMessage]) -> list[ConversationMessage]:
    """Join the texts of each message's content by newlines, and return the messages.

    The dialects that call this (Messages, Responses) send each text block as a separate text.
    """
    for message in messages:
        parts = message["content"]
        # In an assistant turn, texts come before and after the tool calls, and may be empty.
        kept = [part for part in parts if part] if message["role"] == "assistant" else parts
        message["content"] = join_texts(kept)
    return messages
