"""The first steps of every POST endpoint: check the server's state, read and decode the body."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec

from cpuserve.api.body import (
    FREE_BYTES,
    check_media_type,
    decode_request,
    read_body,
)
from cpuserve.api.freed import give_back_soon
from cpuserve.api.openai.chunks import ChunkFormat
from cpuserve.api.openai.protocol import MAX_PROMPTS
from cpuserve.api.uploads import Reservation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from fastapi import Request

    from cpuserve.api.openai.protocol import StreamOptions
    from cpuserve.api.serving import Serving

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(slots=True)
class Call:
    """One request whose body has been read; `id` starts with the endpoint's prefix."""

    serving: Serving
    body_bytes: int
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk_format(
        self, object_name: str, model: str, options: StreamOptions | None
    ) -> ChunkFormat:
        """Return the encoder for the chunks of this request's stream."""
        return ChunkFormat(
            request_id=self.id,
            object_name=object_name,
            created=self.created,
            model=model,
            fingerprint=self.serving.fingerprint,
            with_usage=bool(options and options.include_usage),
        )


def get_serving(request: Request) -> Serving:
    """The Serving of the app."""
    serving: Serving = request.app.state.serving
    return serving


@asynccontextmanager
async def read_call(
    request: Request, prefix: str, kind: type[T]
) -> AsyncGenerator[tuple[Call, T], None]:
    """Yield the request and its decoded body, whose bytes stay reserved until the block ends.

    Raises:
      ServiceUnavailable: the server cannot answer requests now.
      InvalidRequest: the body is not a valid `kind`.
      RequestError: the body has another media type, is too large or too late; see read_body.
    """
    serving = get_serving(request)
    serving.check_available()
    check_media_type(request)
    most = {"messages": serving.most_message_objects, "prompt": MAX_PROMPTS + 1}
    size = None
    with Reservation(serving.bodies) as held:
        try:
            body = await read_body(request, serving.http, held)
            size = len(body)
            if size <= FREE_BYTES:
                asked = decode_request(body, kind)
            else:
                asked = await asyncio.to_thread(decode_request, body, kind, most)
            body.clear()
            yield Call(serving, size, f"{prefix}-{request_id(request)}"), asked
        finally:
            if size is None or size > FREE_BYTES:
                give_back_soon()


def request_id(request: Request) -> str:
    """Return the request's id, which middleware.py sets, or a new one."""
    known = request.scope.get("cpuserve.request_id")
    return known if isinstance(known, str) else uuid.uuid4().hex
