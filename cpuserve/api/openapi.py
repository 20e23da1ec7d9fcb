"""Write /openapi.json: the operations of all endpoints, and the types of requests and answers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from cpuserve.api.errors import ErrorBody
from cpuserve.api.routing import Endpoint
from cpuserve.version import version

if TYPE_CHECKING:
    from starlette.requests import Request

SCHEMA_PATH = "/openapi.json"
_TYPES: dict[str, type[msgspec.Struct]] = {"ErrorBody": ErrorBody}
# Of an endpoint that does not say what it answers.
_ANY_ANSWER = {
    "200": {"description": "Successful Response", "content": {"application/json": {"schema": {}}}}
}


def _ref(kind: type[msgspec.Struct]) -> dict[str, Any]:
    _TYPES[kind.__name__] = kind
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def json_answer(
    response: type[msgspec.Struct], error: type[msgspec.Struct] = ErrorBody
) -> dict[str, Any]:
    """Return the `openapi` of an endpoint that answers with `response`, or with `error`."""
    bad = {"description": "An error in the dialect's format", "content": _ref(error)}
    good = {"description": "Success", "content": _ref(response)}
    return {"responses": {"200": good, "4XX": bad, "5XX": bad}}


def json_body(
    request: type[msgspec.Struct],
    response: type[msgspec.Struct],
    error: type[msgspec.Struct] = ErrorBody,
) -> dict[str, Any]:
    """Return the `openapi` of an endpoint that takes `request` and answers with `response`."""
    body = {"required": True, "content": _ref(request)}
    return {"requestBody": body, **json_answer(response, error)}


def text_answer(request: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the `openapi` of an endpoint that takes `request` and answers with a text."""
    text = {"description": "Success", "content": {"text/plain": {"schema": {"type": "string"}}}}
    described = json_body(request, ErrorBody)
    return {**described, "responses": {**described["responses"], "200": text}}


def schema_endpoint(endpoints: Sequence[Endpoint]) -> Endpoint:
    """Return the endpoint that describes these endpoints."""

    async def show_schema(request: Request) -> Response:
        shown = _document(endpoints)
        root = request.scope.get("root_path", "").rstrip("/")
        if root:
            shown["servers"] = [{"url": root}]
        return Response(msgspec.json.encode(shown), media_type="application/json")

    return Endpoint("GET", SCHEMA_PATH, show_schema, {})


def _document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Return the description, with the types that json_body and json_answer name."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        methods = paths.setdefault(endpoint.path_format, {})
        methods[endpoint.method.lower()] = _operation(endpoint)
    _, schemas = msgspec.json.schema_components(
        list(_TYPES.values()), ref_template="#/components/schemas/{name}"
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "cpuserve", "version": version()},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    """Return the description of one endpoint; clients are generated with its operationId."""
    name = re.sub(r"\W", "_", endpoint.name + endpoint.path_format)
    operation: dict[str, Any] = {
        "summary": endpoint.name.replace("_", " ").title(),
        "description": inspect.getdoc(endpoint.endpoint),
        "operationId": f"{name}_{endpoint.method.lower()}",
        "responses": _ANY_ANSWER,
    }
    if endpoint.param_convertors:
        operation["parameters"] = [_in_path(parameter) for parameter in endpoint.param_convertors]
    return {**operation, **endpoint.openapi}


def _in_path(name: str) -> dict[str, Any]:
    schema = {"type": "string", "title": name.title()}
    return {"name": name, "in": "path", "required": True, "schema": schema}
