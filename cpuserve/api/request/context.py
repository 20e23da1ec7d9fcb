"""The first steps of every POST endpoint: check the server's state, read and decode the body."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from cpuserve.api.middleware.leases import LEASES
from cpuserve.api.request.body import (
    FREE_BYTES,
    check_media_type,
    check_size,
    decode_request,
    read_body,
)
from cpuserve.api.request.body_budget import Reservation
from cpuserve.api.request.headers import CALLER, LOW_PRIORITY
from cpuserve.api.request.log import RECORD
from cpuserve.api.request.memory_trim import trim_soon
from cpuserve.api.request.object_limits import MAX_OBJECTS
from cpuserve.api.response.errors import REQUEST_ID
from cpuserve.api.state import get_state
from cpuserve.errors import ServiceUnavailable
from cpuserve.serving.call import MAX_PROMPTS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from fastapi import Request

    from cpuserve.api.request.log import RequestRecord
    from cpuserve.api.state import ServerState
    from cpuserve.serving.context import ModelContext
    from cpuserve.serving.registry import Lease, ModelRegistry, Served

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(slots=True)
class RequestContext:
    """One request with its body read; `id` is the endpoint's prefix followed by the request_id.

    state: the state of the server.
    path: the parameters in the path of the request.
    low_priority: whether the request runs after all others, if the scheduler heeds priorities.
    caller: the API key ("key-1") or the address of the client.
    body_bytes: the size of the body; 0 until it has been read.
    record: the line of the log for the request.
    created, begun: when the request came, in seconds of time.time() and of time.monotonic().
    """

    state: ServerState
    leases: list[Lease]
    request_id: str
    id: str
    caller: str = ""
    body_bytes: int = 0
    record: RequestRecord | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    begun: float = field(default_factory=time.monotonic)
    path: Mapping[str, str] = field(default_factory=dict)
    low_priority: bool = False
    _served: Served | None = None

    @property
    def models(self) -> ModelRegistry:
        """The served models."""
        return self.state.models

    async def choose(self, model: str | None) -> str:
        """Find the model that the request asks for, set `served`, and return the name.

        The model stays loaded until the response has been sent.

        Raises:
          NotFound, ServiceUnavailable: see ModelRegistry.find.
        """
        self.note_model(model)
        if self._served is None:
            self._served = await self.models.find(model)
            self.leases.append(self._served.lease)
            if (reason := self._served.context.unavailable()) is not None:
                raise ServiceUnavailable(reason)
        return self._served.name

    def keep_loaded(self, seconds: float | None) -> None:
        """Set how long the model stays loaded after the request; None = as the server chooses."""
        if seconds is not None:
            self.served.lease.keep(seconds)

    def note_model(self, model: str | None) -> None:
        """Note the name of the model for the log."""
        if self.record is not None:
            self.record.model = model

    @property
    def served(self) -> Served:
        """The model that the request asks for, after `choose`."""
        assert self._served is not None
        return self._served

    @property
    def context(self) -> ModelContext:
        """The model of the request, after `choose`."""
        return self.served.context


class Named(Protocol):
    """A decoded body with an optional model name."""

    @property
    def model(self) -> str | None:
        """The name of the model; None = the first model."""


class _ModelName(msgspec.Struct):
    """The field `model` of a large body, which is decoded first: the model sets the size limits."""

    model: str | None = None


@dataclass(frozen=True, slots=True)
class BodyForm(Generic[T]):
    """How the body of a request is decoded.

    prefix: the start of the id in the response.
    schema: the type of the decoded body.
    conversation: the field with the messages; _most_objects returns how many JSON lists, objects
      and strings it may have.
    """

    prefix: str
    schema: type[T]
    conversation: str = "messages"


@asynccontextmanager
async def read_call(
    request: Request, form_of: Callable[[bytearray], BodyForm[T]]
) -> AsyncGenerator[tuple[RequestContext, T], None]:
    """Yield the request and its decoded body; its bytes stay reserved until the block ends.

    form_of: returns how a body is decoded, or raises InvalidRequest.

    Raises:
      ServiceUnavailable: the server cannot serve requests now.
      InvalidRequest: the body is not a valid `kind`.
      RequestError: the body has another media type, is too large or too late; see read_body.
    """
    state = get_state(request)
    state.check_open()
    check_media_type(request)
    number = request_id(request)
    leases, record = request.scope.get(LEASES, []), request.scope.get(RECORD)
    caller = request.scope.get(CALLER, "")
    received = RequestContext(
        state,
        leases,
        number,
        number,
        caller=caller,
        record=record,
        path=request.path_params,
        low_priority=request.scope.get(LOW_PRIORITY, False),
    )
    size = None
    with Reservation(state.bodies) as held:
        try:
            body = await read_body(request, state.limits, held, state.models.most_body_bytes)
            size = received.body_bytes = len(body)
            form = form_of(body)
            received.id = form.prefix + number
            if size <= FREE_BYTES:
                asked = decode_request(body, form.schema)
            else:
                context = await _model_of_large(received, body)
                most = {form.conversation: _most_objects(context.max_model_len)}
                most["prompt"] = MAX_PROMPTS + 1
                asked = await asyncio.to_thread(decode_request, body, form.schema, most)
            body.clear()
            yield received, asked
        finally:
            if size is None or size > FREE_BYTES:
                trim_soon()


async def _model_of_large(received: RequestContext, body: bytearray) -> ModelContext:
    """Return the model that a large body asks for, after a check of the model's body size limit.

    Raises:
      PayloadTooLarge: the body is larger than that model accepts.
    """
    models = received.models
    if not models.several:
        return models.first  # read_body has checked the size
    named = await asyncio.to_thread(decode_request, body, _ModelName)
    await received.choose(named.model)
    check_size(len(body), received.context.limits.max_body_bytes)
    return received.context


def _most_objects(max_model_len: int) -> int:
    """Return the limit on JSON lists, objects and strings in a conversation.

    A short message has 5 of them: an object, and the names and values of role and content. With
    nearly all templates it takes two tokens or more (its text and a marker), so 4 a token suffice.
    """
    return MAX_OBJECTS + 4 * max_model_len


def request_id(request: Request) -> str:
    """Return the request's id, which the middleware RequestIds sets, or a new one."""
    known = request.scope.get(REQUEST_ID)
    return known if isinstance(known, str) else uuid.uuid4().hex
