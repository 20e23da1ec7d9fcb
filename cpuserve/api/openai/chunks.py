"""Encode the chunks of streams.

The parts that all chunks of a stream share are encoded once, so that a chunk takes only a few
concatenations and one JSON string. This matters because the front end encodes a chunk per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.openai.usage import usage_body
from cpuserve.api.response.error_json import error_json
from cpuserve.api.response.stream import StreamFormat

if TYPE_CHECKING:
    from cpuserve.api.openai.schema import StreamOptions
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.events import PromptProgress, TokenUsage

to_json = msgspec.json.Encoder().encode


FORM = StreamFormat(done=b"data: [DONE]\n\n")


def error_chunk(error: BaseException) -> bytes:
    """Return `error` as an event of a stream that has already begun."""
    return b"data: " + error_json(error) + b"\n\n"


class ChunkFormat:
    """Encodes choices as chunks of one stream.

    With `with_usage` every chunk has a usage member, which is null unless a usage is given, as in
    the OpenAI API.
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

    @classmethod
    def of(
        cls, received: RequestContext, object_name: str, options: StreamOptions | None
    ) -> ChunkFormat:
        """Return the encoder for the chunks of one request's stream."""
        return cls(
            request_id=received.id,
            object_name=object_name,
            created=received.created,
            model=received.served.name,
            fingerprint=received.context.fingerprint,
            with_usage=bool(options and options.include_usage),
        )

    def chunk(
        self, index: int, members: bytes, usage: TokenUsage | None = None, more: bytes = b""
    ) -> bytes:
        """Return a chunk of one choice.

        `members` are JSON members of the choice and `more` of the chunk, each after a comma.
        """
        shown = self._null_usage if usage is None else b',"usage":' + to_json(usage_body(usage))
        return b"%b%d%b}]%b%b}\n\n" % (self._open, index, members, shown, more)

    def usage_chunk(self, usage: TokenUsage) -> bytes:
        """Return the last chunk, with the usage and no choices; b"" without `with_usage`."""
        if not self._null_usage:
            return b""
        return self._head + b',"choices":[],"usage":' + to_json(usage_body(usage)) + b"}\n\n"


def progress_member(event: PromptProgress) -> bytes:
    """Return the prompt's progress as a JSON member of a chunk, as llama-server sends it."""
    report = {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": event.elapsed_ms,
    }
    return b',"prompt_progress":' + to_json(report)
