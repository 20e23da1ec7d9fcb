"""The messages of a conversation, and the parts of their contents.

Each dialect makes these messages from its own (`conversation.py` of its package).
Parts that a model cannot read are replaced or refused in `serving/prompts/chat_prompt.py`,
and `arranged` of `chat.py` writes contents as the template accepts them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NoReturn, TypeAlias
from urllib.parse import unquote, unquote_to_bytes

from cpuserve.base.errors import InvalidRequest

Kind = Literal["image", "audio", "video", "file", "other"]

# A message in the format of chat completions. `content` is a text, a list of content parts,
# or None (a turn with calls only). Earlier thoughts of an assistant are in `reasoning_content`
# in every dialect. Other members stay as the client sent them, because templates may read them.
ConversationMessage: TypeAlias = dict[str, Any]

# The most escapes in the data of a URL: decoding one takes 0.2 us, and more memory than base64.
_MOST_ESCAPES = 1 << 18
_BASE64_PART = 1 << 20  # characters that are decoded at a time: 2 ms
_NO_DATA = "has no data: send it in base64, or as a data: URL"


@dataclass(frozen=True, slots=True)
class MediaBytes:
    """The decoded bytes of a part, and their SHA-256, which identifies them in caches."""

    data: bytes
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaPart:
    """A part of a message that is not text. Its bytes are decoded only when `read` is called.

    type: the type of the part in the request, such as "input_image".
    noun: the kind of the part in words, such as "an image".
    where: the path of the part in the request's body.
    data: the content of the part, in base64.
    url: a data: URL with the bytes, or another URL, which `media/sources.py` fetches if it may.
    file_id: the id of a file that the caller has stored, until its bytes are in `content`.
    content: the bytes, instead of `data` and `url`.
    media_type: the MIME type, such as "image/png"; "" = unknown.
    detail: the resolution that the client asks for.
    name: the name of the file, or the title.
    hint: how a client can send the content as text.
    why: the reason why no model can read the part, because it is invalid.
    """

    kind: Kind
    type: str
    noun: str
    where: str
    data: str = ""
    url: str = ""
    file_id: str = ""
    content: bytes = b""
    media_type: str = ""
    detail: str | None = None
    name: str = ""
    hint: str = ""
    why: str = ""

    def read(self, most_bytes: int) -> MediaBytes:
        """Return the decoded bytes.

        Raises:
          InvalidRequest: the part has no bytes or more than `most_bytes`, or its base64 is invalid.
        """
        if self.content:
            if len(self.content) > most_bytes:
                self._refuse_size(len(self.content), most_bytes)
            return MediaBytes(self.content, hashlib.sha256(self.content).digest())
        text, is_base64 = self.data, True
        if is_data_url(self.url):
            head, _, text = self.url.partition(",")
            is_base64 = head[-len(";base64") :].lower() == ";base64"
            if (escapes := text.count("%")) > _MOST_ESCAPES:
                self._refuse(f"has {escapes} percent escapes: send it in base64")
            if is_base64 and escapes:
                text = unquote(text)
        # 4 characters of base64 have 3 bytes, so a text that is too long need not be decoded.
        if is_base64 and len(text) // 4 * 3 > most_bytes + 3:
            self._refuse(f"has more than {most_bytes} bytes: send a smaller one")
        try:
            data = _from_base64(text) if is_base64 else unquote_to_bytes(text)
        except ValueError:
            self._refuse("is not valid base64: encode its bytes again")
        if not data:
            self._refuse(_NO_DATA)
        if len(data) > most_bytes:
            self._refuse_size(len(data), most_bytes)
        return MediaBytes(data, hashlib.sha256(data).digest())

    def _refuse_size(self, size: int, most: int) -> NoReturn:
        self._refuse(f"has {size} bytes: at most {most} are accepted")

    def _refuse(self, why: str) -> NoReturn:
        msg = f"{self.where} {why}"
        raise InvalidRequest(msg, role="messages")


# A part of a message's content: a text (str), or a part that is not text.
ContentPart: TypeAlias = str | MediaPart
Content: TypeAlias = str | list[ContentPart]


def is_data_url(url: str) -> bool:
    """Return whether a URL has its data in itself."""
    return url[:5].lower() == "data:"


def _from_base64(text: str) -> bytes:
    """Return the bytes of base64, which some clients break into lines. Raises ValueError.

    A call of the library for 32 MB would keep all threads waiting for 0.1 s.
    """
    text = "".join(text.split())
    begins = range(0, len(text), _BASE64_PART)
    parts = [base64.b64decode(text[at : at + _BASE64_PART], validate=True) for at in begins]
    if any(len(part) < _BASE64_PART // 4 * 3 for part in parts[:-1]):
        msg = "padding in the middle"
        raise ValueError(msg)
    return b"".join(parts)


def join_texts(parts: Sequence[ContentPart], gap: str = "\n") -> Content:
    """Return parts with `gap` between neighbouring texts, as one text if there is nothing else."""
    found: list[ContentPart] = []
    for is_text, group in groupby(parts, key=lambda part: isinstance(part, str)):
        given = list(group)
        found += [gap.join(map(str, given))] if is_text else given
    if all(isinstance(part, str) for part in found):
        return "".join(map(str, found))  # `found` has one text, or is empty
    return found


def text_of(content: Content, reads: Collection[str] = ()) -> str:
    """Return a content as text, with a line in the place of each part that is not text."""
    if isinstance(content, str):
        return content
    return "\n".join(p if isinstance(p, str) else left_out(p, reads) for p in content)


def left_out(part: MediaPart, reads: Collection[str]) -> str:
    """Return a line for the model: `part` is missing. reads: kinds of parts that it can read."""
    noun = part.noun
    return f"[{noun[:1].upper()}{noun[1:]} was left out: you can read {readable_kinds(reads)}.]"


def readable_kinds(reads: Collection[str]) -> str:
    """Return a text about the kinds of parts that a model reads, as "text and images only"."""
    plurals = {"image": "images", "audio": "sound", "video": "videos", "file": "files"}
    kinds = ["text", *(plural for kind, plural in plurals.items() if kind in reads)]
    *most, last = kinds
    return f"{', '.join(most)} and {last} only" if most else "text only"
