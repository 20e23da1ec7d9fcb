"""Add the request and response types to /openapi.json."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.response.error_json import ErrorBody

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fastapi import FastAPI

# The media types of streams.
EVENTS, LINES = "text/event-stream", "application/x-ndjson"

# The types in the schema. Classes of several modules may be called the same.
_TYPES: dict[type[msgspec.Struct], None] = {ErrorBody: None}


def _ref(kind: type[msgspec.Struct]) -> dict[str, Any]:
    _TYPES[kind] = None
    return {"application/json": {"schema": {"$ref": _place(kind)}}}


def _place(kind: type[msgspec.Struct]) -> str:
    """Return the reference to a type, which `install_schema` replaces."""
    return f"{kind.__module__}.{kind.__qualname__}"


def response_types(
    response: type[msgspec.Struct], error: type[msgspec.Struct] = ErrorBody
) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that responds with `response`, or with `error`."""
    bad = {"description": "An error in the dialect's format", "content": _ref(error)}
    good = {"description": "Success", "content": _ref(response)}
    return {"responses": {"200": good, "4XX": bad, "5XX": bad}}


def parameters(path: str, **query: type[int] | type[str] | type[bool]) -> dict[str, Any]:
    """Return the `openapi_extra` with the parameters in `path`, and those of the query string."""
    named = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", path)
    ]
    asked = [
        {"name": name, "in": "query", "required": False, "schema": msgspec.json.schema(kind)}
        for name, kind in query.items()
    ]
    return {"parameters": named + asked} if named or asked else {}


def json_body(
    request: type[msgspec.Struct],
    response: type[msgspec.Struct],
    error: type[msgspec.Struct] = ErrorBody,
    *,
    stream: str | None = None,
) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that takes `request` and responds with `response`.

    stream: the media type of its streamed responses; None = it never streams.
    """
    body = {"required": True, "content": _ref(request)}
    described = {"requestBody": body, **response_types(response, error)}
    if stream is not None:
        described["responses"]["200"]["content"][stream] = {"schema": {"type": "string"}}
    return described


def any_json_body(described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that serves the endpoints with these descriptions."""
    status = described[0]["responses"]

    def either(contents: list[dict[str, Any]]) -> dict[str, Any]:
        schemas: dict[str, list[Any]] = {}
        for content in contents:
            for media, body in content.items():
                if body["schema"] not in schemas.setdefault(media, []):
                    schemas[media].append(body["schema"])
        return {media: {"schema": {"anyOf": found}} for media, found in schemas.items()}

    def responses(code: str) -> dict[str, Any]:
        contents = [each["responses"][code]["content"] for each in described]
        return {**status[code], "content": either(contents)}

    body = either([each["requestBody"]["content"] for each in described])
    return {
        "requestBody": {"required": True, "content": body},
        "responses": {code: responses(code) for code in status},
    }


def text_response_type(request: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route that takes `request` and responds with a text."""
    text = {"description": "Success", "content": {"text/plain": {"schema": {"type": "string"}}}}
    described = json_body(request, ErrorBody)
    return {**described, "responses": {**described["responses"], "200": text}}


def _replaced(value: Any, places: Mapping[str, str]) -> Any:
    """Return a part of the document with references replaced by `places`."""
    if isinstance(value, list):
        return [_replaced(each, places) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: places.get(each, each)
        if key == "$ref" and isinstance(each, str)
        else _replaced(each, places)
        for key, each in value.items()
    }


def install_schema(app: FastAPI) -> None:
    """Add the types passed to json_body and response_types to the app's /openapi.json."""
    base = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            found, components = msgspec.json.schema_components(
                list(_TYPES), ref_template="#/components/schemas/{name}"
            )
            places = {_place(kind): each["$ref"] for kind, each in zip(_TYPES, found, strict=True)}
            document = _replaced(base(), places)
            document.setdefault("components", {}).setdefault("schemas", {}).update(components)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
