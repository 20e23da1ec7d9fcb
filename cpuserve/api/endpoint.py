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
from cpuserve.api.errors import REQUEST_ID
from cpuserve.api.freed import give_back_soon
from cpuserve.api.json_objects import MAX_OBJECTS
from cpuserve.api.request_log import RECORD
from cpuserve.api.state import get_state
from cpuserve.api.uploads import Reservation
from cpuserve.serving.call import MAX_PROMPTS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from fastapi import Request

    from cpuserve.api.request_log import RequestRecord
    from cpuserve.serving.context import ModelContext
    from cpuserve.serving.registry import ModelRegistry

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(slots=True)
class Received:
    """One request whose body has been read; `id` is its request_id behind the endpoint's prefix.

    context: the model that answers, after `choose`. record: what the log will say of it.
    """

    models: ModelRegistry
    context: ModelContext
    body_bytes: int
    request_id: str
    id: str
    record: RequestRecord | None = None
    created: int = field(default_factory=lambda: int(time.time()))

    async def choose(self, model: str | None) -> str:
        """Make `context` the model that the request names, and return its name.

        Raises:
          NotFound, ServiceUnavailable: see ModelRegistry.find.
        """
        if self.record is not None:
            self.record.model = model
        self.context, name = await self.models.find(model)
        return name


@asynccontextmanager
async def read_call(
    request: Request, prefix: str, kind: type[T], *, conversation: str = "messages"
) -> AsyncGenerator[tuple[Received, T], None]:
    """Yield the request and its decoded body, whose bytes stay reserved until the block ends.

    conversation: the field that may have as many objects as the context has tokens, and more.

    Raises:
      ServiceUnavailable: the server cannot answer requests now.
      InvalidRequest: the body is not a valid `kind`.
      RequestError: the body has another media type, is too large or too late; see read_body.
    """
    state = get_state(request)
    state.check_available()
    check_media_type(request)
    most = {conversation: _most_objects(state.context.max_model_len), "prompt": MAX_PROMPTS + 1}
    size = None
    with Reservation(state.bodies) as held:
        try:
            body = await read_body(request, state.limits, held)
            size = len(body)
            if size <= FREE_BYTES:
                asked = decode_request(body, kind)
            else:
                asked = await asyncio.to_thread(decode_request, body, kind, most)
            body.clear()
            number = request_id(request)
            known = number, prefix + number, request.scope.get(RECORD)
            yield Received(state.models, state.context, size, *known), asked
        finally:
            if size is None or size > FREE_BYTES:
                give_back_soon()


def _most_objects(max_model_len: int) -> int:
    """Return the most JSON lists, objects and strings in a conversation.

    A message has 5 of them, and takes at least one token of the context.
    """
    return MAX_OBJECTS + 4 * max_model_len


def request_id(request: Request) -> str:
    """Return the request's id, which middleware.py sets, or a new one."""
    known = request.scope.get(REQUEST_ID)
    return known if isinstance(known, str) else uuid.uuid4().hex
