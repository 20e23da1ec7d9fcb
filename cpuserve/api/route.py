"""The routes of all dialects: decode the body, make a GenerateCall, write the response.

`get`, `delete` and `post_nothing` add routes without a body; `post` adds all others.

A request for text, vectors or scores is checked only here, in this order:

1. `read_call` checks the size, media type and JSON of the body, and the types of its fields.
2. `RequestContext.choose` finds the model that the body selects.
3. `check_fields` rejects fields that the endpoint refuses.
4. `to_call` of the dialect rejects contradictory fields, and fields that a call cannot express.
5. `prepare` checks the values of the call against the model, in the same way for all dialects.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.batches.references import names_files, read_files
from cpuserve.api.errors.dialect import OPENAI, Dialect
from cpuserve.api.errors.http_errors import DIALECT, WORDS, Words
from cpuserve.api.request.body import decode_request
from cpuserve.api.request.context import BodyForm, Named, RequestContext, read_call
from cpuserve.api.request.fields import check_fields
from cpuserve.api.request.state import get_state
from cpuserve.api.response.openapi import (
    BODY_ERRORS,
    TEXT,
    either,
    json_body,
    parameters,
    response_types,
)
from cpuserve.api.response.writer import Writer, respond
from cpuserve.base.errors import InvalidRequest, NotFound
from cpuserve.sampling.params import is_salt
from cpuserve.serving.generation.prepare import prepare
from cpuserve.serving.prompts.prompts import counted_prompt
from cpuserve.serving.threads import run_limited, run_sized

if TYPE_CHECKING:
    from cpuserve.serving.callers.caller import Caller
    from cpuserve.serving.calls.call import GenerateCall
    from cpuserve.serving.generation.generate import Generation

T = TypeVar("T", bound=msgspec.Struct)
N = TypeVar("N", bound=Named)
H = TypeVar("H", bound=Callable[..., Any])
# The priority of requests that wait for all others; a higher number is scheduled later.
LOWEST_PRIORITY = 2**31 - 1
# How many bytes of a body are converted to a call in a microsecond, at least.
_BYTES_PER_US = 8
Handler = Callable[[RequestContext, T], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[T]):
    """A handler of decoded bodies with its description; its fields are the arguments of `post`."""

    handler: Handler[T]
    form: BodyForm[T]
    response: Any
    dialect: Dialect = OPENAI
    stream: str | None = None
    words: Callable[[T], Words] | None = None
    also: Sequence[int] = ()
    pages: bool = True

    async def respond(self, request: Request) -> Response:
        """Return the response to a request of this endpoint."""
        return await _respond(request, lambda _: self)

    @property
    def described(self) -> dict[str, Any]:
        """The `openapi_extra` that describes a route with this endpoint."""
        media = TEXT if self.response is None else self.stream
        also = (*self.dialect.statuses, *self.also)
        return json_body(self.form.schema, self.response, self.dialect.body, media=media, also=also)


def post(
    router: APIRouter,
    *paths: str,
    schema: type[T],
    response: Any,
    id_prefix: str,
    dialect: Dialect = OPENAI,
    stream: str | None = None,
    conversation: str = "messages",
    words: Callable[[T], Words] | None = None,
    also: Sequence[int] = (),
    pages: bool = True,
    poolings: Collection[str] = (),
    guards: bool = False,
) -> Callable[[Handler[T]], Endpoint[T]]:
    """Return a decorator that adds a handler of decoded bodies to `router`, at each of `paths`.

    schema, response: the types of the bodies; response = None: the response is plain text.
    dialect: how errors of the route are written.
    also: additional error statuses of the route.
    pages: whether web pages may send JSON to the route (see WebPages);
      False for routes that change models, files or settings of the server.
    id_prefix: the prefix of the response id.
    stream: the media type of streamed responses; None = the route never streams.
    conversation: the body field with the messages; see BodyForm.
    words: a function that returns the body field for each role of an error (RequestError.role);
      None = each role is the name of a field.
    poolings: the pooling types of models that can serve the route; empty = any (BodyForm).
    guards: whether the id of a response guards texts (BodyForm).

    The operation in /openapi.json has the handler's name and docstring.
    The decorator returns an Endpoint, so that `post_by_field` can serve it at a further path.
    """

    def add(handler: Handler[T]) -> Endpoint[T]:
        form = BodyForm(id_prefix, schema, conversation, frozenset(poolings), guards)
        endpoint = Endpoint(handler, form, response, dialect, stream, words, also, pages)
        for path in paths:
            router.add_api_route(
                path,
                endpoint.respond,
                methods=["POST"],
                name=handler.__name__,
                description=inspect.getdoc(handler),
                openapi_extra={**endpoint.described, **parameters(path)},
            )
        return endpoint

    return add


def without_body(
    method: str,
    router: APIRouter,
    path: str,
    response: Any,
    *,
    dialect: Dialect = OPENAI,
    media: str | None = None,
    also: Sequence[int] = (),
    operation_id: str | None = None,
    **query: type[int] | type[str] | type[bool],
) -> Callable[[H], H]:
    """Return a decorator that adds a handler of requests without a body to `router`, at `path`.

    also, media, response: arguments of `response_types`, which describes the responses.
    dialect: the dialect that writes the errors of the route.
    operation_id: the id in /openapi.json if a handler has several paths; None = from its name.
    query: the type of each parameter in the query string.
    """
    described = response_types(response, dialect.body, media=media, also=also)
    extra = {**described, **parameters(path, **query)}
    return router.api_route(path, methods=[method], operation_id=operation_id, openapi_extra=extra)


get, delete = partial(without_body, "GET"), partial(without_body, "DELETE")
post_nothing = partial(without_body, "POST")

# Endpoints by the pooling type of the model (EngineConfig.pooling); "" = all other models.
ByPooling = Mapping[str, Endpoint[Any]]


def post_by_field(
    router: APIRouter,
    path: str,
    endpoints: Mapping[str, ByPooling],
    *,
    name: str,
    about: str,
    otherwise: Endpoint[Any] | None = None,
    refused: Mapping[str, str] | None = None,
) -> None:
    """Add a route that serves several endpoints; a body field and the model select the endpoint.

    endpoints: the endpoints by field and pooling type. A field may be nested,
      such as "inputs.sentences". The first of these fields that the body has selects its endpoints.
    otherwise: the endpoint for bodies without any of these fields.
    refused: the message (404) for bodies of media types with these beginnings, such as "audio/".
    name, about: the name and the description of the operation in /openapi.json.
    """
    names = dict.fromkeys(field.partition(".")[0] for field in endpoints)
    fields = [(field, msgspec.Raw, msgspec.Raw()) for field in names]
    marks = msgspec.defstruct("Marks", [*fields, ("model", Any, None)])

    def endpoint_of(request: Request, body: bytearray) -> Endpoint[Any]:
        given = msgspec.structs.asdict(decode_request(body, marks))
        for field, choices in endpoints.items():
            outer, _, inner = field.partition(".")
            if given[outer] and (not inner or _has_field(given[outer], inner)):
                return choices.get(_pooling_of(request, given["model"]), choices[""])
        if otherwise is not None:
            return otherwise
        known = ", ".join(endpoints)
        msg = f"The body has none of the fields that say what is asked for: send one of {known}"
        raise InvalidRequest(msg)

    served = [each for choices in endpoints.values() for each in choices.values()]
    served += [] if otherwise is None else [otherwise]
    # Errors before the choice of an endpoint have the OpenAI format.
    described = [*(each.described for each in served), response_types(None, also=BODY_ERRORS)]
    router.add_api_route(
        path,
        _FieldRoute(endpoint_of, refused or {}).respond,
        methods=["POST"],
        name=name,
        description=about,
        openapi_extra=either(described),
    )


@dataclass(frozen=True, slots=True)
class _FieldRoute:
    """The handler of a route with several endpoints; see `post_by_field`."""

    endpoint_of: Callable[[Request, bytearray], Endpoint[Any]]
    refused: Mapping[str, str]
    pages: bool = True

    async def respond(self, request: Request) -> Response:
        """Return the response of the endpoint that the body and the model select."""
        media = request.headers.get("content-type", "").lower()
        for beginning, msg in self.refused.items():
            if media.startswith(beginning):
                raise NotFound(msg, code="unknown_url")
        return await _respond(request, partial(self.endpoint_of, request))


def reads_pages(handler: object) -> bool:
    """Whether web pages may send JSON to the route with this handler; see `post`."""
    owner = getattr(handler, "__self__", None)
    return isinstance(owner, Endpoint | _FieldRoute) and owner.pages


def _has_field(value: msgspec.Raw, name: str) -> bool:
    """Return whether a JSON value is an object with the field `name`."""
    try:
        return name in msgspec.json.decode(value, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        return False


def _pooling_of(request: Request, model: object) -> str:
    """Return the pooling type of a body's model; "" if the model is unknown or not loaded."""
    models = get_state(request).models
    try:
        context = models.peek(models.resolve(model if isinstance(model, str) else None))
    except NotFound:
        return ""
    return "" if context is None else context.pooling


