"""What every POST endpoint does first: is the server up, who asks, what did they send."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cpuserve.entrypoints.openai.body import check_media_type, read_body
from cpuserve.entrypoints.openai.events import ChunkFormat

if TYPE_CHECKING:
    from fastapi import Request

    from cpuserve.entrypoints.openai.protocol import StreamOptions
    from cpuserve.entrypoints.openai.serving import Serving


@dataclass(slots=True)
class Call:
    """One request that has been read; `id` starts with the endpoint's prefix."""

    serving: Serving
    body: bytes
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    def chunk_format(
        self, object_name: str, model: str, options: StreamOptions | None
    ) -> ChunkFormat:
        """How this request's stream frames its chunks."""
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


async def read_call(request: Request, prefix: str) -> Call:
    """Read the body; ServiceUnavailable while the server cannot answer."""
    serving = get_serving(request)
    serving.check_available()
    check_media_type(request)
    limits = serving.http
    body = await read_body(
        request, max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s
    )
    return Call(serving, body, f"{prefix}-{request_id(request)}")


def request_id(request: Request) -> str:
    """The X-Request-Id of this request (middleware.py), or a new one."""
    known = request.scope.get("cpuserve.request_id")
    return known if isinstance(known, str) else uuid.uuid4().hex
