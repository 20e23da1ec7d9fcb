"""Encode the JSON chunks of streams.

The JSON that all chunks of a stream share is encoded once, so a chunk takes only a few byte
concatenations and one JSON string. This matters because the front end encodes a chunk per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.errors.error_json import error_json
from cpuserve.api.openai.usage import usage_body
from cpuserve.api.response.stream import StreamFormat

if TYPE_CHECKING:
    from cpuserve.api.openai.schema import StreamOptions
    from cpuserve.api.request.context import RequestContext
    from cpuserve.serving.calls.events import PromptProgress, TokenUsage

to_json = msgspec.json.Encoder().encode


FORM = StreamFormat(done=b"data: [DONE]\n\n")


def error_chunk(error: BaseException) -> bytes:
    """Return `error` as an SSE event of a stream that has already begun."""
    return b"data: " + error_json(error) + b"\n\n"


class ChunkFormat:
    """Encodes the chunks of one stream.

    If `with_usage` is set, every chunk has the member `usage`,
    which is null in all chunks without token counts, as in the OpenAI API.
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
        cls, request: RequestContext, object_name: str, options: StreamOptions | None
    ) -> ChunkFormat:
        """Return the encoder for the chunks of one request's stream."""
        return cls(
            request_id=request.id,
            object_name=object_name,
            created=request.created,
            model=request.served.name,
            fingerprint=request.context.fingerprint,
            with_usage=bool(options and options.include_usage),
        )

    def chunk(
        self, index: int, members: bytes, usage: TokenUsage | None = None, more: bytes = b""
    ) -> bytes:
        """Return a chunk with one choice.

        members, more: JSON members of the choice and of the chunk, each with a comma before it.
        """
        shown = self._null_usage if usage is None else b',"usage":' + to_json(usage_body(usage))
        return b"%b%d%b}]%b%b}\n\n" % (self._open, index, members, shown, more)

    def usage_chunk(self, usage: TokenUsage) -> bytes:
        """Return the final chunk, with usage and without choices; b"" if `with_usage` is off."""
        if not self._null_usage:
            return b""
        return self._head + b',"choices":[],"usage":' + to_json(usage_body(usage)) + b"}\n\n"


def progress_member(event: PromptProgress) -> bytes:
    """Return the progress of the prompt as a JSON member of a chunk, in the llama-server format.

    With images it has their tiles, which take much longer than their tokens.
    """
    report = {
        "total": event.total,
        "cache": event.cached,
        "processed": event.processed,
        "time_ms": event.elapsed_ms,
    }
    if event.tiles:
        report |= {"tiles": event.tiles, "tiles_read": event.tiles_read}
    return b',"prompt_progress":' + to_json(report)
