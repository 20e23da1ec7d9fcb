"""The bytes of streamed chunks.

Everything that stays the same over a stream is encoded once; a chunk is then a few
concatenations and one JSON string. Chunks are what the front end makes most of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from cpuserve.entrypoints.openai.protocol import Usage

to_json = msgspec.json.Encoder().encode


class ChunkFormat:
    """Frames choices as chunks of one stream.

    With `with_usage` every chunk has a usage member, null unless one is given: that is how
    OpenAI announces the usage chunk to come.
    """

    def __init__(
        self,
        *,
        request_id: str,
        object_name: str,
        created: int,
        model: str,
        fingerprint: str,
        with_usage: bool,
    ) -> None:
        fixed = {
            "id": request_id,
            "object": object_name,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint,
        }
        self._head = b"data: " + to_json(fixed)[:-1]
        self._open = self._head + b',"choices":[{"index":'
        self._null_usage = b',"usage":null' if with_usage else b""

    def chunk(
        self, index: int, members: bytes, usage: Usage | None = None, more: bytes = b""
    ) -> bytes:
        """One choice; `members` and `more` are JSON members, each led by a comma."""
        shown = self._null_usage if usage is None else b',"usage":' + to_json(usage)
        return b"%b%d%b}]%b%b}\n\n" % (self._open, index, members, shown, more)

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk: no choices, the usage of the request."""
        return self._head + b',"choices":[],"usage":' + to_json(usage) + b"}\n\n"
