"""The first steps of every POST endpoint: check the server state, read and decode the body."""

from __future__ import annotations

import time
import uuid
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from cpuserve.api.errors.http_errors import REQUEST_ID
from cpuserve.api.errors.record import RECORD
from cpuserve.api.request.body import (
    FREE_BYTES,
    check_media_type,
    check_size,
    decode_request,
    read_body,
)
from cpuserve.api.request.body_budget import Reservation
from cpuserve.api.request.headers import ALLOWANCE, CALLER, LOW_PRIORITY, WARNINGS, WORK
from cpuserve.api.request.memory_trim import trim_soon
from cpuserve.api.request.object_limits import MAX_OBJECTS
from cpuserve.api.request.state import get_state
from cpuserve.base.errors import NotServing
from cpuserve.base.ids import guarding_id
from cpuserve.serving.callers.caller import Caller
from cpuserve.serving.calls.call import MAX_PROMPTS
from cpuserve.serving.threads import WORKS_FOR, loop_turn, run_decoding

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Mapping

    from fastapi import Request

    from cpuserve.api.errors.record import RequestRecord
    from cpuserve.api.request.state import ServerState
    from cpuserve.serving.callers.allowance import Allowance
    from cpuserve.serving.models.context import ModelContext
    from cpuserve.serving.models.registry import ModelRegistry, Served
    from cpuserve.serving.work import RequestWork

T = TypeVar("T", bound=msgspec.Struct)

# The limit on the objects of a conversation beyond MAX_OBJECTS, whatever the context. With others,
# they are created in 50 ms on a slow CPU.
_MOST_IN_CONVERSATION = 1 << 18


@dataclass(slots=True)
class RequestContext:
    """A request and its model; `id` is the id of the response, see `BodyForm.guards`.

    state: the state of the server.
    work: the reservations of the request, until its work ends.
    path: the parameters in the path of the request.
    default: the model of a body that selects none; None = the first model.
    guards: whether the id guards texts.
    low_priority: whether the scheduler should run the request after all others.
    warnings: fields that have no effect, for a header of the response.
    sender: who sends the request.
    allowance: the part of its caller's limits that the request takes; None = it has no limits.
    body_bytes: the size of the body in bytes, with the stored items that it refers to;
      0 until the body has been read.
    held: the memory that is reserved for the body and for the thoughts that are sealed in it.
    record: the log record of the request.
    created, begun: when the request arrived, as seconds of time.time() and of time.monotonic().
    """

    state: ServerState
    work: RequestWork
    request_id: str
    id: str
    held: Reservation
    sender: Caller = field(default_factory=lambda: Caller("", ""))
    allowance: Allowance | None = None
    body_bytes: int = 0
    record: RequestRecord | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    begun: float = field(default_factory=time.monotonic)
    path: Mapping[str, str] = field(default_factory=dict)
    guards: bool = False
    low_priority: bool = False
    warnings: list[str] = field(default_factory=list)
    default: str | None = None
    _served: Served | None = None

    @property
    def caller(self) -> str:
        """The name of the caller: "key-1", a name in --api-key-file, or an address."""
        return self.sender.name

    @property
    def owner(self) -> str:
        """The owner of files, batches and models that the request stores."""
        return self.sender.owner

    @property
    def models(self) -> ModelRegistry:
        """The registry of all models that the server serves."""
        return self.state.models

    async def choose(self, model: str | None) -> str:
        """Find the model that the request selects, set `served`, and return the model name.

        The model stays loaded until the work of the request ends.

        Raises:
          NotFound, ServiceUnavailable: see ModelRegistry.find.
        """
        self.note_model(model)
        if self._served is None:
            self._served = await self.models.find(model or self.default)
            self.work.hold(self._served.lease.release)
            if (reason := self._served.context.unavailable()) is not None:
                raise NotServing(reason)
        return self._served.name

    async def hold(self, size: int) -> None:
        """Reserve memory for `size` bytes that the body refers to; they count as bytes of it.

        Raises:
          ServerBusy: other requests use the memory; see BodyBudget.take.
        """
        await self.held.take(size, self.state.limits.body_wait_s)
        self.body_bytes += size

    def keep_loaded(self, seconds: float | None) -> None:
        """Set how many seconds the model stays loaded after the request; None = the default."""
        if seconds is not None:
            self.served.lease.keep(seconds)

    def note_model(self, model: str | None) -> None:
        """Store the requested model name in the log record."""
        if self.record is not None:
            self.record.model = model

    @property
    def served(self) -> Served:
        """The model of the request; it is available after `choose`."""
        assert self._served is not None
        return self._served

    @property
    def context(self) -> ModelContext:
        """The context of the request's model; it is available after `choose`."""
        return self.served.context


