"""Cases of the contract: a body that is accepted, or refused with an error about a field.

A dialect's file lists values of fields. Each value is a case, which is sent to the app over a
scripted engine. The status, the shape of the body and the field in the error are checked.
"""

import copy
import functools
import json
import re
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.api.fakes import Api
from tests.api.post_routes import answers, prepare
from tests.api.test_api_shapes import check as check_error
from tests.api.test_api_shapes import dialect_of
from tests.helpers.depth import deep_but

# Values of another type than the field, by the type of the field.
NO_NUMBER = ("x", [], {}, True)
NO_COUNT = (*NO_NUMBER, 1.5)
NO_FLAG = ("yes", 2, [], {})
NO_TEXT = (1, [], {}, True)
NO_LIST = ("x", 1, {}, True)
NO_OBJECT = ("x", 1, [], True)


@dataclass(frozen=True, slots=True)
class Case:
    """A request. named: what the message of the error must contain ("" = it is accepted)."""

    path: str
    body: dict[str, Any]
    field: str
    value: Any
    named: str = ""

    @property
    def id(self) -> str:
        """The id of the test."""
        shown = json.dumps(self.value)
        return f"{self.path} {self.field}={shown[:40]}"


def with_value(body: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    """Return a copy of `body` with a value at `field`, such as "options.seed"."""
    made = copy.deepcopy(body)
    *places, last = field.split(".")
    inner = made
    for place in places:
        inner = inner.setdefault(place, {})
    inner[last] = value
    return made


def accepted(path: str, body: dict[str, Any], fields: dict[str, tuple[Any, ...]]) -> list[Case]:
    """Return a case for each value, which the endpoint accepts."""
    return [
        Case(path, with_value(body, field, value), field, value)
        for field, values in fields.items()
        for value in values
    ]


def refused(path: str, body: dict[str, Any], fields: dict[str, tuple[Any, ...]]) -> list[Case]:
    """Return a case for each value, which the endpoint refuses with 400 and the field's name."""
    return [
        Case(path, with_value(body, field, value), field, value, field.rpartition(".")[2])
        for field, values in fields.items()
        for value in values
    ]


def without(path: str, body: dict[str, Any], *fields: str) -> list[Case]:
    """Return a case for each required field, which the body lacks."""
    return [
        Case(path, {k: v for k, v in body.items() if k != field}, field, None, field)
        for field in fields
    ]


def cases(*tables: list[Case]) -> pytest.MarkDecorator:
    """Return the decorator of a test that gets each case as `case`.

    Of each field of a path, one accepted and one refused value are not deep.
    """
    every = [case for table in tables for case in table]
    kept: dict[tuple[str, str, bool], Case] = {}
    for case in every:
        kept.setdefault((case.path, case.field, bool(case.named)), case)
    some = deep_but(list(kept.values()), every)
    return pytest.mark.parametrize("case", some, ids=lambda case: case.id)


@functools.cache
def server(pooling: str = "none") -> Api:
    """The app that all cases share; pooling: of the model, such as "last" for embeddings."""
    api = Api(answers)
    prepare(api.context, pooling)
    return api


def run(case: Case, pooling: str = "none") -> None:
    """Send a case to the app that all cases share, and check the response."""
    run_on(server(pooling), case)


def run_on(api: Api, case: Case) -> None:
    """Send a case, and check its status and the format of its response."""
    response = api.post(case.path, **case.body)
    if not case.named:
        assert response.status_code == 200, response.text
        return
    tei = dialect_of(case.path) == "tei"
    assert response.status_code in ((400, 413, 422) if tei else (400,)), response.text
    assert re.search(rf"\b{re.escape(case.named)}\b", response.text), response.text
    check_error(response.content, dialect_of(case.path), case.id)
    assert api.engine.running == 0
    assert api.context.active_sequences == 0


def ask(
    api: Api, method: str, path: str, status: int, named: str = "", **request: Any
) -> httpx.Response:
    """Send a request, check its status and the format of its error, and return the response.

    named: what the error must contain.
    """
    response = api.request(method, path, **request)
    assert response.status_code == status, response.text
    if status >= 400:
        assert named in response.text, response.text
        check_error(response.content, dialect_of(path.partition("?")[0]), f"{method} {path}")
    return response
