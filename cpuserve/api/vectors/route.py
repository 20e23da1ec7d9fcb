"""The route of all requests for vectors, scores and labels: a body becomes a call and a writer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec
from fastapi import APIRouter, Response

from cpuserve.api.errors.dialect import OPENAI, Dialect
from cpuserve.api.response.stream import JsonResult
from cpuserve.api.route import Endpoint, generate, post
from cpuserve.api.vectors.binary import BinaryBody
from cpuserve.serving.calls.call import GenerateCall, call_from
from cpuserve.serving.calls.events import WholeResponse

if TYPE_CHECKING:
    from cpuserve.api.errors.http_errors import Words
    from cpuserve.api.request.context import RequestContext

T = TypeVar("T", bound=Any)
# The call of a request, and a function that returns the value of the JSON response or a BinaryBody.
Made = tuple[GenerateCall, Callable[[WholeResponse], Any]]
Make: TypeAlias = "Callable[[T, RequestContext], Made]"


def vectors_call(body: msgspec.Struct, **more: Any) -> GenerateCall:
    """Return the call for vectors with the fields that a body shares with it, and with `more`."""
    return call_from(body, **{"max_tokens": 0, "embed": True, **more})


@dataclass(frozen=True, slots=True)
class Table:
    """The routes for vectors of one dialect. words: its fields for the roles of errors (Words)."""

    dialect: Dialect = OPENAI
    words: Words = field(default_factory=dict)
    router: APIRouter = field(default_factory=APIRouter)

    def row(
        self,
        paths: str,
        schema: type[T],
        response: Any,
        prefix: str,
        words: str | Callable[[T], Words],
        poolings: Collection[str] = (),
    ) -> Callable[[Make[T]], Endpoint[T]]:
        """Return a decorator that adds a route. For the other arguments see `post`.

        The operation in /openapi.json has the name and docstring of the decorated function.

        paths: separated by spaces; "" = only paths that dialects share (shared_paths.py).
        prefix: `id_prefix` of `post`.
        words: the field with the texts, or a function as in `post`.
        """

        def words_of(body: T) -> Words:
            return {**self.words, "prompt": words} if isinstance(words, str) else words(body)

        def add(make: Make[T]) -> Endpoint[T]:
            @wraps(make)
            async def handler(request: RequestContext, body: T) -> Response:
                return await answer(request, body, make)

            return post(
                self.router,
                *paths.split(),
                schema=schema,
                response=response,
                id_prefix=prefix,
                dialect=self.dialect,
                words=words_of,
                poolings=poolings,
            )(handler)

        return add


async def answer(request: RequestContext, body: T, make: Make[T]) -> Response:
    """Return the response to a request for vectors; for errors, see `generate`."""
    made: list[Made] = []

    def to_call(body: T) -> GenerateCall:
        made.append(make(body, request))
        return made[0][0]

    writer = _ValueWriter(lambda response: made[0][1](response))
    result = await generate(request, body, to_call, lambda *_: writer)
    if isinstance(result, JsonResult):
        headers_of = result.further_headers
        result.further_headers = lambda: {**headers_of(), **writer.headers}
    return result


@dataclass(slots=True)
class _ValueWriter:
    """Writes the value of a response as JSON, or a BinaryBody as it is."""

    value_of: Callable[[WholeResponse], Any]
    headers: dict[str, str] = field(default_factory=dict)

    def whole(self, response: WholeResponse) -> bytes:
        """Return the body of the whole response; `headers` gets its headers."""
        value = self.value_of(response)
        if isinstance(value, BinaryBody):
            self.headers = value.headers
            return value.content
        return msgspec.json.encode(value)
