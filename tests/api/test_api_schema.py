"""Recorded requests and responses match /openapi.json."""

import functools
import json
import re

import msgspec
import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from jsonschema import Draft202012Validator

from cpuserve.api.dialects import ANTHROPIC, TEI, dialect_of
from cpuserve.api.response.openapi import install_schema, response_types
from cpuserve.base.errors import NotFound
from tests.api import recorded
from tests.api.post_routes import app_with_all_routes

ANSWERS = json.loads(recorded.GOLDEN.read_text("utf-8"))
REQUESTS = recorded.requests()


@functools.cache
def document():
    return json.loads(json.dumps(app_with_all_routes().openapi()))


def operations():
    """Return (path, method, operation) of the document."""
    return [
        (path, method, found)
        for path, methods in document()["paths"].items()
        for method, found in methods.items()
    ]


NAMES = [f"{method} {path}" for path, method, _ in operations()]


def operation(asked):
    """The operation of a recorded request; None if the server has no such route."""
    paths, path = document()["paths"], asked["path"]
    known = paths.get(path) or paths.get(path.rpartition("/")[0] + "/{response_id}")
    known = known or paths.get(path.rpartition("/")[0] + "/{name}")
    return (known or {}).get(asked.get("method", "POST").lower())


def faults(schema, value):
    whole = {**schema, "components": document()["components"]}
    return [fault.message[:300] for fault in Draft202012Validator(whole).iter_errors(value)]


def media_type(headers):
    return headers.get("content-type", "").partition(";")[0]


def test_handlers_read_the_parameters_of_path_and_query_themselves():
    # FastAPI would import the models of pydantic 1, which takes a tenth of the start of the server.
    routes = [route for route in app_with_all_routes().state.routes if isinstance(route, APIRoute)]
    assert len(routes) > 100
    for route in routes:
        read = route.dependant
        assert not (read.path_params + read.query_params + read.body_params), route.path


@pytest.mark.parametrize("name", REQUESTS)
def test_recorded_bodies_match_the_schema(name):
    asked, answer = REQUESTS[name], ANSWERS[name]
    described = operation(asked)
    if described is None:
        assert answer["status"] in (404, 405)
        return
    found = described["responses"][str(answer["status"])]
    media = media_type(answer["headers"])
    if answer["body"]:
        schema = found["content"][media]["schema"]
        if media == "application/json":
            assert not faults(schema, json.loads("".join(answer["body"])))
    if answer["status"] == 200 and asked.get("body") is not None:
        content = described["requestBody"]["content"]["application/json"]
        assert not faults(content["schema"], asked["body"])


def test_most_recorded_requests_have_an_operation():
    assert sum(operation(asked) is not None for asked in REQUESTS.values()) > 250


def test_every_route_has_an_operation():
    routes = {
        (route.path_format, method.lower())
        for route in app_with_all_routes().state.routes
        for method in (route.methods if hasattr(route, "path_format") else ())
    }
    described = {(path, method) for path, method, _ in operations()}
    # The schema is no operation of itself, and the files of the chat page are no API.
    others = ("/openapi", "/webui/")
    assert {route for route in routes if not route[0].startswith(others)} == described
    assert len({found["operationId"] for *_, found in operations()}) == len(described)


@pytest.mark.parametrize("operation", operations(), ids=NAMES)
def test_an_operation_has_each_status_with_the_error_of_its_dialect(operation):
    path, method, described = operation
    responses = described["responses"]
    errors = {int(status) for status in responses if status[0] in "45"}
    assert {400, 401, 403, 404, 500, 503} <= errors
    if "requestBody" in described:
        assert {408, 413, 415} <= errors
    success = "201" if (method, path) == ("post", "/api/blobs/{digest}") else "200"
    assert {*responses} - {str(status) for status in errors} == {success}
    for headers in ((), {ANTHROPIC.header}):
        for status in errors:
            # On paths that TEI shares with others, only its errors have these statuses.
            form = TEI if status in (422, 424) else dialect_of(path, headers)
            body = form.error(NotFound("gone"), "an id")
            (media,) = responses[str(status)]["content"]
            assert media == "application/json"
            schema = responses[str(status)]["content"][media]["schema"]
            assert not faults(schema, json.loads(body)), status
    for media, content in responses[success].get("content", {}).items():
        assert content["schema"], media


@pytest.mark.parametrize("operation", operations(), ids=NAMES)
def test_an_operation_has_each_parameter_of_its_path_once(operation):
    path, _, described = operation
    found = [(each["in"], each["name"]) for each in described.get("parameters", ())]
    assert len({*found}) == len(found)
    assert sorted(name for where, name in found if where == "path") == sorted(
        re.findall(r"{(\w+)}", path)
    )


def test_types_that_are_called_the_same_are_different_types():
    first = msgspec.defstruct("Same", [("a", int)], module="one")
    second = msgspec.defstruct("Same", [("b", str)], module="two")
    small = FastAPI()
    for path, kind in (("/one", first), ("/two", second)):
        small.add_api_route(path, lambda: None, openapi_extra=response_types(kind))
    install_schema(small, small.routes)
    found = small.openapi()
    properties = []
    for path in ("/one", "/two"):
        content = found["paths"][path]["get"]["responses"]["200"]["content"]
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        properties.append([*found["components"]["schemas"][name]["properties"]])
    assert properties == [["a"], ["b"]]