async def _respond(request: Request, endpoint_of: Callable[[bytearray], Endpoint[Any]]) -> Response:
    """Read a body, and return the response of the endpoint that `endpoint_of` selects."""
    chosen: list[Endpoint[Any]] = []

    def form_of(body: bytearray) -> BodyForm[Any]:
        chosen.append(endpoint_of(body))
        request.scope[DIALECT] = chosen[0].dialect
        return chosen[0].form

    async with read_call(request, form_of) as (received, fields):
        endpoint = chosen[0]
        if endpoint.words is not None:
            request.scope[WORDS] = endpoint.words(fields)
        try:
            return await endpoint.handler(received, fields)
        except InvalidRequest as error:
            await _add_able_models(error, received, endpoint.form)
            raise


async def _add_able_models(
    error: InvalidRequest, request: RequestContext, form: BodyForm[Any]
) -> None:
    """Add the models that can serve a request to the error that its model cannot."""
    if error.role != "model" or not form.poolings or not request.models.several:
        return
    if able := await request.models.names_with(form.poolings):
        error.message += f". Models of this server that can: {', '.join(able)}"


async def generate(
    request: RequestContext,
    body: N,
    to_call: Callable[[N], GenerateCall],
    writer: Callable[[RequestContext, N, Generation], Writer],
) -> Response:
    """Return the response to a request for text, vectors or scores.

    Raises:
      RequestError: the model is not found, or the body is invalid; see `prepare`.
    """
    generation = await prepared(request, body, to_call)
    return respond(generation, writer(request, body, generation))


