"""Responses that report the progress of a task, as lines of JSON or as one final body."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec
from fastapi import Response

from cpuserve.api.ollama.common import to_json
from cpuserve.api.ollama.errors import ollama_error
from cpuserve.api.response.stream import EventStream, JsonResult, StreamFormat

if TYPE_CHECKING:
    from cpuserve.api.request.context import RequestContext


class OllamaProgress(msgspec.Struct, omit_defaults=True):
    """One step of a task. total, completed: the size of a download and its progress in bytes."""

    status: str
    digest: str = ""
    total: int = 0
    completed: int = 0


DONE = OllamaProgress("success")
Steps = AsyncGenerator[OllamaProgress, None]


def progress_response(request: RequestContext, steps: Steps, *, stream: bool) -> Response:
    """Return a stream with a line for each step; without `stream`, a body with the last step."""
    if not stream:

        async def last() -> bytes:
            async with aclosing(steps) as taken:
                found = [step async for step in taken]
            return to_json(found[-1] if found else DONE)

        return JsonResult(last)

    async def lines() -> AsyncGenerator[bytes, None]:
        async with aclosing(steps) as taken:
            async for step in taken:
                yield to_json(step) + b"\n"

    def failed(error: BaseException) -> bytes:
        return ollama_error(error) + b"\n"

    ping = to_json(OllamaProgress("working")) + b"\n"
    form = StreamFormat(b"application/x-ndjson", ping)
    return EventStream(lines(), request.state.limits.silent_s, form, failed)
