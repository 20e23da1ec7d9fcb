"""Add the types of requests and responses to /openapi.json."""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi.routing import APIRoute

from cpuserve.api.errors.error_json import ErrorBody

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from fastapi import FastAPI
    from starlette.routing import BaseRoute

# The media types of SSE streams, JSON lines, and plain text.
EVENTS, LINES, TEXT = "text/event-stream", "application/x-ndjson", "text/plain"

# All types in the schema, by module and class name, because classes may have equal names.
_TYPES: dict[str, Any] = {}
# The error statuses of every route, and the additional ones of routes that read a body.
_ERRORS = (400, 401, 403, 404, 500, 503)
BODY_ERRORS = (408, 413, 415, 429, 504)


def _schema(kind: Any) -> dict[str, Any]:
    """Return a reference to the type `kind`; `install_schema` replaces it by the type's schema."""
    if isinstance(kind, tuple):
        return {"anyOf": [_schema(each) for each in kind]}
    place = f"{kind.__module__}.{kind.__qualname__}" if isinstance(kind, type) else repr(kind)
    _TYPES[place] = kind
    return {"$ref": place}


def _json(kind: Any) -> dict[str, Any]:
    """Return the OpenAPI content of a JSON body of the type `kind`, or of one of several types."""
    return {"application/json": {"schema": _schema(kind)}}


def _statuses(
    good: dict[str, Any], error: type[msgspec.Struct], errors: Iterable[int], status: int
) -> dict[str, Any]:
    """Return the OpenAPI responses of a route: `status` with the content `good`, and the errors."""
    content = _json(error)
    success = {"description": "Success", **({"content": good} if good else {})}
    found = {
        str(each): {"description": HTTPStatus(each).phrase, "content": content}
        for each in sorted(errors)
    }
    return {"responses": {str(status): success, **found}}


def response_types(
    response: Any,
    error: type[msgspec.Struct] = ErrorBody,
    *,
    media: str | None = None,
    also: Iterable[int] = (),
    status: int = 200,
) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads no body.

    response: the type of its JSON response, or a tuple of types; None = it sends no JSON.
    media: the media type of its streams or texts; None = it sends none.
    error: the type of the error bodies that the route sends.
    also: HTTP statuses of errors that few routes have.
    status: the status of successful responses.
    """
    good = {} if response is None else _json(response)
    if media is not None:
        good[media] = {"schema": {"type": "string"}}
    return _statuses(good, error, {*_ERRORS, *also}, status)


def parameters(path: str, **query: type[int] | type[str] | type[bool]) -> dict[str, Any]:
    """Return the `openapi_extra` that describes parameters in `path` and in the query string."""
    named = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)(?::path)?}", path)
    ]
    queried = [
        {"name": name, "in": "query", "required": False, "schema": msgspec.json.schema(kind)}
        for name, kind in query.items()
    ]
    return {"parameters": named + queried} if named or queried else {}


def json_body(
    request: Any,
    response: Any,
    error: type[msgspec.Struct] = ErrorBody,
    *,
    media: str | None = None,
    also: Iterable[int] = (),
) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that reads a JSON body of the type `request`.

    The other arguments are as in `response_types`.
    """
    body = {"required": True, "content": _json(request)}
    found = response_types(response, error, media=media, also={*BODY_ERRORS, *also})
    return {"requestBody": body, **found}


def either(described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that serves any of several described endpoints."""
    if len(described) == 1:
        return described[0]
    found: dict[str, Any] = {"responses": {}}
    bodies = [each["requestBody"]["content"] for each in described if "requestBody" in each]
    if bodies:
        found["requestBody"] = {"required": True, "content": _either_content(bodies)}
    for status in sorted({status for each in described for status in each["responses"]}):
        same = [each["responses"][status] for each in described if status in each["responses"]]
        content = _either_content([each["content"] for each in same if "content" in each])
        found["responses"][status] = {"description": same[0]["description"], "content": content}
    named = [each for extra in described for each in extra.get("parameters", ())]
    return {**found, "parameters": named} if named else found


def _either_content(contents: Sequence[dict[str, Any]]) -> dict[str, Any]:
    schemas: dict[str, list[Any]] = {}
    for content in contents:
        for media, body in content.items():
            if body["schema"] not in schemas.setdefault(media, []):
                schemas[media].append(body["schema"])
    return {
        media: {"schema": found[0] if len(found) == 1 else {"anyOf": found}}
        for media, found in schemas.items()
    }


def _replaced(value: Any, schemas: Mapping[str, Any]) -> Any:
    """Return a part of the document with the references of `_schema` replaced by `schemas`."""
    if isinstance(value, list):
        return [_replaced(each, schemas) for each in value]
    if not isinstance(value, dict):
        return value
    reference = value.get("$ref")
    if isinstance(reference, str) and reference in schemas:
        return schemas[reference]
    return {key: _replaced(each, schemas) for key, each in value.items()}


def _complete(operation: dict[str, Any], extras: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return an OpenAPI operation with the responses of its routes, and each parameter once."""
    described = either(extras)
    named = [*operation.get("parameters", ()), *described.get("parameters", ())]
    found = {**operation, **described}
    if named:
        found["parameters"] = [*{(each["in"], each["name"]): each for each in named}.values()]
    return found


def install_schema(app: FastAPI, routes: Iterable[BaseRoute]) -> None:
    """Add the `openapi_extra` of `routes`, all routes of the app, to its /openapi.json.

    Several routes may have the same path, for example a path that two dialects share.
    """
    base = app.openapi
    extras: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for route in routes:
        if isinstance(route, APIRoute) and route.openapi_extra:
            for method in route.methods or ():
                extras.setdefault((route.path_format, method.lower()), []).append(
                    route.openapi_extra
                )

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = base()
            for (path, method), described in extras.items():
                operations = document["paths"].get(path, {})
                if method in operations:
                    operations[method] = _complete(operations[method], described)
            found, components = msgspec.json.schema_components(
                list(_TYPES.values()), ref_template="#/components/schemas/{name}"
            )
            document = _replaced(document, dict(zip(_TYPES, found, strict=True)))
            document["components"] = {"schemas": dict(sorted(components.items()))}
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
