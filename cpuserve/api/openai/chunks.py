"""Encode the chunks of streams.

The parts that all chunks of a stream share are encoded once, so that a chunk takes only a few
concatenations and one JSON string. This matters because the front end encodes a chunk per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from cpuserve.api.openai.protocol import Usage

to_json = msgspec.json.Encoder().encode


class ChunkFormat:
    """Encodes choices as chunks of one stream.

    With `with_usage` every chunk has a usage member, which is null unless a usage is given, as in
    OpenAI's API.
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
        """Return a chunk of one choice.

        `members` are JSON members of the choice and `more` of the chunk, each after a comma.
        """
        shown = self._null_usage if usage is None else b',"usage":' + to_json(usage)
        return b"%b%d%b}]%b%b}\n\n" % (self._open, index, members, shown, more)

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the last chunk, with the usage of the request and no choices."""
        return self._head + b',"choices":[],"usage":' + to_json(usage) + b"}\n\n"