class Named(Protocol):
    """A decoded body with an optional field `model`."""

    @property
    def model(self) -> str | None:
        """The requested model name; None = the first model of the server."""


class _ModelName(msgspec.Struct):
    """The field `model` of a large body, decoded first because limits depend on the model."""

    model: str | None = None


@dataclass(frozen=True, slots=True)
class BodyForm(Generic[T]):
    """How to decode the body of a request.

    prefix: the prefix of the response id.
    schema: the type of the decoded body.
    conversation: the field with the messages;
      `_most_objects` returns the maximum number of JSON lists, objects and strings in this field.
    poolings: the pooling types of the models that can serve the request; empty = any.
      A body that selects no model gets the first of these.
    guards: whether the id of the response guards texts, so that it is secret (base/ids.py);
      else it is the prefix followed by the id of the request.
    """

    prefix: str
    schema: type[T]
    conversation: str = "messages"
    poolings: frozenset[str] = frozenset()
    guards: bool = False


@asynccontextmanager
async def read_call(
    request: Request, form_of: Callable[[bytearray], BodyForm[T]]
) -> AsyncGenerator[tuple[RequestContext, T], None]:
    """Yield the request and its decoded body; its memory stays reserved until the block ends.

    form_of: returns the BodyForm for a body, or raises InvalidRequest.

    Raises:
      ServiceUnavailable: the server cannot serve requests now.
      InvalidRequest: the body does not match the schema of its BodyForm.
      RequestError: the body has another media type, is too large or too late; see read_body.
    """
    state = get_state(request)
    state.check_open()
    check_media_type(request)
    number = request_id(request)
    record = request.scope.get(RECORD)
    WORKS_FOR.set(request.scope[CALLER].name)
    held = Reservation(state.bodies, request.scope[CALLER].name)
    received = RequestContext(
        state,
        request.scope[WORK],
        number,
        number,
        held,
        sender=request.scope[CALLER],
        allowance=request.scope.get(ALLOWANCE),
        record=record,
        path=request.path_params,
        low_priority=request.scope.get(LOW_PRIORITY, False),
        warnings=request.scope.setdefault(WARNINGS, []),
    )
    size = None
    with held:
        try:
            body = await read_body(request, state.limits, held, state.models.most_body_bytes)
            size = received.body_bytes = len(body)
            await loop_turn(min(size, FREE_BYTES))
            if record is not None:
                record.read = time.monotonic()
            form = form_of(body)
            received.id = guarding_id(form.prefix) if form.guards else form.prefix + number
            received.guards = form.guards
            if form.poolings and state.models.several:
                received.default = next(iter(await state.models.names_with(form.poolings)), None)
            if size <= FREE_BYTES:
                fields = decode_request(body, form.schema)
            else:
                context = await _model_of_large(received, body)
                most = {form.conversation: _most_objects(context.max_model_len)}
                most["prompt"] = MAX_PROMPTS + 1
                fields = await run_decoding(size, lambda: decode_request(body, form.schema, most))
            body.clear()
            yield received, fields
        finally:
            if size is None or size > FREE_BYTES:
                trim_soon()


async def _model_of_large(request: RequestContext, body: bytearray) -> ModelContext:
    """Return the model that a large body selects, after checking this model's body size limit.

    Raises:
      PayloadTooLarge: the body is larger than the model allows.
    """
    models = request.models
    if not models.several:
        return models.first  # read_body has already checked the size
    named = await run_decoding(len(body), lambda: decode_request(body, _ModelName))
    await request.choose(named.model)
    check_size(len(body), request.context.limits.max_body_bytes)
    return request.context


def _most_objects(max_model_len: int) -> int:
    """Return the maximum number of JSON lists, objects and strings in a conversation.

    A message has 5 of them: an object, and keys and values of role and content, and four tokens or
    more: its text, its role and two markers. So 2 per token are enough. No other Python thread
    runs while they are created, so in long contexts, where messages are longer, there may be less.
    """
    return MAX_OBJECTS + min(2 * max_model_len, _MOST_IN_CONVERSATION)


def request_id(request: Request) -> str:
    """Return the request id that the middleware RequestIds has set, or a new id."""
    known = request.scope.get(REQUEST_ID)
    return known if isinstance(known, str) else uuid.uuid4().hex