async def prepared(
    request: RequestContext, body: N, to_call: Callable[[N], GenerateCall]
) -> Generation:
    """Return a Generation for a body without running it; for errors, see `generate`."""
    call, allowance = await call_of(request, body, to_call), request.allowance
    _set_priority(request.sender, call)
    call.cache_salt = salt_of(request, call.cache_salt)
    if request.low_priority:
        call.priority = max(call.priority or 0, LOWEST_PRIORITY)
    generation = await prepare(
        request.served,
        call,
        request.body_bytes,
        caller=request.caller,
        allowance=allowance if allowance is not None and allowance.counts_tokens else None,
    )
    if request.guards:
        generation.set_id(request.id)
    return generation


async def prompt_length(
    request: RequestContext, body: N, to_call: Callable[[N], GenerateCall]
) -> int:
    """Return the number of prompt tokens of a body; for errors, see `generate`."""
    call = await call_of(request, body, to_call)
    return len((await counted_prompt(request.context, call, request.body_bytes)).ids)


async def call_of(
    request: RequestContext, body: N, to_call: Callable[[N], GenerateCall]
) -> GenerateCall:
    """Find the model, and return the call of a body; a thread converts a large one.

    For errors, see `generate`.
    """
    await request.choose(body.model)
    check_fields(body)

    def converted() -> tuple[GenerateCall, bool]:
        call = to_call(body)
        return call, names_files(call)

    size, tokenizer = request.body_bytes // _BYTES_PER_US, request.context.tokenizer
    waits = tokenizer is not None and tokenizer.waits  # logit_bias may have texts
    call, names = await (run_limited if waits else run_sized)(size, converted)
    if names:
        await read_files(request, call)
    request.warnings += call.ignored
    return call


def _set_priority(sender: Caller, call: GenerateCall) -> None:
    """Set the priority of a call as the operator wants for its sender.

    Raises:
      InvalidRequest: the client asks for a lower priority than it may have.
    """
    if sender.priority is not None:
        if call.priority is not None and call.priority < sender.priority:
            msg = (
                f"priority must be at least {sender.priority} for caller {sender.name}, got "
                f"{call.priority}: omit it, or send a larger number"
            )
            raise InvalidRequest(msg, role="priority")
        call.priority = sender.priority if call.priority is None else call.priority


def salt_of(request: RequestContext, salt: str | None) -> str | None:
    """Return the salt of what a request may share with others; salt: its own `cache_salt`.

    With `cache=private`, it is one that no other caller can send, because it depends on a secret of
    the server. Salts that such a caller sends separate its own prompts further.
    """
    if not request.sender.private_cache or not (salt is None or is_salt(salt)):
        return salt
    text = f"private cache\0{request.owner}\0{salt or ''}"
    return hmac.digest(request.state.seal.key, text.encode(), hashlib.sha256).hex()
