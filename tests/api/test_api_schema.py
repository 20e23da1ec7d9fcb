"""Recorded requests and responses match /openapi.json."""

import functools
import json

import msgspec
import pytest
from fastapi import FastAPI
from jsonschema import Draft202012Validator

from cpuserve.api.response.openapi import install_schema, response_types
from tests.api import recorded
from tests.api.fakes import Api

ANSWERS = json.loads(recorded.GOLDEN.read_text("utf-8"))
REQUESTS = recorded.requests()


@functools.cache
def document():
    return json.loads(json.dumps(Api().app.openapi()))


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


@pytest.mark.parametrize("name", REQUESTS)
def test_recorded_bodies_match_the_schema(name):
    asked, answer = REQUESTS[name], ANSWERS[name]
    described = operation(asked)
    if described is None:
        assert answer["status"] in (404, 405)
        return
    status = str(answer["status"])
    found = described["responses"].get(status) or described["responses"][f"{status[0]}XX"]
    media = media_type(answer["headers"])
    if answer["body"]:
        schema = found["content"][media]["schema"]
        if media == "application/json":
            assert not faults(schema, json.loads("".join(answer["body"])))
    if status == "200" and asked.get("body") is not None:
        content = described["requestBody"]["content"]["application/json"]
        assert not faults(content["schema"], asked["body"])


def test_most_recorded_requests_have_an_operation():
    assert sum(operation(asked) is not None for asked in REQUESTS.values()) > 250


def test_types_that_are_called_the_same_are_different_types():
    first = msgspec.defstruct("Same", [("a", int)], module="one")
    second = msgspec.defstruct("Same", [("b", str)], module="two")
    app = FastAPI()
    for path, kind in (("/one", first), ("/two", second)):
        app.add_api_route(path, lambda: None, openapi_extra=response_types(kind))
    install_schema(app)
    found = app.openapi()
    properties = []
    for path in ("/one", "/two"):
        content = found["paths"][path]["get"]["responses"]["200"]["content"]
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        properties.append([*found["components"]["schemas"][name]["properties"]])
    assert properties == [["a"], ["b"]]
